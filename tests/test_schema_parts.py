"""The pieces that schemas are compiled from: number sets, text sets, patterns, formats; against naive versions."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sglbatch.engine.fsm.automaton import Automaton
from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.product import combine
from sglbatch.engine.fsm.regex import compile_regex
from sglbatch.engine.fsm.schema_formats import FORMATS, format_automaton
from sglbatch.engine.fsm.schema_numbers import NumberSet, number_and, number_automaton, number_not, number_text
from sglbatch.engine.fsm.schema_patterns import pattern_automaton
from sglbatch.engine.fsm.schema_texts import TextSet, text_and, text_not
from sglbatch.errors import ConstraintError

values = st.builds(Fraction, st.integers(-300, 300), st.sampled_from([1, 2, 10, 100]))
bounds = st.none() | st.tuples(values, st.booleans())
number_sets = st.builds(
    NumberSet,
    integer=st.sampled_from([None, True, False]),
    low=bounds,
    high=bounds,
    multiples=st.frozensets(st.sampled_from([Fraction(3), Fraction(1, 10), Fraction(1, 4)]), max_size=1),
    other_than=st.frozensets(st.sampled_from([Fraction(2)]), max_size=1),
    excluded=st.frozensets(values, max_size=2),
) | st.builds(NumberSet, values=st.frozensets(values, min_size=1, max_size=3))


@settings(max_examples=60, deadline=None)
@given(numbers=number_sets, samples=st.lists(values, min_size=30, max_size=30))
def test_a_number_automaton_takes_the_texts_of_its_numbers(numbers: NumberSet, samples: list[Fraction]) -> None:
    try:
        automaton = number_automaton(numbers)
    except ConstraintError as error:
        assert error.code == "constraint-too-large"
        return
    for value in samples:
        accepted = automaton is not None and automaton.accepts(number_text(value).encode())
        assert accepted == numbers.holds(value), value


@given(a=number_sets, b=number_sets, value=values)
def test_number_sets_are_closed_under_and_and_not(a: NumberSet, b: NumberSet, value: Fraction) -> None:
    both = number_and(a, b)
    assert (both is not None and both.holds(value)) == (a.holds(value) and b.holds(value))
    assert any(other.holds(value) for other in number_not(a)) != a.holds(value)


PATTERNS = ["a*b", "[ab]{2}", "(?s).*", "b|ab|", "[^a]", "é+a?"]
text_sets = st.one_of(
    st.builds(TextSet, words=st.frozensets(st.text("abé", max_size=3), min_size=1, max_size=3)),
    st.builds(TextSet, excluded=st.frozensets(st.text("abé", max_size=3), max_size=3), least=st.integers(0, 2)),
    st.builds(TextSet, most=st.integers(1, 3)),
    st.builds(lambda pattern: TextSet(base=compile_regex(pattern)), st.sampled_from(PATTERNS)),
)


@settings(max_examples=200, deadline=None)
@given(a=text_sets, b=text_sets, texts=st.lists(st.text("abéz", max_size=4), min_size=10, max_size=10))
def test_text_sets_are_closed_under_and_and_not(a: TextSet, b: TextSet, texts: list[str]) -> None:
    both = text_and(a, b, Budget())
    others = text_not(a, Budget())
    for text in texts:
        assert (both is not None and both.holds(text)) == (a.holds(text) and b.holds(text)), text
        assert any(other.holds(text) for other in others) != a.holds(text), text


@settings(max_examples=100, deadline=None)
@given(pattern=st.tuples(st.sampled_from(PATTERNS), st.sampled_from(PATTERNS)), text=st.text("abé", max_size=4))
def test_products_against_both_factors(pattern: tuple[str, str], text: str) -> None:
    left, right = map(compile_regex, pattern)
    in_left, in_right = left.accepts(text.encode()), right.accepts(text.encode())
    both, rest = combine(left, right, "and", Budget()), combine(left, right, "minus", Budget())
    assert (both is not None and both.accepts(text.encode())) == (in_left and in_right)
    assert (rest is not None and rest.accepts(text.encode())) == (in_left and not in_right)


pieces = st.sampled_from(
    ["a", "b", "^", "$", ".", "[ab]", "[^a]", r"\d", r"\W", r"\s", "(?:a|^b)", "b*", "(a|b$)", "|"]
)


@settings(max_examples=80, deadline=None)
@given(pattern=st.lists(pieces, min_size=1, max_size=4).map("".join), texts=st.lists(st.text("ab1 ", max_size=4)))
def test_patterns_are_searched_as_python_does(pattern: str, texts: list[str]) -> None:
    automaton = pattern_automaton(pattern, Budget())
    for text in texts:
        found = automaton is not None and automaton.accepts(text.encode())
        expected = re.search(pattern, text) is not None
        if "^" in pattern[1:] or "$" in pattern[:-1]:  # an anchor twice in a place matches less here, never more
            assert expected or not found, text
        else:
            assert found == expected, text


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"^(?!bad).*$", ["ok", "abad"], ["bad", "bad1"]),
        (r"^(?=.*\d)(?=.*[a-z]).{3,5}$", ["a1b", "12c4"], ["abc", "123", "a1"]),
        (r"^[\w-.]+$", ["a-b.c"], ["a b"]),
        (r"^(?<year>\d{4})$", ["2024"], ["24"]),
        (r"^\u{1F600}\/$", ["😀/"], ["/"]),
        (r"^\D\S$", ["aé"], ["٣a", "a\u3000"]),
        (r"^[^\d]$", ["é"], ["1", "٣"]),
    ],
)
def test_ecma_patterns(pattern: str, matching: list[str], others: list[str]) -> None:
    automaton = pattern_automaton(pattern, Budget())
    assert automaton is not None
    assert [text for text in matching if not automaton.accepts(text.encode())] == []
    assert [text for text in others if automaton.accepts(text.encode())] == []


@pytest.mark.parametrize("pattern", [r"a(?!b)", r"(?<=a)b", r"(a)\1", r"\bword\b", r"\p{L}"])
def test_patterns_that_cannot_be_enforced(pattern: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        pattern_automaton(pattern, Budget())
    assert caught.value.code == "unsupported-regex"


def _walk(automaton: Automaton, source: random.Random) -> str | None:
    state, data = automaton.start, bytearray()
    while not automaton.accepting[state] or source.random() > 0.2:
        live = np.flatnonzero(automaton.table[state] >= 0)
        if not len(live):
            break
        byte = int(source.choice(live))
        data.append(byte)
        state = automaton.step(state, byte)
    return data.decode()


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_no_wider_than_what_jsonschema_checks(name: str) -> None:
    checker = Draft202012Validator.FORMAT_CHECKER
    assert name in checker.checkers, "jsonschema's format extra is installed"
    automaton, source = format_automaton(name), random.Random(name)
    texts = [text for _ in range(150) if (text := _walk(automaton, source)) is not None]
    assert [text for text in texts if not checker.conforms(text, name)] == []


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("date", ["2000-02-29", "1999-12-31"]),
        ("date-time", ["2024-01-02T03:04:05Z", "2024-01-02T03:04:05.123+01:00"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT1H", "P2W"]),
        ("email", ["a.b@example.com", "x+y@mail.example.org"]),
        ("hostname", ["example.com", "a-b.c"]),
        ("uri", ["https://example.com/a/b?c=d#e", "urn:isbn:123", "mailto:a@b.c"]),
        ("ipv4", ["127.0.0.1", "255.255.255.255"]),
        ("ipv6", ["::1", "2001:db8::8a2e:370:7334", "::ffff:1.2.3.4"]),
    ],
)
def test_formats_take_the_usual_texts(name: str, texts: list[str]) -> None:
    automaton = format_automaton(name)
    assert [text for text in texts if not automaton.accepts(text.encode())] == []
