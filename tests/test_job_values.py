"""Options, row keys, rows on disk, the manifest."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglbatch.errors import SglbatchError
from sglbatch.job.config import MaxFailures, RunConfig, default_output, parse_pairs
from sglbatch.job.identity import RowKeys, short_hash
from sglbatch.job.manifest import Finished, Manifest, changes
from sglbatch.job.paths import JobPaths, job_of, move_aside, write_atomically
from sglbatch.job.rows import FinishedRow, RowStore
from sglbatch.types import ErrorInfo, Usage, VarType
from sglbatch.version import __version__


def manifest(**options: Any) -> Manifest:
    config = RunConfig(template=Path("t.py"), data=("d.jsonl",), model="m", output=Path("o.parquet"), **options)
    return Manifest(
        config=config, template_hash="t", model_identity="m", data=[["d", 1, 2]], num_rows=3, created=1.0, updated=2.0
    )


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert project["project"]["version"] == __version__


@pytest.mark.parametrize(
    ("text", "failed", "rows", "allowed"),
    [("0", 0, 5, True), ("0", 1, 5, False), ("3", 3, 5, True), ("10%", 1, 10, True), ("10%", 2, 10, False)],
)
def test_max_failures(text: str, failed: int, rows: int, allowed: bool) -> None:
    parsed = MaxFailures.parse(text)
    assert parsed.allows(failed, rows) is allowed
    assert MaxFailures.parse(str(parsed)) == parsed


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "101%", "-2%", "nan%"])
def test_max_failures_refuses(text: str) -> None:
    with pytest.raises(SglbatchError, match="--max-failures"):
        MaxFailures.parse(text)


def test_pairs() -> None:
    assert parse_pairs("--param", ["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for bad in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(SglbatchError, match="--param"):
            parse_pairs("--param", bad)


@pytest.mark.parametrize(
    ("data", "name"),
    [("d/q.parquet", "d/q.mc.parquet"), ("q.jsonl.gz", "q.mc.parquet"), ("a.b.csv", "a.b.mc.parquet")],
)
def test_default_output(data: str, name: str) -> None:
    assert default_output(Path("x/mc.py"), (data,)) == Path(name)


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    data = tmp_path / "d [1].jsonl"
    data.write_text("{}")
    assert default_output(Path("mc.py"), (str(data),)) == tmp_path / "d [1].mc.parquet"


@pytest.mark.parametrize("data", [("-",), ("*.jsonl",), ("a.csv", "b.csv"), ("s3://b/a.csv",), (".",)])
def test_no_default_output(data: tuple[str, ...]) -> None:
    with pytest.raises(SglbatchError, match="single local data file"):
        default_output(Path("mc.py"), data)


def test_row_keys_do_not_depend_on_the_place() -> None:
    rows: list[dict[str, Any]] = [{"q": "a"}, {"q": "b"}, {"q": "a"}, {"q": None}]

    def keys(order: list[int]) -> list[str]:
        keyer = RowKeys(None)
        return [keyer.key(rows[i], rows[i], where="") for i in order]

    assert len(set(keys([0, 1, 2, 3]))) == 4
    assert sorted(keys([3, 2, 1, 0])) == sorted(keys([0, 1, 2, 3]))
    assert keys([1, 0]) == [keys([0, 1])[1], keys([0, 1])[0]]


VALUES = st.one_of(
    st.sampled_from(["a", "1", "", "True", None, 0, 1, True, False, 1.0, -0.0, [1], ["a"], {"b": "a"}]), st.text()
)


@given(st.lists(st.fixed_dictionaries({"q": VALUES, "r": VALUES}), max_size=12))
def test_keys_that_are_made_later_are_the_same(rows: list[dict[str, Any]]) -> None:
    now, later = RowKeys(None), RowKeys(None)
    expected = [now.key(row, row, where="") for row in rows]
    got = [later.later(row, row, where="") for row in rows]
    assert [key if isinstance(key, str) else key() for key in reversed(got)] == expected[::-1]


def test_duplicate_ids_are_named() -> None:
    keyer = RowKeys("id")
    assert keyer.key({"id": 1}, {}, where="d:1") == keyer.key({"id": 1}, {}, where="d:2")
    keyer.key({"id": "1x"}, {}, where="d:3")
    with pytest.raises(SglbatchError) as caught:
        keyer.check()
    assert caught.value.message == "column 'id' is not unique: '1' (d:1 and d:2)"


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.binary())))
def test_hashes_do_not_depend_on_the_order(value: dict[str, Any]) -> None:
    assert short_hash(value) == short_hash(dict(reversed(value.items())))


ROW = FinishedRow(
    index=2,
    key="k",
    values={"a": "x", "b": ["y", None]},
    returned={"z": 1},
    error=ErrorInfo(code="c", message="m", call="a"),
    finish={"a": "stop"},
    dtypes={"a": VarType(kind="enum", choices=("x", "y")), "b": VarType(kind="json", is_list=True)},
    usage=Usage(prompt_tokens=5, generated_tokens=6),
    transcript="t",
)


def test_rows_come_back_in_input_order(tmp_path: Path) -> None:
    store = RowStore.create(tmp_path / "rows", num_rows=4)
    store.put(ROW)
    store.put(FinishedRow(index=0, key="first"))
    assert list(store) == [FinishedRow(index=0, key="first"), ROW]
    store.close()
    again = RowStore.open(store.path, num_rows=4)
    assert again.num_finished == 2 and 2 in again and 1 not in again
    assert list(again) == list(store)


def test_a_new_run_gets_a_new_rows_file(tmp_path: Path) -> None:
    first, second = (RowStore.create(tmp_path, num_rows=1) for _ in range(2))
    assert first.path != second.path
    first.close()
    second.close()


def test_the_manifest_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    before = manifest(params={"a": "1"}, max_failures=MaxFailures(value=2, percent=True), keep=("all",))
    before.save(path)
    after = Manifest.load(path)
    assert after.identity() == before.identity()
    assert after.config.max_failures == before.config.max_failures
    assert after.finished is None
    assert changes(before, after) == []
    finished = Finished(rows_file="000001.jsonl", num_rows=3, num_failed=1, output_stat=(10, 20))
    Manifest(**{**vars(after), "finished": finished}).save(path)
    assert Manifest.load(path).finished == finished


def test_changes_are_listed_field_by_field() -> None:
    old = manifest(params={"a": "1"}, kv_tokens=100)
    new = Manifest(**{**vars(manifest(params={"a": "2"}, temperature=0.5)), "template_hash": "t2", "data": None})
    assert changes(old, new) == [
        'params: {"a": "1"} -> {"a": "2"}',
        "temperature: null -> 0.5",
        "template: its source changed",
        "data: files added, removed or changed",
        "kv_tokens: 100 -> null (changes no result)",
    ]


def test_a_schema_counts_by_its_content_and_not_by_its_file(tmp_path: Path) -> None:
    old = manifest(schema='{"type": "integer"}', schema_file=Path("s.json"))
    assert changes(old, manifest(schema='{"type": "integer"}', schema_file=Path("copy.json"))) == []
    old.save(tmp_path / "manifest.json")
    assert Manifest.load(tmp_path / "manifest.json").config.schema_file == Path("s.json").absolute()
    value = json.loads((tmp_path / "manifest.json").read_text())
    del value["options"]["schema_file"]  # as earlier versions wrote it
    (tmp_path / "manifest.json").write_text(json.dumps(value))
    assert changes(Manifest.load(tmp_path / "manifest.json"), old) == []


@pytest.mark.parametrize(
    ("text", "code"), [("{", "job-damaged"), ('{"version": 99}', "job-version"), ("{}", "job-damaged")]
)
def test_a_manifest_that_cannot_be_used(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(SglbatchError) as caught:
        Manifest.load(tmp_path / "manifest.json")
    assert caught.value.code == code


def test_moving_aside_deletes_nothing(tmp_path: Path) -> None:
    paths = JobPaths(output=tmp_path / "o.parquet")
    assert move_aside(paths) is None
    moved = []
    for text in ("one", "two"):
        paths.folder.mkdir()
        paths.manifest.write_text(json.dumps(text))
        paths.output.write_text(text)
        target = move_aside(paths)
        assert target is not None and not paths.folder.exists() and not paths.output.exists()
        moved.append(target)
    assert [(p / "o.parquet").read_text() for p in moved] == ["one", "two"]


def test_the_job_of_an_output(tmp_path: Path) -> None:
    with pytest.raises(SglbatchError) as caught:
        job_of(tmp_path / "o.parquet")
    assert caught.value.code == "no-job"
    paths = JobPaths(output=tmp_path / "o.parquet")
    paths.folder.mkdir()
    paths.manifest.write_text("{}")
    assert job_of(paths.output) == paths == job_of(paths.folder)


def test_a_file_that_cannot_be_replaced_leaves_no_other_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "manifest.json"
    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left") as caught:
            write_atomically(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
