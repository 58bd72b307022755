"""Schemas through whole jobs: what ends one before it starts, what a plan says, and runs of the real model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from sglbatch.cli import app
from sglbatch.errors import SglbatchError, UnsupportedSchemaError
from sglbatch.job.report import Report

TEMPLATE = """
import sglbatch as sgl

@sgl.function(temperature=0)
def extract(s, text):
    s += "Text: " + text + "\\nRecord: " + sgl.gen("record"{extra})
"""
TEXTS = ("Ann bought three red apples in Rome.", "Bob sold his old car.", "There is a hammer on the table.")
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "fresh": {"type": "boolean"},
        "kind": {"enum": ["fruit", "car", "tool"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
        "place": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "zip": {"type": "integer", "minimum": 0, "maximum": 99999},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "count", "fresh", "kind", "tags", "place"],
    "additionalProperties": False,
}
REPEATED = {
    "type": "object",
    "properties": {
        "tags": {
            "type": "array",
            "items": {"type": "string", "pattern": "^(a|b)$"},
            "minItems": 3,
            "maxItems": 3,
            "uniqueItems": True,
        }
    },
    "required": ["tags"],
    "additionalProperties": False,
}
"""Three texts out of two: no value is valid, which only validation finds."""


class Project:
    """A template, its rows and a schema file in a folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.template, self.data, self.schema = folder / "extract.py", folder / "texts.jsonl", folder / "schema.json"
        self.output = folder / "out.parquet"
        self._model = model
        self.template.write_text(TEMPLATE.format(extra=""))
        self.data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def call(self, command: str, *options: str) -> Any:
        arguments = [command, str(self.template), str(self.data), "--model", str(self._model)]
        return CliRunner().invoke(app, [*arguments, "-o", str(self.output), *options])

    def with_schema(self, schema: Any, command: str, *options: str) -> Any:
        self.schema.write_text(schema if isinstance(schema, str) else json.dumps(schema))
        return self.call(command, "--schema", str(self.schema), *options)

    def report(self) -> Report:
        return Report.load(self.output.with_name(f"{self.output.name}.job") / "report.json")


@pytest.fixture
def project(tmp_path: Path, smollm2_dir: Path) -> Project:
    return Project(tmp_path, smollm2_dir)


def _error(result: Any) -> SglbatchError:
    assert isinstance(result.exception, SglbatchError), (result.exception, result.output)
    return result.exception


# --- before anything is run --------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("schema", "code", "said"),
    [
        ("{", "invalid-schema", "no JSON"),
        ("[1]", "invalid-schema", "no schema"),
        ('"int"', "invalid-schema", "no schema"),
        ({"properties": {"a": {"type": 5}}}, "invalid-schema", "#/properties/a/type"),
        ({"enum": []}, "unsatisfiable-schema", "no value"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "unsatisfiable-schema", "no value"),
        ({"type": "string", "pattern": "a[b"}, "invalid-schema", "#/pattern"),
        ({"type": "string", "pattern": "^(a|b)*a(a|b){25}$"}, "constraint-too-large", "states"),
        ({"type": "string", "pattern": "^.{0,5000}$"}, "constraint-too-large", "states"),
    ],
)
def test_a_bad_schema_ends_the_job_before_a_model_is_loaded(
    project: Project, command: str, schema: Any, code: str, said: str
) -> None:
    start = time.process_time()
    error = _error(project.with_schema(schema, command))
    assert error.code == code and said in error.message and error.exit_code == 2
    assert error.where == str(project.schema)
    assert error.hint
    assert time.process_time() - start < 10
    assert not project.output.exists()


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){25}", "(.{0,200}x){0,200}", "a[b", "a(?=b)", "(?:)", "[^\\s\\S]"])
def test_a_bad_regex_ends_the_job_too(project: Project, pattern: str) -> None:
    project.template.write_text(TEMPLATE.format(extra=f", regex={pattern!r}"))
    start = time.process_time()
    error = _error(project.call("run"))
    assert error.code in {
        "constraint-too-large",
        "invalid-regex",
        "unsupported-regex",
        "empty-regex",
        "unsatisfiable-regex",
    }
    assert error.where is not None and error.where.startswith(str(project.template))
    assert time.process_time() - start < 10


def test_a_keyword_that_cannot_be_enforced_is_named_with_its_path(project: Project) -> None:
    error = _error(project.with_schema(REPEATED, "run"))
    assert isinstance(error, UnsupportedSchemaError)
    assert (error.keyword, error.path) == ("uniqueItems", "#/properties/tags")
    assert error.where == str(project.schema)
    assert error.hint is not None and "--allow-unenforced" in error.hint


def test_the_plan_lists_what_is_only_validated(project: Project) -> None:
    shown = project.with_schema(REPEATED, "plan", "--allow-unenforced", "--max-tokens", "40")
    assert shown.exit_code == 0, shown.output
    assert "only validated afterwards: uniqueItems at #/properties/tags, of record" in shown.stdout
    value = json.loads(project.with_schema(REPEATED, "plan", "--allow-unenforced", "--json").stdout)
    assert value["unenforced"] == ["uniqueItems at #/properties/tags, of record"]
    enforced = project.with_schema(RECORD, "plan", "--allow-unenforced")
    assert enforced.exit_code == 0 and "only validated" not in enforced.stdout


def test_the_next_plan_finds_the_automata_of_the_last(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = project.data.with_name("cache")
    monkeypatch.setenv("SGLBATCH_CACHE", str(cache))
    project.template.write_text(TEMPLATE.format(extra=", regex='(a|b)*a(a|b){10}', max_tokens=20"))
    assert project.call("plan").exit_code == 0
    (kept,) = (cache / "automata").iterdir()
    before = kept.stat().st_ino
    assert project.call("plan").exit_code == 0
    assert [path.stat().st_ino for path in (cache / "automata").iterdir()] == [before]
    pattern = {"type": "object", "patternProperties": {"^(a|b)*a(a|b){10}$": {}}, "additionalProperties": False}
    project.template.write_text(TEMPLATE.format(extra=""))
    assert project.with_schema(pattern, "plan").exit_code == 0
    assert len(list((cache / "automata").iterdir())) == 2


# --- runs of the real model --------------------------------------------------------------------


@pytest.mark.slow
def test_records_of_a_schema_file_become_a_typed_column(project: Project) -> None:
    result = project.with_schema(RECORD, "run", "--max-tokens", "90")
    assert result.exit_code == 0, result.output
    table = pq.read_table(project.output)
    kind = table.schema.field("record").type
    assert {field.name: field.type for field in kind} == {
        "name": pa.string(),
        "count": pa.int64(),
        "fresh": pa.bool_(),
        "kind": pa.dictionary(pa.int32(), pa.string()),
        "tags": pa.list_(pa.string()),
        "place": pa.struct([("city", pa.string()), ("zip", pa.int64())]),
    }
    for record in table.column("record").to_pylist():
        if record["place"]["zip"] is None:
            del record["place"]["zip"]  # an absent property
        Draft202012Validator(RECORD).validate(record)
    report = project.report()
    assert (report.rows_done, report.rows_failed, report.rows_invalid, report.unenforced) == (3, 0, 0, ())


@pytest.mark.slow
def test_complete_ends_records_that_max_tokens_would_cut(project: Project) -> None:
    cut = project.with_schema(RECORD, "run", "--max-tokens", "45")
    report = project.report()
    assert cut.exit_code == 1 and report.rows_failed > 0
    assert {group.code for group in report.errors} == {"constraint-incomplete"}
    assert '{"name": ' in report.errors[0].sample, "the error keeps the text"
    whole = project.with_schema(RECORD, "run", "--max-tokens", "45", "--complete")
    assert whole.exit_code == 0, whole.output
    table = pq.read_table(project.output)
    assert all(record is not None for record in table.column("record").to_pylist())
    assert all(usage["generated_tokens"] <= 45 for usage in table.column("_usage").to_pylist())
    assert project.report().rows_failed == 0


@pytest.mark.slow
def test_values_that_fail_validation_are_their_rows_errors_and_counted(project: Project) -> None:
    result = project.with_schema(REPEATED, "run", "--allow-unenforced", "--max-tokens", "40")
    assert result.exit_code == 1
    report = project.report()
    assert (report.rows_failed, report.rows_invalid) == (3, 3)
    assert report.unenforced == ("uniqueItems at #/properties/tags, of record",)
    assert "schemas   3 rows failed validation; only validated: uniqueItems at #/properties/tags" in result.stdout
    (group,) = report.errors
    assert group.code == "invalid-value" and "non-unique" in group.sample
    table = pq.read_table(project.output)
    assert [error["code"] for error in table.column("_error").to_pylist()] == ["invalid-value"] * 3
