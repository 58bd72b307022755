"""``--schema``: the gen that it is for, and what is said where there is none or two."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

import sglbatch as sgl
from sglbatch.lang.last_gen import last_gen
from sglbatch.lang.schemas import Record
from sglbatch.lang.template_file import load_template
from sglbatch.types import Choose, ErrorInfo, Request
from tests.job_world import World

FREE = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
TEMPLATE = "import sglbatch as sgl\n\n@sgl.function(temperature=0)\ndef two(s, q):\n    s += q\n"


def template(body: str) -> str:
    return TEMPLATE + textwrap.indent(textwrap.dedent(body), "    ")


@pytest.mark.parametrize(
    ("extra", "has"),
    [
        ('regex="[0-9]+"', "regex"),
        ("dtype=int", "dtype"),
        ('choices=["x", "y"]', "choices"),
        ('json_schema={"type": "integer"}', "json_schema"),
    ],
)
def test_a_gen_with_a_constraint_of_its_own_takes_no_schema(tmp_path: Path, extra: str, has: str) -> None:
    path = tmp_path / "two.py"
    path.write_text(template(f's += sgl.gen("thought")\ns += sgl.gen("answer", max_tokens=8, {extra})\n'))
    with pytest.raises(sgl.SglbatchError) as caught:
        load_template(path).record(json.dumps(FREE))
    error = caught.value
    assert (error.code, error.where) == ("constrained-record", f"{path}:7")
    assert "'answer'" in error.message and has in error.message
    assert error.hint is not None and "--schema" in error.hint


@pytest.mark.parametrize("argument", ["regex=None", "dtype=None, choices=None", "max_tokens=8"])
def test_arguments_that_constrain_nothing_are_no_constraint(argument: str) -> None:
    assert last_gen(f's += gen("a", {argument})') == "a"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("s += gen('a') + gen(name='b')", "b"),
        ("if q:\n    s += gen('a')\ns += gen('b')", "b"),
        ("if not q:\n    return\ns += gen('b')", "b"),
        ("if q:\n    s += gen('b')", "b"),
        ("if q:\n    s += gen('b', max_tokens=3)\nelse:\n    s += gen('b')", "b"),
        ("for i in q:\n    s += gen('a')\n    if i:\n        break\ns += gen('b')", "b"),
        ("for i in q:\n    s += gen('b')", "b"),
        ("while True:\n    s += gen('a')\n    s += gen('b')\n    if s['b']:\n        break", "b"),
        ("try:\n    s += gen('a')\nexcept KeyError:\n    pass\nwith s.user():\n    s += gen('b')", "b"),
        ("match q:\n    case 1:\n        s += gen('b')\n    case _:\n        raise ValueError", "b"),
        ("other(s)\ns += gen('b')\nlen(s)", "b"),
        ("s += gen('b') + select('c', ['x', 'y'])", "b"),
    ],
)
def test_the_last_gen_of_every_path(body: str, name: str) -> None:
    assert last_gen("def f(s, q):\n" + textwrap.indent(body, "    ")) == name


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (
            "if q:\n    s += gen('one')\nelse:\n    s += gen('two')",
            "uncertain-record",
            "'one' (line 3) or 'two' (line 5)",
        ),
        ("s += gen('one')\nif q:\n    s += gen('two')", "uncertain-record", "'one' (line 2) or 'two' (line 4)"),
        ("s += gen('one')\nif q:\n    return\ns += gen('two')", "uncertain-record", "'one'"),
        ("s += gen('one')\nfor i in q:\n    s += gen('two')", "uncertain-record", "'two'"),
        ("for i in q:\n    s += gen('a')\n    if i:\n        break\n    s += gen('b')", "uncertain-record", "'a'"),
        ("s += gen('one') if q else gen('two')", "uncertain-record", "'one'"),
        ("s += gen('one')\nq and t(gen('two'))", "uncertain-record", "'two'"),
        ("s += gen('one')\n[gen('two') for _ in q]", "uncertain-record", "'two'"),
        ("try:\n    s += gen('one')\n    s += gen('two')\nexcept KeyError:\n    pass", "uncertain-record", "'one'"),
        ("s += gen('one')\nmatch q:\n    case 1:\n        s += gen('two')", "uncertain-record", "'two'"),
        ("s += gen('one')\nother(s)", "uncertain-record", "other(s)"),
        ("def ask():\n    return gen('two')\ns += gen('one')\ns += ask()", "uncertain-record", "ask()"),
        ("s += gen('one')\nk = lambda: gen('two')\ns += k()", "uncertain-record", "lambda"),
        ("s += gen('a') + gen('a')", "uncertain-record", "several have its name 'a' (lines 2, 2)"),
        ("s += gen(q)", "no-record", "plain name"),
        ("s += q", "no-record", "plain name"),
        ("s += gen('a')\ns += gen_int('b')", "constrained-record", "gen_int"),
    ],
)
def test_what_is_not_certain_is_an_error(body: str, code: str, said: str) -> None:
    with pytest.raises(sgl.SglbatchError) as caught:
        last_gen("def f(s, q):\n" + textwrap.indent(body, "    "))
    assert caught.value.code == code and said in caught.value.message


def test_a_row_without_the_record_is_that_rows_error(tmp_path: Path, smollm2_dir: Path) -> None:
    world = World(folder=tmp_path, model=smollm2_dir)
    world.write_template(template('if "no" in q:\n    return\ns += sgl.gen("answer", max_tokens=8)\n'))
    world.write_rows([{"q": "yes"}, {"q": "no"}])
    world.run(schema='{"type": "integer"}')
    first, second = world.output()
    assert first["_error"] is None and isinstance(first["answer"], int)
    assert second["_error"]["code"] == "no-record" and "'answer'" in second["_error"]["message"]


def test_a_gen_behind_the_record_that_the_source_does_not_show_is_the_rows_error(
    tmp_path: Path, smollm2_dir: Path
) -> None:
    world = World(folder=tmp_path, model=smollm2_dir)
    world.write_template(template("later = sgl.gen('answer')\ns += sgl.gen('thought') + later\n"))
    world.write_rows([{"q": "yes"}])
    world.run(schema='{"type": "integer"}')
    (row,) = world.output()
    assert row["_error"]["code"] == "no-record" and "'thought'" in row["_error"]["message"]


class _Choosing(World):
    """Answers a select with its first choice."""

    def _answer(self, prompt: str, request: Request) -> str | int | ErrorInfo:
        return 0 if isinstance(request.operation, Choose) else super()._answer(prompt, request)


def test_the_record_may_be_in_a_branch_or_before_a_select(tmp_path: Path, smollm2_dir: Path) -> None:
    world = _Choosing(folder=tmp_path, model=smollm2_dir)
    body = """
    s += sgl.gen("thought")
    f = s.fork(2)
    f += sgl.gen("answer")
    f.join()
    s += sgl.select("sure", ["yes", "no"])
    """
    world.write_template(template(body))
    world.write_rows([{"q": "yes"}])
    world.run(schema='{"type": "integer"}')
    (row,) = world.output()
    assert row["_error"] is None and [type(value) for value in row["answer"]] == [int, int]


def test_a_constraint_that_the_source_does_not_show_ends_the_job(tmp_path: Path, smollm2_dir: Path) -> None:
    world = World(folder=tmp_path, model=smollm2_dir)
    for options in ({"regex": "[0-9]+"}, {"choices": ["x", "y"]}):
        world.write_template(template(f's += sgl.gen("answer", **{options!r})\n'))
        world.write_rows([{"q": "yes"}])
        with pytest.raises(sgl.SglbatchError) as caught:
            world.run(schema=json.dumps(FREE))
        assert caught.value.code == "constrained-record" and caught.value.where == "two.py:6"


def test_the_record_of_statements() -> None:
    assert Record.of(FREE, "s += sgl.gen('a') + gen(name='b')").name == "b"
