"""Writing rows: the types table, round trips, what no type holds, atomicity."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.data import (
    Column,
    OutputRow,
    WriteReport,
    check_collisions,
    check_writable,
    open_rows,
    write_output,
)
from sglbatch.data.kinds import kind_of, merge
from sglbatch.data.values import convert, normalise
from sglbatch.errors import SglbatchError
from sglbatch.types import ErrorInfo, Usage, VarType

UNSET = object()


def row(**changes: Any) -> OutputRow:
    given: dict[str, Any] = {
        "values": {},
        "returned": None,
        "has_returned": False,
        "error": None,
        "finish": {},
        "usage": Usage(prompt_tokens=1, generated_tokens=2),
        "kept": {},
        "extras": {},
    }
    return OutputRow(**(given | changes))


def column_rows(values: Sequence[Any]) -> list[OutputRow]:
    return [row(values={} if value is UNSET else {"x": value}) for value in values]


def write_column(path: Path, values: Sequence[Any], declared: VarType | None = None) -> tuple[pa.Table, WriteReport]:
    report = write_output(path, lambda: column_rows(values), columns=[Column(name="x", declared=declared)])
    return pq.read_table(path), report


def list_of(kind: Any) -> VarType:
    return VarType(kind=kind, is_list=True)


TYPES_TABLE: list[tuple[VarType | None, list[Any], str, list[Any]]] = [
    # declared, values, Arrow type, values read back
    (None, ["a", None, UNSET], "string", ["a", None, None]),
    (None, [None, UNSET], "string", [None, None]),
    (None, [], "string", []),
    (None, [1, -(2**63), 2**63 - 1], "int64", [1, -(2**63), 2**63 - 1]),
    (None, [1, 2.5, None], "double", [1.0, 2.5, None]),
    (None, [True, None], "bool", [True, None]),
    (None, [[], [1], None, [None, 2.5]], "list<element: double>", [[], [1.0], None, [None, 2.5]]),
    (None, [[], [None]], "list<element: string>", [[], [None]]),
    (
        None,
        [{"a": 1, "b": None}, {"b": ["t"], "a": None}],
        "struct<a: int64, b: list<element: string>>",
        [{"a": 1, "b": None}, {"a": None, "b": ["t"]}],
    ),
    (None, [("a", "b")], "list<element: string>", [["a", "b"]]),
    (None, [date(2020, 1, 2), Decimal("1.50")], "string", ["2020-01-02", "1.50"]),
    (None, [np.int32(3), np.array([1, 2])[0]], "int64", [3, 1]),
    (None, [np.array([[1.0, 2.0]])], "list<element: list<element: double>>", [[[1.0, 2.0]]]),
    (None, ["a", 1, None], "string", ['"a"', "1", None]),
    (None, [True, 1], "string", ["true", "1"]),
    (None, [2**53 + 1, 0.5], "string", ["9007199254740993", "0.5"]),
    (None, [2**63], "string", ["9223372036854775808"]),
    (None, [{}], "string", ["{}"]),
    (None, [{"a": 1}, {"b": 1}], "string", ['{"a": 1}', '{"b": 1}']),
    (None, [[1, "a"]], "string", ['[1, "a"]']),
    (None, [{1: "ü", None: [True]}], "struct<1: string, null: list<element: bool>>", [{"1": "ü", "null": [True]}]),
    (None, [[math.nan, {}]], "string", ["[null, {}]"]),
    (VarType(kind="text"), ["a"], "string", ["a"]),
    (VarType(kind="text"), ["a", 1], "string", ['"a"', "1"]),
    (VarType(kind="int"), ["12\n", " -3", "+4", 5, None, UNSET], "int64", [12, -3, 4, 5, None, None]),
    (VarType(kind="int"), [None], "int64", [None]),
    (VarType(kind="int"), ["12", "twelve"], "string", ["12", '"twelve"']),
    (VarType(kind="int"), ["+" + "9" * 30], "string", ["9" * 30]),
    (VarType(kind="int"), ["1_000"], "string", ['"1_000"']),
    (VarType(kind="int"), [True], "string", ["true"]),
    (VarType(kind="float"), ["1.", ".5\n", "2", 3, "-1e3", "inf"], "double", [1.0, 0.5, 2.0, 3.0, -1000.0, math.inf]),
    (VarType(kind="float"), ["1.5", "-"], "string", ["1.5", '"-"']),
    (VarType(kind="bool"), ["True", "false", True, " true"], "bool", [True, False, True, True]),
    (VarType(kind="bool"), ["yes"], "string", ['"yes"']),
    (
        VarType(kind="enum", choices=("A", "B")),
        ["A", None, "B", "A"],
        "dictionary<values=string, indices=int32, ordered=0>",
        ["A", None, "B", "A"],
    ),
    (VarType(kind="enum", choices=("A", "B")), [1], "string", ["1"]),
    (VarType(kind="json"), ['{"a": 1}', {"a": 2}], "struct<a: int64>", [{"a": 1}, {"a": 2}]),
    (VarType(kind="json"), ['{"a": 1}', '{"a": '], "string", ['{"a": 1}', '"{\\"a\\": "']),
    (VarType(kind="json"), [None], "string", [None]),
    (list_of("int"), [["1", "2 "], [], None], "list<element: int64>", [[1, 2], [], None]),
    (list_of("int"), [UNSET], "list<element: int64>", [None]),
    (list_of("enum"), [["A"]], "list<element: string>", [["A"]]),
    (list_of("text"), ["a"], "string", ['"a"']),
]


@pytest.mark.parametrize(("declared", "values", "arrow_type", "expected"), TYPES_TABLE)
def test_types_table(
    tmp_path: Path, declared: VarType | None, values: list[Any], arrow_type: str, expected: list[Any]
) -> None:
    table, report = write_column(tmp_path / "o.parquet", values, declared)
    assert table.column("x").to_pylist() == expected
    assert str(table.schema.field("x").type) == arrow_type
    holds_json = any("has no one type" in warning for warning in report.warnings)
    assert holds_json == (arrow_type == "string" and any(_is_json(a, b) for a, b in zip(expected, values, strict=True)))


def _is_json(written: Any, value: Any) -> bool:
    return written is not None and written != value and not isinstance(value, date | Decimal)


def test_warnings_name_the_column_and_the_reason(tmp_path: Path) -> None:
    def warnings(values: list[Any], declared: VarType | None = None) -> tuple[str, ...]:
        return write_column(tmp_path / "o.parquet", values, declared)[1].warnings

    end = ": it has no one type (JSON text in Parquet)"
    assert warnings(["a", 1]) == (f"column 'x' mixes text and integers{end}",)
    assert warnings([[{}]]) == (f"column 'x' has objects without fields{end}",)
    assert warnings([1, "x"], VarType(kind="int")) == (f"column 'x' is declared int but mixes integers and text{end}",)
    assert warnings(["x"], list_of("int")) == (f"column 'x' is declared a list of int but has other values{end}",)
    assert warnings(["a\ud800\ud801"]) == ("column 'x': 2 lone surrogates replaced by U+FFFD",)
    assert warnings(["fine\0", None]) == ()


def test_values_of_any_class_are_written(tmp_path: Path) -> None:
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no")

    circular: list[Any] = []
    circular.append(circular)
    deep: Any = "end"
    for _ in range(100_000):
        deep = [deep]
    table, report = write_column(tmp_path / "o.parquet", [Bad(), {1}, b"b", circular, {"1": 1, 1: 2}, deep])
    written = table.column("x").to_pylist()
    assert [json.loads(text) for text in written[:3]] == ["<Bad>", "{1}", "b'b'"]
    assert "..." in written[3]
    assert any("nested deeper" in warning for warning in report.warnings)
    assert any("4 values of a type without a column type" in warning for warning in report.warnings)


def test_columns_and_their_order(tmp_path: Path) -> None:
    rows = [
        row(kept={"in_q": "x"}, values={"b": "1"}, finish={"b": "stop"}, extras={"_transcript": "t"}),
        row(kept={"in_q": None}, error=ErrorInfo(code="c", message="m\ud800", call="b")),
        row(kept={"in_q": "y"}, values={"late": 1, "a": True}, finish={"a": "length"}, has_returned=True),
    ]
    columns = [Column(name="a", declared=VarType(kind="bool")), Column(name="b", declared=VarType(kind="int"))]
    names = ["in_q", "a", "b", "late", "_return", "_transcript", "_error", "_finish", "_usage"]
    path = tmp_path / "o.parquet"
    report = write_output(path, lambda: rows, columns=columns)
    table = pq.read_table(path)
    assert table.schema.names == list(report.columns) == names
    assert (report.num_rows, report.num_failed) == (3, 1)
    assert table.to_pylist()[1] == {
        "in_q": None, "a": None, "b": None, "late": None, "_return": None, "_transcript": None,
        "_error": {"code": "c", "message": "m\ufffd", "call": "b"},
        "_finish": None,
        "_usage": {"prompt_tokens": 1, "generated_tokens": 2},
    }  # fmt: skip
    assert table.column("_finish").to_pylist()[0] == {"b": "stop", "a": None}
    assert table.column("_error").to_pylist()[0] is None
    lines = tmp_path / "o.jsonl"
    write_output(lines, lambda: rows, columns=columns)
    assert [json.loads(line) for line in lines.read_text().splitlines()] == table.to_pylist()


def test_jsonl_keeps_mixed_values(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    values = ["ü", 1, {}, [2**70], None, math.nan, "7"]
    report = write_output(path, lambda: column_rows(values), columns=[Column(name="x", declared=VarType(kind="int"))])
    written = [json.loads(line)["x"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert written == ["ü", 1, {}, [2**70], None, None, 7]
    assert '"ü"' in path.read_text(encoding="utf-8")
    assert len(report.warnings) == 2


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
def test_compressed_jsonl_reads_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"o.{suffix}"
    write_output(path, lambda: column_rows(["a", "b"]), columns=[])
    assert [r.values and r.values["x"] for r in open_rows([str(path)])] == ["a", "b"]
    if suffix.endswith("gz"):
        assert len(gzip.decompress(path.read_bytes()).splitlines()) == 2


def test_a_variable_that_a_row_named_like_a_kept_column(tmp_path: Path) -> None:
    rows = [row(kept={"x": 1}, values={"x": 2, "_error": 3})]
    report = write_output(tmp_path / "o.parquet", lambda: rows, columns=[])
    assert report.columns == ("x", "x_2", "_error_2", "_error", "_finish", "_usage")
    assert len(report.warnings) == 2


def test_many_rows_make_several_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "o.parquet"
    values = [f"{i}" for i in range(40_000)]
    declared = VarType(kind="enum", choices=("0",))
    write_output(path, lambda: column_rows(values), columns=[Column(name="x", declared=declared)])
    assert pq.ParquetFile(path).num_row_groups == 3
    assert pq.read_table(path).column("x").to_pylist() == values


# --- properties --------------------------------------------------------------------------------

TEXT = st.text(max_size=5)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
NESTED = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
SHAPES = st.sampled_from([TEXT, st.integers(-5, 5), st.integers(), st.booleans(), st.floats(), NESTED])
UNIFORM = SHAPES.flatmap(
    lambda item: st.sampled_from(
        [item, st.lists(item, max_size=3), st.fixed_dictionaries({"a": item, "": item | st.none()})]
    )
).flatmap(lambda shape: st.lists(shape | st.none(), max_size=5))


def same(a: Any, b: Any) -> bool:
    """Equal, with NaN equal to itself and an int equal to its float."""
    if isinstance(a, float) and isinstance(b, float | int) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [finite(item) for item in value]
    return {key: finite(item) for key, item in value.items()} if isinstance(value, dict) else value


@settings(max_examples=300, deadline=None)
@given(values=UNIFORM | st.lists(NESTED, max_size=5))
def test_parquet_round_trip(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    """Any values come back, by the column's own type or as JSON text (which has no NaN)."""
    table, report = write_column(tmp_path_factory.mktemp("o") / "o.parquet", values)
    clean = [normalise(value, Counter()) for value in values]
    written = table.column("x").to_pylist()
    if any("has no one type" in warning for warning in report.warnings):
        decoded = [None if text is None else json.loads(text) for text in written]
        assert all(map(same, map(finite, clean), decoded))
    else:
        assert all(map(same, clean, written))


@settings(max_examples=150, deadline=None)
@given(values=st.lists(NESTED, max_size=5))
def test_jsonl_round_trip(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    path = tmp_path_factory.mktemp("o") / "o.jsonl"
    write_output(path, lambda: column_rows(values), columns=[])
    clean = [finite(normalise(value, Counter())) for value in values]
    written = [json.loads(line)["x"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert all(map(same, clean, written)) and len(written) == len(values)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(NESTED, min_size=3, max_size=3))
def test_merge_is_commutative_and_associative(values: list[Any]) -> None:
    """Up to the order of fields and the reason given: no order of the rows changes a column's type."""
    a, b, c = (kind_of(normalise(value, Counter())) for value in values)
    assert shape(merge(a, b)) == shape(merge(b, a))
    assert shape(merge(merge(a, b), c)) == shape(merge(a, merge(b, c)))
    assert merge(a, a) == a


def shape(kind: Any) -> Any:
    if kind.tag == "list":
        return ["list", shape(kind.item)]
    if kind.tag == "struct":
        return {name: shape(field) for name, field in kind.fields}
    return kind.tag


@given(value=NESTED, kind=st.sampled_from(["text", "int", "float", "bool", "enum", "json"]), is_list=st.booleans())
def test_convert_twice_is_convert_once(value: Any, kind: Any, is_list: bool) -> None:
    declared = VarType(kind=kind, is_list=is_list)
    once = convert(normalise(value, Counter()), declared)
    if kind != "json":  # JSON text of JSON text unwraps once more
        assert same(convert(once, declared), once)


# --- the file ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["o.csv", "o", "o.parquet.gz", "o.json"])
def test_unknown_suffix(tmp_path: Path, name: str) -> None:
    with pytest.raises(SglbatchError) as caught:
        check_writable(tmp_path / name)
    assert caught.value.code == "unknown-format"


def test_check_writable(tmp_path: Path) -> None:
    check_writable(tmp_path / "o.parquet")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder.parquet").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("none/o.parquet", "folder.parquet", "pipe.jsonl", "/proc/o.parquet"):
        with pytest.raises(SglbatchError) as caught:
            check_writable(tmp_path / name)
        assert caught.value.code == "cannot-write"
        assert caught.value.hint


@pytest.mark.parametrize("name", ["o.parquet", "o.jsonl", "o.jsonl.zst"])
def test_a_failure_leaves_the_old_output(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")
    calls = 0

    def rows() -> Any:
        nonlocal calls
        calls += 1
        yield from column_rows(["a"])
        if calls == 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        write_output(path, rows, columns=[])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "o.jsonl"
    link.symlink_to(tmp_path / "real" / "o.jsonl")
    write_output(link, lambda: column_rows(["a"]), columns=[])
    assert link.is_symlink() and (tmp_path / "real" / "o.jsonl").read_text().startswith('{"x": "a"')


def test_a_long_name_and_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / ("o" * 240 + ".jsonl")
    write_output(path, lambda: [], columns=[])
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_collisions() -> None:
    assert check_collisions(["q", "a"], ["b"]) == {"q": "q", "a": "a"}
    assert check_collisions(["q", "a"], ["a"], "in_") == {"q": "in_q", "a": "in_a"}
    for kept, prefix, hint in ((["a"], "", "in_"), (["_error"], "", "in_"), (["a"], "in_", "input_")):
        with pytest.raises(SglbatchError) as caught:
            check_collisions(kept, ["a", "in_a"], prefix)
        assert caught.value.code == "column-collision"
        assert caught.value.hint == f"--keep-prefix {hint}"
    with pytest.raises(SglbatchError) as caught:
        check_collisions([], ["_usage"])
    assert caught.value.code == "reserved-name"


def test_a_link_into_nowhere_names_the_folder_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "gone" / "x.jsonl")
    with pytest.raises(SglbatchError) as caught:
        check_writable(tmp_path / "out.jsonl")
    assert f"there is no directory {tmp_path / 'gone'}" in caught.value.message
    assert caught.value.hint == f"mkdir -p '{tmp_path / 'gone'}'"
