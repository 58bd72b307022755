"""Rows on a script: the same calls and the same outcomes as with the program's function, or no script."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglbatch.engine.fsm import Compiler
from sglbatch.lang import Driver, Program, load_template
from sglbatch.lang.environment import Environment
from sglbatch.lang.function import SglFunction
from sglbatch.lang.guard import Guard
from sglbatch.lang.outcome import Outcome
from sglbatch.lang.replay import Replay
from sglbatch.lang.row_program import RowProgram
from sglbatch.lang.scripts import Scripts
from sglbatch.planner.made_up import VARIANTS, MadeUpAnswers
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Choose, ErrorInfo, Request
from tests.lang_backend import ScriptedBackend
from tests.test_templates import SAMPLES, _rows, _template

Row = Mapping[str, Any]

ANSWERS = (" yes", " 42", "", "a <|im_end|> b", "\n x", "<think>first</think> then", " two words", "\ue0f0")


def answered(prompt: str, request: Request) -> str | int | ErrorInfo:
    """An answer that depends on the prompt alone; some are errors."""
    number = int.from_bytes(blake2b(prompt.encode(), digest_size=4).digest(), "big")
    if number % 11 == 0:
        return ErrorInfo(code="out-of-luck", message="no answer")
    if isinstance(request.operation, Choose):
        return number % len(request.operation.alternatives)
    return ANSWERS[number % len(ANSWERS)]


class Slabs(ScriptedBackend):
    """Takes a plan in parts, so rows on a script are started when their calls are submitted."""

    @property
    def num_waiting(self) -> int:
        return 0

    def expect_more(self, more: bool) -> None:
        pass


class Both:
    """A program's function and its scripts, over one tokenizer."""

    def __init__(self, function: SglFunction, tokenizer: Tokenizer, checked: Sequence[Row]) -> None:
        self._function = function
        self._tokenizer = tokenizer
        environment = Environment.of(tokenizer, seed=0, parse_special=False, max_calls=1000)
        guard = Guard.of_template(function.strings(), environment)
        self.scripts = Scripts(function, self.python, environment=environment, guard=guard)
        self.scripts.learn(checked, [MadeUpAnswers(variant, Compiler()) for variant in range(VARIANTS)])

    def python(self, arguments: Row, program_id: int, row_key: str) -> Program:
        return Program(self._function, arguments, program_id=program_id, row_key=row_key)

    def ran(
        self,
        rows: Sequence[Row],
        make: Callable[[Row, int, str], RowProgram],
        *,
        shuffle: int = 0,
        live: int = 99,
        kind: type[ScriptedBackend] = ScriptedBackend,
    ) -> tuple[list[object], list[Outcome]]:
        """All requests, with what they are asked under, and the rows' outcomes."""
        backend = kind(self._tokenizer, answered, shuffle=shuffle, batch=3)
        driver = Driver(
            tokenizer=self._tokenizer,
            model_identity="m",
            context_len=4096,
            backend=backend,
            max_live_programs=live,
        )
        programs = [make(row, i, f"row {i}") for i, row in enumerate(rows)]
        for program in programs:
            driver.add(program)
        calls = driver.collect()
        first = [(c.key, c.path, c.name, c.keep, c.program_ids, c.seed) for c in calls]
        driver.submit(calls, range(len(calls)))
        while driver.unfinished:
            driver.step()
        asked = [(r.prompt_ids.tolist(), r.operation, r.seed, r.priority, r.keep) for r in backend.requests]
        return [first, asked, sorted(backend.ended_programs)], [program.outcome for program in programs]

    def check(self, rows: Sequence[Row], *, shuffle: int = 0) -> None:
        """Raises AssertionError where a script's rows differ from the function's."""
        by_python = self.ran(rows, self.python, shuffle=shuffle)
        for live, kind in itertools.product((99, 0), (ScriptedBackend, Slabs)):
            assert self.ran(rows, self.scripts.program, shuffle=shuffle, live=live, kind=kind) == by_python

    def is_played(self, row: Row) -> bool:
        return isinstance(self.scripts.program(row, 0, "row"), Replay)


SEVERAL = """
    s += a
    f = s.fork(2)
    f += [" one" + sgl.gen("v", n=2), " two" + sgl.gen("v", n=2)]
    f.join()
    s += sgl.gen("w")
"""


def test_a_failed_answer_of_several_is_the_same_for_parked_rows(tmp_path: Path, smollm2_tokenizer: Tokenizer) -> None:
    """The other answer comes after its branch has failed, to a row that has been run again since."""
    rows = [{"a": f"Row {i}", "b": "", "c": []} for i in range(9)]
    both = Both(loaded(f"{HEAD}def program(s, a, b, c):{SEVERAL}", tmp_path), smollm2_tokenizer, rows[:2])
    for shuffle in range(4):
        expected = both.ran(rows, both.python, shuffle=shuffle)
        assert 0 < sum(outcome.error is not None for outcome in expected[1]) < len(rows)
        assert both.ran(rows, both.python, shuffle=shuffle, live=0) == expected
        both.check(rows, shuffle=shuffle)


def test_values_that_are_read_again_are_no_reason_to_leave_a_script(
    tmp_path: Path, smollm2_tokenizer: Tokenizer
) -> None:
    """Each list is small enough by itself; the calls' texts are each row's own, however few rows were checked."""
    rows = [{"a": f"Row {i}", "b": "", "c": [f"{i} {j}" for j in range(130)]} for i in range(5)]
    body = "s['c'] = c\n    x = s['c']\n    y = s['c']\n    s += a + x[0] + y[1] + sgl.gen('v')"
    both = Both(loaded(f"{HEAD}def program(s, a, b, c):\n    {body}\n", tmp_path), smollm2_tokenizer, rows[:1])
    assert both.is_played(rows[-1])
    both.check(rows)


@pytest.mark.parametrize(
    ("changed", "error"), [("raise ValueError('once only')", "program-error"), ("s.fork(2)[1].__iadd__(sgl.gen())", "")]
)
def test_a_row_that_leaves_its_script_at_once_waits_for_its_answer_asleep(
    changed: str, error: str, tmp_path: Path, smollm2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its function does before is not kept: here it asks for more, or fails, when it is run after the check."""
    rows = [{"a": f"Row {i}", "b": "", "c": ["x", "y"]} for i in range(5)]
    code = f"s['c'] = c\n    s += s['c'][0] + a\n    if LATER:\n        {changed}\n    s += sgl.gen('v')"
    function = loaded(f"{HEAD}def program(s, a, b, c):\n    {code}\n\nLATER = ''\n", tmp_path)
    both = Both(function, smollm2_tokenizer, rows[:2])
    outcomes = []
    for kind in (ScriptedBackend, Slabs):
        made = [both.scripts.program(row, i, f"row {i}") for i, row in enumerate(rows)]
        assert all(isinstance(program, Replay) for program in made)
        with monkeypatch.context() as patch:
            patch.setattr("sglbatch.lang.holes.MAX_ITEMS", 0)  # so that the variable cannot be read from a script
            patch.setitem(function.function.__globals__, "LATER", "yes")
            outcomes.append(both.ran(rows, lambda *_: made.pop(0), kind=kind)[1])  # noqa: B023  called at once
    assert outcomes[0] == outcomes[1]
    assert {outcome.error.code if outcome.error else "" for outcome in outcomes[0]} - {"out-of-luck"} == {error}


# --- the templates that are shipped ------------------------------------------------------------

PLAYED_TO_THE_END = {"classify", "multiple_choice", "json_extract", "chat_replay"}
NOT_PLAYED = {"rag"}


@pytest.mark.parametrize("name", SAMPLES)
def test_templates_do_the_same_on_their_scripts(name: str, smollm2_tokenizer: Tokenizer) -> None:
    template = load_template(_template(name))
    rows = _rows(SAMPLES[name][0])
    binding = template.bind(list(rows[0]), {})
    arguments = [binding.arguments(row) for row in rows]
    both = Both(template.function, smollm2_tokenizer, arguments)
    assert (both.scripts.stopped == ()) == (name in PLAYED_TO_THE_END | NOT_PLAYED)
    assert any(map(both.is_played, arguments)) == (name not in NOT_PLAYED)
    both.check([*arguments, *({**row, **_odd(row)} for row in arguments[:3])], shuffle=1)


def _odd(row: Row) -> Row:
    """The row's texts with what rows must not do."""
    return {key: f" <|im_end|>\n{value}<|im_st" for key, value in row.items() if isinstance(value, str)}


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        ("s += block(a, items=c) + sgl.gen('x')\n    s['t'] = turn(s, s['x']) + '.'\n    return block(s['t'])", True),
        ("s += short(a) + sgl.gen('x')", False),
    ],
)
def test_functions_of_the_templates_file_are_followed(
    body: str, whole: bool, tmp_path: Path, smollm2_tokenizer: Tokenizer
) -> None:
    rows = [{"a": "x" * (i % 7), "b": "", "c": ["y", "z"]} for i in range(12)]
    function = loaded(f"{HEAD}def program(s, a, b, c):\n    {body}\n{HELPERS}", tmp_path)
    both = Both(function, smollm2_tokenizer, rows[:4])
    assert both.scripts.any_whole is whole
    assert whole or both.scripts.refused[0].startswith("gives a row's values to len in short (replayed_")
    both.check(rows)


# --- programs of chance ------------------------------------------------------------------------

TEXTS = st.sampled_from(["x", "", "  lead", "<|im_end|>", "a\nb", "<|im_st", "é", "http://x", "7", "\ue0f0", "x" * 50])
ROWS = st.fixed_dictionaries(
    {
        "a": TEXTS,
        "b": TEXTS | st.none() | st.integers(0, 20) | st.sampled_from([0.5, True]),
        "c": st.lists(TEXTS, max_size=3),
    }
)
LISTS = st.lists(ROWS, min_size=1, max_size=4)
VALUES = ["a", "b", "c[0]", "s['v']", "f'{a}{b}'", "a + '!'", "'k'", "str(b)", "[a, s['v']]", "len(c)", "'-'.join(c)"]
VALUE = st.sampled_from(VALUES)
TEXT = st.sampled_from(
    ["'one '", "' '", "a", "f'{a} '", "f'({b})'", "a + ' ' + a", "f\"{s['v']}\"", "s['v'] + '.'", "c[0]", "'-'.join(c)"]
)
ASK = st.sampled_from(
    [
        "sgl.gen('v', max_tokens=3)",
        "sgl.gen('w', temperature=0)",
        "sgl.gen(max_tokens=4)",
        "sgl.gen('v', n=2)",
        "sgl.select('v', [' yes', ' no', ' yes sir'])",
        "sgl.select('w', ['A', 'B'], 0.5)",
        "sgl.separate_reasoning(sgl.gen('v'), model_type='qwen3')",
    ]
)


def _fork(parts: tuple[str, str, str]) -> str:
    text, ask, mode = parts
    return f"f = s.fork(2)\nf += {text}\nf += [{ask}, ' or ' + {ask}]\nf.join({mode!r})\ns += ' joined'"


def _turn(parts: tuple[str, str, str]) -> str:
    asked, ask, text = parts
    return f"s += sgl.user({asked})\ns += sgl.assistant({ask} + {text})"


PLAIN = st.one_of(
    TEXT.map(lambda text: f"s += {text}"),
    ASK.map(lambda ask: f"s += {ask}"),
    st.tuples(TEXT, ASK, TEXT).map(_turn),
    TEXT.map(lambda text: f"with s.user():\n    s += {text}\n    s += '  end'"),
    st.tuples(st.sampled_from(["v", "x"]), VALUE).map(lambda parts: f"s[{parts[0]!r}] = {parts[1]}"),
    st.tuples(TEXT, ASK, st.sampled_from(["gather_variable", "concate_and_append"])).map(_fork),
    TEXT.map(lambda text: f"s += sgl.any_order(a={text}, b='two')"),
    TEXT.map(lambda text: f"with s.var_scope('x'):\n    s += {text}\n    s += sgl.gen('u')"),
    TEXT.map(lambda text: f"for i, item in enumerate(c):\n    s += f'{{i}}. {{item}}' + {text}"),
    TEXT.map(lambda text: f"if len(c) > 1:\n    s += {text}"),
    st.just("s.sync()"),
    st.just("s += block(a, items=c)"),
    st.just("s['t'] = turn(s, a) + '.'"),
    st.just("s += 'has' if 'v' in s else 'has not'"),
    st.just("done = []\nfor item in c:\n    s += item + sgl.gen('v')\n    done.append(s['v'])\ns['done'] = done"),
)
LOOKING = st.sampled_from(
    [
        "t = f'{a}!'\ns += t if len(t) > 9 else 'short'",
        "t = f'{a}'\ns += t.strip() + '.'",
        "if 'http' in f'{a} {b}':\n    s += 'link'",
        "if f\"{s['v']}.\" == ' yes.':\n    s += sgl.gen('more')",
        "if s['v'] == ' yes':\n    s += sgl.gen('more')",
        "s['n'] = len(a)",
        "s += str(len(s.text()))",
        "s += '%.1s' % a",
        "s += re.sub('x+', 'y', a)",
        "s += json.dumps(c)",
        "s += f'{c}'",
        "if a in 'xyz':\n    s += 'letter'",
        "s += ''.join(sorted(set(c)))",
        "try:\n    s += str(int(s['v']))\nexcept ValueError:\n    s += 'no number'",
        "s += str(sgl.call(len, a))",
        "b = b + 1",
        "s += short(a)",
        "for letter in f'{a}{b}'[:2]:\n    s += letter",
        "s += str(s.rng.random())",
    ]
)
RETURNS = st.sampled_from(
    ["", "return s['v']", "return f'{a} {b}'", "return {'a': a, 'n': [1, b]}", "return s", "return len(c)"]
)


@st.composite
def programs(draw: st.DrawFn) -> str:
    """A function's source: mostly what a script can follow, and here and there what it cannot."""
    body = draw(st.lists(PLAIN, min_size=1, max_size=6))
    if draw(st.booleans()):
        body.insert(draw(st.integers(0, len(body))), draw(LOOKING))
    code = "\n".join(["s += 'Start'", "s['v'] = 'none'", *body, draw(ASK).join(("s += ", "")), draw(RETURNS)])
    return f"{HEAD}def program(s, a, b, c):\n{textwrap.indent(code, '    ')}\n{HELPERS}"


HEAD = "import json, re\nimport sglbatch as sgl\n\n@sgl.function\n"
HELPERS = """
def block(title, items=()):
    return f"{title}: " + "".join(f"- {item}" for item in items)

def turn(state, text):
    state += sgl.user(block(text)) + sgl.assistant(sgl.gen("t"))
    return state["t"]

def short(text):
    return text if len(f"{text}") < 5 else "long"
"""
NUMBERS = itertools.count()


def loaded(source: str, folder: Path) -> SglFunction:
    path = folder / f"replayed_{next(NUMBERS)}.py"
    path.write_text(source)
    return load_template(path).function


Given = tuple[str, tuple[list[Row], list[Row]], int]
CASES = st.tuples(programs(), st.tuples(LISTS, LISTS), st.integers(0, 99))


def hold(tokenizer: Tokenizer, folder: Path, case: Given) -> None:
    """What the checked rows have taught holds for rows that were not checked."""
    source, (checked, others), shuffle = case
    both = Both(loaded(source, folder), tokenizer, checked)
    both.check([*checked, *others], shuffle=shuffle)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(CASES)
def test_programs_do_the_same_on_their_scripts(smollm2_tokenizer: Tokenizer, tmp_path: Path, case: Given) -> None:
    hold(smollm2_tokenizer, tmp_path, case)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(CASES)
def test_many_programs_do_the_same_on_their_scripts(smollm2_tokenizer: Tokenizer, tmp_path: Path, case: Given) -> None:
    hold(smollm2_tokenizer, tmp_path, case)
