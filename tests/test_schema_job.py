"""Schemas from the outside: gen(json_schema=...), --schema, typed columns, validation, the check command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

import sglbatch as sgl
from sglbatch.cli import app
from sglbatch.data import Column, OutputRow, write_output
from sglbatch.lang.primitives import gen
from sglbatch.lang.schemas import Checks, Record, schema_text
from sglbatch.lang.template_file import load_template
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, Result, Usage, VarType

ORDER = {
    "type": "object",
    "properties": {"item": {"type": "string"}, "count": {"type": "integer"}, "size": {"enum": ["S", "L"]}},
    "required": ["item", "count"],
    "additionalProperties": False,
}


class Order(BaseModel):
    item: str
    count: int
    tags: list[str] = []


def test_a_schema_may_be_a_dict_text_a_model_or_a_type() -> None:
    assert json.loads(schema_text(ORDER)) == ORDER == json.loads(schema_text(json.dumps(ORDER)))
    assert list(json.loads(schema_text(ORDER))["properties"]) == ["item", "count", "size"]
    assert schema_text(int) == '{"type":"integer"}'
    model = json.loads(schema_text(Order))
    assert list(model["properties"]) == ["item", "count", "tags"] and model["additionalProperties"] is False
    assert json.loads(schema_text(list[int])) == {"type": "array", "items": {"type": "integer"}}
    expression = gen("x", json_schema=Order)
    assert expression.constraint == Constraint(kind="json_schema", source=schema_text(Order))  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", ["{", object(), {"a": {1, 2}}, 3.5, '"int"', "[1]", "5"])
def test_what_is_no_schema_is_a_mistake_of_the_template(bad: Any) -> None:
    with pytest.raises(sgl.SglbatchError) as caught:
        gen("x", json_schema=bad)
    assert caught.value.code == "invalid-argument"
    assert "\n" not in caught.value.message and "pydantic.dev" not in caught.value.message


def test_a_schema_excludes_the_other_constraints() -> None:
    with pytest.raises(sgl.SglbatchError):
        gen("x", json_schema=ORDER, regex="a")
    with pytest.raises(sgl.SglbatchError):
        gen("x", json_schema=ORDER, choices=["a"])


def _operation(schema: Any) -> Generate:
    return Generate(max_tokens=10, constraint=Constraint(kind="json_schema", source=json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        (ORDER, '{"item": "a", "count": 1}', None),
        (ORDER, '{"item": "a"}', "'count' is a required property"),
        (ORDER, '{"item": "a", ', "no JSON"),
        ({"format": "date"}, '"2023-02-29"', "is not a 'date'"),
        ({"items": [{"type": "null"}, {}]}, "[null, 1]", None),
        ({"properties": {"default": {"items": [{"type": "null"}]}}}, '{"default": [1]}', "is not of type 'null'"),
        ({"examples": [{"items": [1]}], "prefixItems": [{"type": "null"}]}, "[1]", "is not of type 'null'"),
    ],
)
def test_finished_values_are_validated(schema: Any, text: str, problem: str | None) -> None:
    result = Checks().checked(_operation(schema), Result(request_id=0, text=text))
    if problem is None:
        assert result.error is None
    else:
        assert result.error is not None and result.error.code == "invalid-value"
        assert problem in result.error.message and text in result.error.message


def output_rows(name: str, values: Sequence[Any]) -> list[OutputRow]:
    """One row for each value of a variable."""
    return [
        OutputRow(
            values={name: value},
            returned=None,
            has_returned=False,
            error=None,
            finish={},
            usage=Usage(prompt_tokens=1, generated_tokens=1),
            kept={},
            extras={},
        )
        for value in values
    ]


def test_a_column_has_its_schemas_type(tmp_path: Path) -> None:
    texts = ['{"item": "a", "count": 1, "size": "S"}', '{"item": "b", "count": 2}', None]
    rows = output_rows("order", texts)
    declared = VarType(kind="json", schema=json.dumps(ORDER))
    written = write_output(tmp_path / "o.parquet", lambda: rows, columns=[Column(name="order", declared=declared)])
    assert written.warnings == ()
    table = pq.read_table(tmp_path / "o.parquet")
    kind = table.schema.field("order").type
    assert [(f.name, f.type) for f in kind] == [
        ("item", pa.string()),
        ("count", pa.int64()),
        ("size", pa.dictionary(pa.int32(), pa.string())),
    ]
    assert table.column("order").to_pylist() == [
        {"item": "a", "count": 1, "size": "S"},
        {"item": "b", "count": 2, "size": None},
        None,
    ]


def written(path: Path, schema: Any, texts: list[str | None]) -> tuple[pa.Table, tuple[str, ...]]:
    """The column ``x`` of these texts under a schema, and the warnings."""
    rows = output_rows("x", texts)
    declared = VarType(kind="json", schema=json.dumps(schema))
    report = write_output(path, lambda: rows, columns=[Column(name="x", declared=declared)])
    return pq.read_table(path), report.warnings


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


MIXED = {"enum": ["person", None, 3]}
ITEMS = closed(kind=MIXED, n={"type": "number"})
TREE = closed(value={"type": "integer"}, below={"type": "array", "items": {"$ref": "#"}})


@pytest.mark.parametrize(
    ("schema", "texts", "arrow_type", "values"),
    [
        (
            closed(kind=MIXED, n={"type": "number"}, ok={"type": "boolean"}, t={"enum": ["u", "v"]}),
            ['{"kind": "person", "n": 1, "ok": true, "t": "u"}', '{"kind": 3, "n": 2}', '{"n": 0.5}'],
            "struct<kind: string, n: double, ok: bool, t: dictionary<values=string, indices=int32, ordered=0>>",
            [
                {"kind": '"person"', "n": 1.0, "ok": True, "t": "u"},
                {"kind": "3", "n": 2.0, "ok": None, "t": None},
                {"kind": None, "n": 0.5, "ok": None, "t": None},
            ],
        ),
        (
            closed(k={"type": ["integer", "string"]}, o={"type": "boolean"}),
            ['{"k": 1, "o": true}'],
            "struct<k: string, o: bool>",
            [{"k": "1", "o": True}],
        ),
        (
            {"type": "array", "items": MIXED},
            ['["person", 3, null]'],
            "list<element: string>",
            [['"person"', "3", None]],
        ),
        (
            {"type": "array", "items": ITEMS},
            ['[{"kind": 3, "n": 1}]', "[]"],
            "list<element: struct<kind: string, n: double>>",
            [[{"kind": "3", "n": 1.0}], []],
        ),
        (
            {"anyOf": [closed(a={"type": "integer"}, b=MIXED), closed(a={"type": "integer"}, b={"type": "string"})]},
            ['{"a": 1, "b": "x"}'],
            "struct<a: int64, b: string>",
            [{"a": 1, "b": '"x"'}],
        ),
        (
            closed(open={"type": "object"}, n={"type": "integer"}),
            ['{"open": {"any": [1]}, "n": 1}'],
            "struct<open: string, n: int64>",
            [{"open": '{"any": [1]}', "n": 1}],
        ),
        (MIXED, ['"person"'], "string", ['"person"']),
        ({"type": "object"}, ['{"a": 1}'], "string", ['{"a": 1}']),
        (
            TREE,
            ['{"value": 1, "below": [{"value": 2}]}'],
            "struct<value: int64, below: list<element: string>>",
            [{"value": 1, "below": ['{"value": 2}']}],
        ),
    ],
)
def test_only_what_has_no_one_type_is_json_text_whatever_the_answers(
    tmp_path: Path, schema: Any, texts: list[str | None], arrow_type: str, values: list[Any]
) -> None:
    path = tmp_path / "o.parquet"
    for number in range(len(texts) + 1):
        table, warnings = written(path, schema, texts[:number])
        assert str(table.schema.field("x").type) == arrow_type
        assert table.column("x").to_pylist() == values[:number]
        assert len(warnings) == 1 and "JSON text" in warnings[0]
    lines = tmp_path / "o.jsonl"
    rows = [json.loads(text or "null") for text in texts]
    declared = VarType(kind="json", schema=json.dumps(schema))
    output = output_rows("x", texts)
    write_output(lines, lambda: output, columns=[Column(name="x", declared=declared)])
    for line, row in zip(lines.read_text().splitlines(), rows, strict=True):
        found = json.loads(line)["x"]
        assert found == row or {k: v for k, v in found.items() if v is not None} == row


def test_a_value_that_its_schema_has_not_makes_the_column_json_text(tmp_path: Path) -> None:
    table, _ = written(tmp_path / "o.parquet", closed(k=MIXED, n={"type": "integer"}), ['{"k": 3, "n": 1}', '"no"'])
    assert table.column("x").to_pylist() == ['{"k": 3, "n": 1}', '"no"']


TEMPLATE = """
import sglbatch as sgl

@sgl.function(temperature=0)
def extract(s, text):
    s += text + sgl.gen("thought", max_tokens=4)
    s += "Record: " + sgl.gen("record", max_tokens=60{extra})
"""


def test_the_record_of_a_template_is_its_last_gen(tmp_path: Path) -> None:
    path = tmp_path / "extract.py"
    path.write_text(TEMPLATE.format(extra=""))
    assert load_template(path).record(json.dumps(ORDER)).name == "record"
    assert Record.of(ORDER, "s += sgl.gen('a') + gen(name='b')").name == "b"
    with pytest.raises(sgl.SglbatchError) as caught:
        Record.of(ORDER, "s += sgl.gen(name)")
    assert caught.value.code == "no-record"


def test_a_schema_that_cannot_be_enforced_ends_the_job_before_it_starts(tmp_path: Path, smollm2_dir: Path) -> None:
    path, data = tmp_path / "extract.py", tmp_path / "d.jsonl"
    path.write_text(
        TEMPLATE.format(extra="").replace("max_tokens=4", 'json_schema={"type": "array", "uniqueItems": True}')
    )
    data.write_text('{"text": "x"}\n')
    result = CliRunner().invoke(app, ["plan", str(path), str(data), "--model", str(smollm2_dir)])
    assert isinstance(result.exception, sgl.UnsupportedSchemaError)
    assert (result.exception.keyword, result.exception.where) == ("uniqueItems", str(path))


def test_check_says_what_is_enforced_and_accepted(tmp_path: Path) -> None:
    schema, instances = tmp_path / "s.json", tmp_path / "i.jsonl"
    schema.write_text(json.dumps(ORDER))
    instances.write_text('{"count": 1, "item": "a"}\n\n{"item": 1, "count": 1}\n')
    result = CliRunner().invoke(app, ["check", str(schema), str(instances)])
    assert result.exit_code == 1
    assert "i.jsonl:1: accepted" in result.output and "i.jsonl:3: rejected" in result.output
    assert "1 of 2 accepted" in result.output and "all of it is enforced" in result.output
    assert "rejected: $.item: 1 is not of type 'string'" in result.output
    schema.write_text('{"type": "string", "format": "hostname"}')
    instances.write_text('"a.b"\n"' + ".".join("abcdefghij") + '"\n')
    narrower = CliRunner().invoke(app, ["check", str(schema), str(instances)])
    assert "i.jsonl:2: rejected: it is valid, but not among the values that are generated" in narrower.output
    schema.write_text('{"type": "array", "uniqueItems": true}')
    assert CliRunner().invoke(app, ["check", str(schema)]).exception.code == "unsupported-schema"  # type: ignore[union-attr]
    allowed = CliRunner().invoke(app, ["check", str(schema), "--allow-unenforced", "--json"])
    assert json.loads(allowed.output)["unenforced"] == ["uniqueItems at #"]
    instances.write_text('["a", "b"]\n["a", "a"]\n')
    judged = CliRunner().invoke(app, ["check", str(schema), str(instances), "--allow-unenforced"])
    assert "1 part is only validated" in judged.output and "i.jsonl:1: accepted" in judged.output
    assert "i.jsonl:2: rejected: $: ['a', 'a'] has non-unique elements" in judged.output


def test_constraints_can_be_looked_at(smollm2_tokenizer: Tokenizer) -> None:
    constraint = sgl.constraint_for_schema(ORDER, smollm2_tokenizer)
    assert constraint.accepts('{"count": 2, "item": "x"}') and not constraint.accepts("{}")
    assert constraint.forced("") == '{"item": "'
    assert constraint.forced('{"item": "x", "c') == 'ount": '
    assert constraint.forced('{"item": "x') == ""
    assert constraint.stats.compiled_to == "machine" and constraint.stats.num_states > 10
    compact = sgl.constraint_for_schema(Order, smollm2_tokenizer, separators="compact")
    assert compact.forced("") == '{"item":"'
    with pytest.raises(sgl.SglbatchError) as caught:
        constraint.forced("[")
    assert caught.value.code == "not-a-beginning"
    regex = sgl.constraint_for_regex("ab+c", smollm2_tokenizer)
    assert regex.accepts("abbc") and not regex.accepts("ac") and regex.forced("") == "ab"
    assert regex.stats.compiled_to == "automaton"
    with pytest.raises(sgl.SglbatchError) as caught:
        regex.forced("x")
    assert (caught.value.code, caught.value.hint) == ("not-a-beginning", None)
    with pytest.raises(sgl.SglbatchError) as caught:
        sgl.constraint_for_regex(5, smollm2_tokenizer)  # type: ignore[arg-type]
    assert caught.value.code == "invalid-argument"
