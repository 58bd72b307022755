"""compile_regex against Python's own matcher, and what it must refuse."""

from __future__ import annotations

import random
import re
import string
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.engine.fsm import Automaton, compile_regex
from sglbatch.engine.fsm.budget import Budget
from sglbatch.errors import ConstraintError

CHARACTERS = "abzABZ019_ -\n\té߿ࠀ€\ud7ff\ue000\uffff😀\U0010ffffKſ"
RECORD = (
    r'\{\n  "name": "[A-Za-z ]{3,24}",\n  "category": "(person|place|organisation|work|event)",\n'
    r'  "first_mentioned_year": [1-9][0-9]{3},\n  "related": \["[a-z]{3,12}", "[a-z]{3,12}"\]\n\}'
)


@dataclass(frozen=True)
class Example:
    """A regex and a text that was made along it."""

    pattern: str
    text: str


@st.composite
def _single(draw: st.DrawFn) -> Example:
    character = draw(st.sampled_from(CHARACTERS))
    other = draw(st.sampled_from(CHARACTERS))
    low, high = sorted((character, other))
    pattern = draw(
        st.sampled_from(
            [
                re.escape(character),
                f"[{re.escape(character)}{re.escape(other)}]",
                f"[^{re.escape(other)}]",
                f"[^{re.escape(other)}\\d]",
                f"[{re.escape(low)}-{re.escape(high)}]",
                f"[^{re.escape(low)}-{re.escape(high)}]",
                f"\\U{ord(character):08x}",
                *(("\\d", "\\D", "\\w", "\\W", "\\s", "\\S", ".", "(?s:.)", "[\\w-]", "[^\\W_]")),
            ]
        )
    )
    if draw(st.booleans()):
        pattern = f"(?i:{pattern})" if character.isascii() and other.isascii() else f"(?s:{pattern})"
    return Example(pattern, character)


@st.composite
def _compound(draw: st.DrawFn, inner: st.SearchStrategy[Example]) -> Example:
    first, second = draw(inner), draw(inner)
    kind = draw(st.sampled_from(["concat", "union", "repeat", "group", "optional"]))
    if kind == "concat":
        return Example(f"{first.pattern}{second.pattern}", first.text + second.text)
    if kind == "union":
        return Example(f"(?:{first.pattern}|{second.pattern})", draw(st.sampled_from([first.text, second.text])))
    if kind == "group":
        return Example(draw(st.sampled_from(["({})", "(?:{})", "(?s:{})"])).format(first.pattern), first.text)
    lazy = draw(st.sampled_from(["", "?"]))
    if kind == "optional":
        return Example(f"(?:{first.pattern})?{lazy}", draw(st.sampled_from(["", first.text])))
    least = draw(st.integers(0, 2))
    most = least + draw(st.integers(0, 2))
    bounds = draw(st.sampled_from([f"{{{least},{most}}}", f"{{{least}}}", f"{{{least},}}", "*", "+"]))
    return Example(f"(?:{first.pattern}){bounds}{lazy}", first.text * draw(st.integers(least, most)))


@st.composite
def examples(draw: st.DrawFn) -> Example:
    example = draw(st.recursive(_single(), _compound, max_leaves=8))
    before, after = draw(st.sampled_from(["", "^", r"\A", "(?m)^"])), draw(st.sampled_from(["", "$", r"\Z"]))
    return Example(before + f"(?:{example.pattern})" + after, example.text)


def _mutations(text: str, source: random.Random) -> list[str]:
    """The text, and others a few edits away from it."""
    texts = [text, "", text + text]
    for _ in range(12):
        at = source.randrange(len(text) + 1)
        piece = "".join(source.choices(CHARACTERS, k=source.randrange(3)))
        texts.append(text[:at] + piece + text[at + source.randrange(3) :])
    return texts


def _walk(automaton: Automaton, source: random.Random) -> bytes | None:
    """A random accepted text of at most 30 bytes, or None where the walk was longer."""
    state, data = automaton.start, b""
    while len(data) < 30:
        ways = [byte for byte in range(256) if automaton.table[state, byte] >= 0]
        if automaton.accepting[state] and (not ways or source.random() < 0.3):
            return data
        data += bytes([source.choice(ways)])
        state = automaton.step(state, data[-1])
    return None


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text, re.ASCII) is not None


@settings(max_examples=300, deadline=None)
@given(example=examples(), source=st.randoms(use_true_random=False))
def test_accepts_what_python_matches(example: Example, source: random.Random) -> None:
    try:
        automaton = compile_regex(example.pattern)
    except ConstraintError as error:
        assert error.code in ("empty-regex", "unsatisfiable-regex")
        texts = ["", *(CHARACTERS if error.code == "empty-regex" else example.text)]
        assert not any(_matches(example.pattern, text) for text in texts[error.code == "empty-regex" :])
        return
    for text in _mutations(example.text, source):
        assert automaton.accepts(text.encode()) == _matches(example.pattern, text), (example.pattern, text)
    for _ in range(5):
        data = _walk(automaton, source)
        assert data is None or _matches(example.pattern, data.decode()), (example.pattern, data)


@pytest.mark.parametrize(
    "pattern", [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", "(?s).", "[^a]", "(?i)[a-f]", "é|[ÿ-Ā]"]
)
def test_every_character_of_a_class(pattern: str) -> None:
    automaton = compile_regex(pattern)
    expected = re.compile(pattern, re.ASCII)
    codes = [*range(0x3000), *range(0xD700, 0xD800), *range(0xE000, 0xE100), *range(0xFF00, 0x10100), 0x1F600, 0x10FFFF]
    for code in codes:
        assert automaton.accepts(chr(code).encode()) == bool(expected.fullmatch(chr(code))), hex(code)


def test_bytes_that_are_no_text_are_rejected() -> None:
    automaton = compile_regex("(?s).+")
    for data in (
        b"\xff",
        b"\xc0\x80",
        b"\xe0\x80\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xf5\x80\x80\x80",
        b"\xc3",
    ):
        assert not automaton.accepts(data), data


@pytest.mark.parametrize(
    ("pattern", "accepted", "rejected"),
    [
        (r"^a$", "a", "a\n"),
        (r"^a|^b$", "b", "ab"),
        (r"(^a)?b", "ab", "aab"),
        (r"(?x) a  b # comment", "ab", "a b"),
        (r"a(?#comment)b", "ab", "a(?#comment)b"),
        (r"(?P<name>a)b", "ab", "a"),
        (r"\u00e9\x41\N{BULLET}", "éA•", "é"),
        (r"(?i:yes)|(?-i:no)", "yEs", "NO"),
        (r"(?i)K", "k", "\u212a"),
        (r"\d+", "12", "\u0661"),
        (r"\w+", "word", "é"),
        (r"a{2,3}?", "aa", "aaaa"),
        (r"(?!a){0}b", "b", "ab"),
        (r"[a-\x7f]+", "az", "A"),
    ],
)
def test_constructs(pattern: str, accepted: str, rejected: str) -> None:
    automaton = compile_regex(pattern)
    assert automaton.accepts(accepted.encode())
    assert not automaton.accepts(rejected.encode())


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"a(?=b)", "lookahead (?=...)"),
        (r"a(?!b)", "lookahead (?!...)"),
        (r"(?!)", "lookahead (?!...)"),
        (r"(?<=a)b", "lookbehind (?<=...)"),
        (r"(?<!a)b", "lookbehind (?<!...)"),
        (r"(a)\1", r"backreference (\1)"),
        (r"(?P<x>a)(?P=x)", r"backreference (\1)"),
        (r"(a)?(?(1)b|c)", "conditional group"),
        (r"a*+a", "possessive quantifier"),
        (r"a{2,3}+", "possessive quantifier"),
        (r"(?>a|ab)c", "atomic group (?>...)"),
        (r"\ba", r"word boundary \b"),
        (r"\Ba", r"word boundary \B"),
        (r"a^b", r"anchor ^ or \A inside"),
        (r"(^a){2}", r"anchor ^ or \A inside"),
        (r"(^a)*", r"anchor ^ or \A inside"),
        (r"a$b", r"anchor $ or \Z inside"),
        (r"(a|b\Z)c", r"anchor $ or \Z inside"),
        (r"\p{L}+", r"\p{..} (Unicode property)"),
        (r"(?u)\w", "flag (?u)"),
        (r"(?u:\w)", "flag (?u)"),
        (r"(?i)été", "flag (?i) with the non-ASCII letter 'é'"),
    ],
)
def test_refused_by_name(pattern: str, name: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        compile_regex(pattern)
    assert caught.value.code == "unsupported-regex"
    assert name in caught.value.message
    assert caught.value.hint


def test_invalid_regex_says_what_and_where() -> None:
    with pytest.raises(ConstraintError) as caught:
        compile_regex("ab[c")
    assert caught.value.code == "invalid-regex"
    assert caught.value.message == "the regex 'ab[c' is not valid: unterminated character set at position 2"


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        ("", "empty-regex"),
        ("^$", "empty-regex"),
        ("(|)*", "empty-regex"),
        ("(?:a{0}){5}", "empty-regex"),
        ("[^\\x00-\\U0010ffff]", "unsatisfiable-regex"),
        ("a\\ud800", "unsatisfiable-regex"),
        ("a{99999999999}", "invalid-regex"),
        ("(" * 5000 + "a" + ")" * 5000, "constraint-too-large"),
    ],
)
def test_patterns_of_no_use(pattern: str, code: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        compile_regex(pattern)
    assert caught.value.code == code
    assert caught.value.hint


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)*a(a|b){20}",
        "(a{0,200}b?){0,200}",
        "((a?){300}){300}",
        "((((){10000}){10000}){10000}){10000}",
        "a{1000000000}",
        "(?s)(.{1000}){1000}",
    ],
)
def test_too_large_is_refused_in_time(pattern: str) -> None:
    started = time.process_time()
    with pytest.raises(ConstraintError) as caught:
        compile_regex(pattern)
    assert caught.value.code == "constraint-too-large"
    assert caught.value.hint
    assert time.process_time() - started < 10


def test_budget_of_the_caller() -> None:
    compile_regex("[ab]{30}", Budget(max_states=31))
    with pytest.raises(ConstraintError, match="more than 30 automaton states"):
        compile_regex("[ab]{30}", Budget(max_states=30))
    with pytest.raises(ConstraintError, match="more than 100 steps"):
        compile_regex("[ab]{30}", Budget(max_work=100))


@pytest.mark.parametrize(
    ("pattern", "num_states"),
    [
        ("[A-Za-z ]{3,24}", 25),
        ("-?(0|[1-9][0-9]{0,17})", 20),
        ("(a|b)*a(a|b){12}", 8192),
        (r"(\w+ ){1,50}", 101),
        (".{0,500}", 501 + 500 * 7),
        ("abc|xbc|(a|x)bd", 4),
    ],
)
def test_is_minimal(pattern: str, num_states: int) -> None:
    assert compile_regex(pattern).num_states == num_states


def test_many_words_and_a_record() -> None:
    source = random.Random(0)
    words = {"".join(source.choices(string.ascii_lowercase, k=source.randint(3, 12))) for _ in range(1000)}
    automaton = compile_regex("|".join(sorted(words)))
    for word in words:
        assert automaton.accepts(word.encode())
        assert automaton.accepts(word[:-1].encode()) == (word[:-1] in words)
    record = compile_regex(RECORD)
    text = (
        '{\n  "name": "Ada Lovelace",\n  "category": "person",\n  "first_mentioned_year": 1843,\n'
        '  "related": ["engine", "babbage"]\n}'
    )
    assert record.accepts(text.encode())
    assert not record.accepts(text.replace("1843", "0843").encode())
