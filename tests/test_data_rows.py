"""Reading rows: every format, every kind of bad input, random access."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.data import Row, Rows, open_rows
from sglbatch.errors import SglbatchError

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
MMLU_ROWS = 14_079


def write(path: Path, content: bytes | str) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def parquet(path: Path, table: pa.Table, **options: Any) -> str:
    pq.write_table(table, path, **options)
    return str(path)


def values(rows: Rows) -> list[Any]:
    """Values or error code of every row; random access must agree with iteration."""
    listed = list(rows)
    assert len(listed) == len(rows)
    assert [row.index for row in listed] == list(range(len(rows)))
    for row in reversed(listed):
        assert repr(rows.get(row.index)) == repr(row)  # repr: NaN equals itself
    return [row.values if row.error is None else row.error.code for row in listed]


def fails(paths: list[str], **options: Any) -> SglbatchError:
    with pytest.raises(SglbatchError) as caught:
        list(open_rows(paths, **options))
    assert caught.value.hint
    return caught.value


# --- JSONL -------------------------------------------------------------------------------------


def test_jsonl_nested_values_and_columns(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": {"c": [1.5, None, True]}}, {"a": "x"}, {"z": "ü", "a": None}]
    path = write(tmp_path / "d.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    opened = open_rows([path])
    assert values(opened) == rows
    assert opened.columns == ["a", "b", "z"]
    assert [row.where for row in opened] == [f"{path}:{line}" for line in (1, 2, 3)]


def test_jsonl_line_ends_bom_and_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "d.ndjson", b'\xef\xbb\xbf{"a": 1}\r\n\r\n   \n{"a": "x\\ny"}\r\n\n{"a": 3}')
    opened = open_rows([path])
    assert values(opened) == [{"a": 1}, {"a": "x\ny"}, {"a": 3}]
    assert [row.where.rsplit(":", 1)[1] for row in opened] == ["1", "4", "6"]


def test_jsonl_odd_values(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"a": NaN, "a": 1}\n{"a": 123456789012345678901234567890}\n{"a": "\\u0000"}\n')
    assert values(open_rows([path])) == [{"a": 1}, {"a": 123456789012345678901234567890}, {"a": "\0"}]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (b'{"a": 1', "bad-json", "not JSON: Expecting ',' delimiter (column 8)"),
        (b"hello", "bad-json", "not JSON: Expecting value (column 1)"),
        (b'{"a": 1} {"a": 2}', "bad-json", "not JSON: Extra data (column 10)"),
        (b"[" * 100_000, "bad-json", "not read: nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "bad-json", "not read: Exceeds the limit"),
        (b"[1]", "bad-row", "a row must be a JSON object, not an array"),
        (b"null", "bad-row", "a row must be a JSON object, not null"),
        (b'{"a": "\xff"}', "bad-utf8", "not UTF-8: byte 0xff at byte 8"),
        (b'\xef\xbb\xbf{"a": 1}', "bad-json", "not JSON: Unexpected UTF-8 BOM"),
        (b'{"a": "\x00"}', "bad-json", "not JSON: Invalid control character at (column 8)"),
    ],
)
def test_jsonl_bad_line_is_that_rows_error(tmp_path: Path, line: bytes, code: str, message: str) -> None:
    path = write(tmp_path / "d.jsonl", b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    opened = open_rows([path])
    assert values(opened) == [{"a": 1}, code, {"a": 2}]
    row = opened.get(1)
    assert row.values is None
    assert row.error is not None and row.error.message.startswith(message)
    assert row.where == f"{path}:3"


@pytest.mark.parametrize("content", ['[{"a": 1}]', '{\n "a": 1\n}\n', '[\n{"a": 1}\n]'])
def test_json_document_is_refused(tmp_path: Path, content: str) -> None:
    error = fails([write(tmp_path / "d.json", content)])
    assert error.code == "json-document"
    assert error.hint is not None and "jq -c" in error.hint


def test_json_with_an_object_a_line(tmp_path: Path) -> None:
    assert values(open_rows([write(tmp_path / "d.json", '{"a": 1}\n{"a": 2}')])) == [{"a": 1}, {"a": 2}]


def test_utf16_is_refused(tmp_path: Path) -> None:
    assert fails([write(tmp_path / "d.jsonl", '{"a": 1}'.encode("utf-16"))]).code == "bad-encoding"


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
            st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), st.lists, max_leaves=4),
            max_size=3,
        ),
        min_size=1,
        max_size=8,
    ),
    newline=st.sampled_from(["\n", "\r\n", "\n\n"]),
    ascii_only=st.booleans(),
)
def test_jsonl_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], newline: str, ascii_only: bool
) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    path = write(tmp_path_factory.mktemp("d") / "d.jsonl", newline.join(lines).encode("utf-8", "surrogatepass"))
    expected = [json.loads(line) if encodable(line) else "bad-utf8" for line in lines]
    assert values(open_rows([path])) == expected


def encodable(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


# --- CSV ---------------------------------------------------------------------------------------


def test_csv_values_are_text(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", '\ufeffid,q,n\r\n1,"a ""b"", c",\r\n\r\n2,"two\r\nlines",null\r\n3,5" pipe,x')
    opened = open_rows([path])
    assert opened.columns == ["id", "q", "n"]
    assert values(opened) == [
        {"id": "1", "q": 'a "b", c', "n": ""},
        {"id": "2", "q": "two\r\nlines", "n": "null"},
        {"id": "3", "q": '5" pipe', "n": "x"},
    ]
    assert [row.where for row in opened] == [f"{path}:{line}" for line in (2, 4, 6)]


def test_csv_bad_records(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", b'a,b\n1\n1,2,3\n"x"y,2\n\xff,2\n3,4\n5,"never closed\n6,7\n')
    opened = open_rows([path])
    assert values(opened) == ["bad-row", "bad-row", "bad-csv", "bad-utf8", {"a": "3", "b": "4"}, "bad-csv"]
    messages = [row.error.message for row in opened if row.error]
    assert messages[0] == "the record has 1 fields, the header has 2"
    assert messages[-1] == "not CSV: a quoted field is never closed"
    assert opened.get(5).where == f"{path}:7"


def test_tsv(tmp_path: Path) -> None:
    assert values(open_rows([write(tmp_path / "d.tsv", "a\tb\nx, y\t2\n")])) == [{"a": "x, y", "b": "2"}]


@pytest.mark.parametrize("header", [b"a,a\n1,2\n", b"a,\xff\n1,2\n", b'"a\n1,2\n'])
def test_csv_bad_header(tmp_path: Path, header: bytes) -> None:
    error = fails([write(tmp_path / "d.csv", header)])
    assert error.code == "bad-header"
    assert error.where is not None and error.where.endswith("d.csv:1")


def test_csv_long_field_leaves_the_csv_module_alone(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    text = "x" * 1_000_000
    assert values(open_rows([write(tmp_path / "d.csv", f"a\n{text}\n")])) == [{"a": text}]
    assert csv.field_size_limit() == before


FIELDS = st.text(st.sampled_from('ab,"\n\r ü\t'), max_size=6)


@settings(max_examples=150, deadline=None)
@given(table=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=6), newline=st.sampled_from(["\n", "\r\n"]))
def test_csv_round_trip(tmp_path_factory: pytest.TempPathFactory, table: list[tuple[str, str]], newline: str) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=newline, quoting=csv.QUOTE_ALL)
    writer.writerow(["a", "b"])
    writer.writerows(table)
    path = write(tmp_path_factory.mktemp("d") / "d.csv", text.getvalue())
    assert values(open_rows([path])) == [{"a": a, "b": b} for a, b in table]


# --- Parquet -----------------------------------------------------------------------------------


def test_parquet_types(tmp_path: Path) -> None:
    moment = datetime(2020, 1, 2, 3, 4, 5)
    big = 2**63 - 1
    columns = {
        "text": pa.array(["x"]),
        "int": pa.array([big]),
        "uint": pa.array([2**64 - 1], pa.uint64()),
        "half": pa.array([1.5], pa.float16()),
        "null": pa.nulls(1),
        "list": pa.array([[1, None]]),
        "struct": pa.array([{"a": 1, "when": moment}]),
        "date": pa.array([date(2020, 1, 2)]),
        "seconds": pa.array([moment], pa.timestamp("s")),
        "nanos": pa.array([1_000_000_001], pa.timestamp("ns")),
        "zone": pa.array([moment], pa.timestamp("us", tz="Europe/Paris")),
        "offset": pa.array([moment], pa.timestamp("us", tz="+05:30")),
        "utc": pa.array([moment], pa.timestamp("ms", tz="UTC")),
        "time": pa.array([3_600_000_000_001], pa.time64("ns")),
        "took": pa.array([timedelta(seconds=-1, milliseconds=-500)], pa.duration("ms")),
        "decimal": pa.array([Decimal("1.10")]),
        "bytes": pa.array(["ü".encode()]),
        "map": pa.array([[("k", moment)]], pa.map_(pa.string(), pa.timestamp("us"))),
        "pairs": pa.array([[(1, "v")]], pa.map_(pa.int64(), pa.string())),
        "dictionary": pa.array(["d"]).dictionary_encode(),
        "a.b": pa.array([1]),
        "": pa.array([2]),
    }
    opened = open_rows([parquet(tmp_path / "d.parquet", pa.table(columns))])
    assert opened.columns == list(columns)
    assert values(opened) == [
        {
            "text": "x",
            "int": big,
            "uint": 2**64 - 1,
            "half": 1.5,
            "null": None,
            "list": [1, None],
            "struct": {"a": 1, "when": "2020-01-02T03:04:05"},
            "date": "2020-01-02",
            "seconds": "2020-01-02T03:04:05",
            "nanos": "1970-01-01T00:00:01.000000001",
            "zone": "2020-01-02T04:04:05+01:00",
            "offset": "2020-01-02T08:34:05+05:30",
            "utc": "2020-01-02T03:04:05+00:00",
            "time": "01:00:00.000000001",
            "took": "-PT1.5S",
            "decimal": "1.10",
            "bytes": "ü",
            "map": {"k": "2020-01-02T03:04:05"},
            "pairs": [[1, "v"]],
            "dictionary": "d",
            "a.b": 1,
            "": 2,
        }
    ]


def test_parquet_many_row_groups_in_any_order(tmp_path: Path) -> None:
    table = pa.table({"i": list(range(1000)), "t": [f"row {i}" for i in range(1000)]})
    opened = open_rows([parquet(tmp_path / "d.parquet", table, row_group_size=70)])
    assert values(opened) == table.to_pylist()
    assert opened.get(999).where.endswith("d.parquet:row 1000")


def test_parquet_bad_bytes_are_the_rows_error_only_when_used(tmp_path: Path) -> None:
    table = pa.table({"a": ["x", "y"], "image": [b"\xff", b"ok"]})
    opened = open_rows([parquet(tmp_path / "d.parquet", table)])
    assert values(opened) == ["bad-utf8", {"a": "y", "image": "ok"}]
    assert opened.get(0).error is not None and "column 'image'" in str(opened.get(0).error)
    assert values(opened.use(["a"])) == [{"a": "x"}, {"a": "y"}]


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff"], pa.binary()).buffers())
    assert values(open_rows([parquet(tmp_path / "d.parquet", pa.table({"a": bad}))])) == [{"a": "ok"}, "bad-utf8"]


def test_parquet_date_out_of_range(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([0, 2**62], pa.timestamp("ms")), "b": pa.array([0, 2**30], pa.date32())})
    opened = open_rows([parquet(tmp_path / "d.parquet", table)])
    assert values(opened.use(["a"])) == [{"a": "1970-01-01T00:00:00"}, "bad-value"]
    assert values(opened.use(["b"])) == [{"b": "1970-01-01"}, "bad-value"]


def test_parquet_use_no_column(tmp_path: Path) -> None:
    opened = open_rows([parquet(tmp_path / "d.parquet", pa.table({"a": [1, 2]}))])
    assert values(opened.use([])) == [{}, {}]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all"])
def test_not_parquet(tmp_path: Path, content: bytes) -> None:
    error = fails([write(tmp_path / "d.parquet", content)])
    assert error.code == "bad-parquet"
    assert "d.parquet" in error.message


def test_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    parquet(path, pa.table({"a": [f"{i * 7919}" for i in range(5000)]}), write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[1000] ^= 0xFF
    path.write_bytes(content)
    assert fails([str(path)]).code == "bad-parquet"


def test_real_data() -> None:
    path = SHARED_DATA / "mmlu_test.parquet"
    if not path.exists():
        pytest.skip("the shared data sets are not beside this checkout")
    with open_rows([str(path)]) as opened:
        listed = list(opened)
        assert len(listed) == MMLU_ROWS
        assert [row.values for row in listed] == pq.read_table(path).to_pylist()
        assert opened.get(9_999) == listed[9_999]


# --- files, globs, compression, stdin ----------------------------------------------------------


def test_several_files_and_globs(tmp_path: Path) -> None:
    for name in ("b2", "b1"):
        write(tmp_path / f"{name}.jsonl", f'{{"n": "{name}"}}')
    first = write(tmp_path / "z.csv", "n,m\nz,1\n")
    opened = open_rows([first, str(tmp_path / "b*.jsonl")])
    assert values(opened) == [{"n": "z", "m": "1"}, {"n": "b1"}, {"n": "b2"}]
    assert opened.columns == ["n", "m"]


def test_a_name_with_glob_characters(tmp_path: Path) -> None:
    assert values(open_rows([write(tmp_path / "d[1].jsonl", '{"a": 1}')])) == [{"a": 1}]


def test_more_files_than_are_kept_open(tmp_path: Path) -> None:
    for i in range(80):
        write(tmp_path / f"{i:03}.jsonl", f'{{"i": {i}}}\n')
    assert values(open_rows([str(tmp_path / "*.jsonl")])) == [{"i": i} for i in range(80)]


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_compressed(tmp_path: Path, suffix: str, compress: Any) -> None:
    parts = compress(b'{"a": 1}\n') + compress(b'{"a": 2}\n')  # two members in one file
    lines = write(tmp_path / f"d.jsonl{suffix}", parts)
    table = write(tmp_path / f"d.csv{suffix}", compress(b"a\n3\n"))
    pq.write_table(pa.table({"a": [4]}), tmp_path / "d.parquet")
    rows = write(tmp_path / f"d.parquet{suffix}", compress((tmp_path / "d.parquet").read_bytes()))
    with open_rows([lines, table, rows], spool_dir=tmp_path / "spool") as opened:
        assert values(opened) == [{"a": 1}, {"a": 2}, {"a": "3"}, {"a": 4}]
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst"])
def test_damaged_compressed_file(tmp_path: Path, name: str) -> None:
    compress = gzip.compress if name.endswith(".gz") else zstd
    whole = compress(b'{"a": 1}\n' * 1000)
    for content in (whole[:-5], b"plain text"):
        error = fails([write(tmp_path / name, content)])
        assert error.code == "bad-compressed"
        assert name in error.message


def test_stdin(tmp_path: Path) -> None:
    opened = open_rows(["-"], stdin=io.BytesIO(b'{"a": 1}\nbad\n'), spool_dir=tmp_path)
    assert values(opened) == [{"a": 1}, "bad-json"]
    assert opened.get(1).where == "-:2"
    assert fails(["-", "-"]).code == "repeated-stdin"


def test_stdin_of_a_process() -> None:
    code = "from sglbatch.data import open_rows; print([row.values for row in open_rows(['-'])])"
    done = subprocess.run([sys.executable, "-c", code], input='{"a": 1}', capture_output=True, text=True, check=True)
    assert done.stdout == "[{'a': 1}]\n"


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    assert fails([]).code == "no-input"
    assert fails([str(tmp_path / "none.jsonl")]).code == "missing-file"
    assert fails([str(tmp_path / "*.jsonl")]).code == "missing-file"
    assert fails([str(tmp_path)]).code == "not-a-file"
    assert fails(["/dev/null"]).code == "not-a-file"
    for name in ("d.txt", "d", "d.gz", "d.xlsx"):
        error = fails([write(tmp_path / name, "x")])
        assert error.code == "unknown-format"
        assert error.hint is not None and ".parquet" in error.hint
    assert fails([write(tmp_path / "d.jsonl", '{"a": 1}')], limit=0).code == "bad-limit"


def test_empty_data(tmp_path: Path) -> None:
    empty = [write(tmp_path / "d.jsonl", ""), write(tmp_path / "d.csv", "a,b\n"), write(tmp_path / "e.csv", "")]
    empty.append(parquet(tmp_path / "d.parquet", pa.table({"a": pa.array([], pa.string())})))
    for paths in ([path] for path in empty):
        assert fails(paths).code == "empty-data"
    full = write(tmp_path / "f.jsonl", '{"a": 1}')
    assert values(open_rows([*empty, full])) == [{"a": 1}]


def test_limit(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", "".join(f'{{"a": {i}}}\n' for i in range(3)))
    table = parquet(tmp_path / "b.parquet", pa.table({"b": list(range(10))}), row_group_size=2)
    text = write(tmp_path / "c.csv", "c\n1\n2\n")
    paths = [lines, table, text]
    everything = values(open_rows(paths))
    for limit in range(1, 20):
        assert values(open_rows(paths, limit=limit)) == everything[:limit]


def test_use_columns(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", '{"a": 1, "b": 2}\n')
    text = write(tmp_path / "c.csv", "b,c\n1,2\n")
    opened = open_rows([lines, text]).use({"b"})
    assert opened.columns == ["b"]
    assert values(opened) == [{"b": 2}, {"b": "1"}]


def test_get_out_of_range(tmp_path: Path) -> None:
    opened = open_rows([write(tmp_path / "a.jsonl", '{"a": 1}')])
    for index in (-1, 1):
        with pytest.raises(IndexError):
            opened.get(index)


def test_fingerprint_follows_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": 1}')
    first = open_rows([path]).fingerprint
    assert first == open_rows([path]).fingerprint == json.loads(json.dumps(first))
    write(tmp_path / "a.jsonl", '{"a": 2}')
    assert open_rows([path]).fingerprint != first


def test_a_file_cut_short_while_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    opened = open_rows([path])
    write(tmp_path / "a.jsonl", '{"a": 1}\n')
    assert opened.get(0) == Row(index=0, values={"a": 1}, error=None, where=f"{path}:1")
    with pytest.raises(SglbatchError, match="became shorter"):
        opened.get(1)


@pytest.mark.slow
def test_a_row_of_100_megabytes(tmp_path: Path) -> None:
    text = "x" * 105_000_000
    path = write(tmp_path / "a.jsonl", f'{{"a": 1}}\n{{"a": "{text}"}}\n')
    table = parquet(tmp_path / "a.parquet", pa.table({"a": [text]}))
    assert open_rows([path]).get(1).values == {"a": text}
    assert open_rows([table]).get(0).values == {"a": text}


def test_imports_stay_light() -> None:
    code = "import sys, sglbatch.data; print([m for m in ('pyarrow', 'torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
