"""The journal survives being cut anywhere and damaged anywhere, and says what it lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.job.journal import Journal
from sglbatch.job.records import decode_record, encode_record, numbered_files

VALUES = st.dictionaries(
    st.text(max_size=5), st.one_of(st.text(), st.integers(-(2**53), 2**53), st.lists(st.integers(0, 9)), st.none())
)
CALLS = st.dictionaries(st.text("abcdef0123456789", min_size=1, max_size=8), VALUES, max_size=12)


def fill(folder: Path, calls: dict[str, dict[str, Any]], *, segment_bytes: int = 2**20) -> None:
    journal = Journal(folder, segment_bytes=segment_bytes)
    for key, value in calls.items():
        journal.put(key, value)
    journal.close()


def content(folder: Path) -> dict[str, Any]:
    journal = Journal(folder)
    found = {key: journal.get(key) for key in list(journal._index)}
    journal.close()
    return found


@settings(max_examples=40, deadline=None)
@given(calls=CALLS, segment_bytes=st.sampled_from([1, 60, 2**20]))
def test_what_is_put_is_found_again(
    tmp_path_factory: pytest.TempPathFactory, calls: dict[str, Any], segment_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    fill(folder, calls, segment_bytes=segment_bytes)
    assert content(folder) == calls
    if calls and segment_bytes == 1:
        assert len(numbered_files(folder)) == len(calls)


@settings(max_examples=40, deadline=None)
@given(calls=CALLS.filter(bool), data=st.data())
def test_cut_anywhere_it_keeps_every_whole_line(
    tmp_path_factory: pytest.TempPathFactory, calls: dict[str, Any], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    fill(folder, calls)
    [segment] = numbered_files(folder)
    whole = segment.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    segment.write_bytes(whole[:cut])
    lines = whole.split(b"\n")[:-1]
    ends = [sum(len(line) + 1 for line in lines[: i + 1]) - 1 for i in range(len(lines))]  # a line lives by its content
    num_kept = sum(end <= cut for end in ends)

    journal = Journal(folder)
    assert len(journal) == num_kept
    assert journal.counts.corrupt == 0
    assert journal.counts.torn == (1 if whole[:cut].rpartition(b"\n")[2] and cut not in ends else 0)
    journal.put("later", {"x": 1})  # a new segment: the torn line is never continued
    journal.close()
    assert content(folder) == {**dict(list(calls.items())[:num_kept]), "later": {"x": 1}}


@settings(max_examples=40, deadline=None)
@given(calls=CALLS.filter(lambda c: len(c) > 1), data=st.data())
def test_a_changed_byte_costs_one_line_and_is_counted(
    tmp_path_factory: pytest.TempPathFactory, calls: dict[str, Any], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    fill(folder, calls)
    [segment] = numbered_files(folder)
    damaged = bytearray(segment.read_bytes())
    place = data.draw(st.integers(0, len(damaged) - 2))
    if damaged[place : place + 1] == b"\n":
        place -= 1
    damaged[place] ^= data.draw(st.sampled_from([1, 64, 255]))
    if damaged[place : place + 1] == b"\n":
        damaged[place] = 0
    segment.write_bytes(damaged)

    journal = Journal(folder)
    assert len(journal) == len(calls) - 1
    assert journal.counts.corrupt == 1
    assert all(journal.get(key) == calls[key] for key in journal._index)
    journal.close()


def test_lines_are_json_that_other_tools_read(tmp_path: Path) -> None:
    fill(tmp_path, {"k": {"text": 'ünïcode "quoted"\n\x1b'}})
    [line] = numbered_files(tmp_path)[0].read_text("utf-8").splitlines()
    value = json.loads(line)
    assert value["key"] == "k" and value["kind"] == "call" and value["value"]["text"] == 'ünïcode "quoted"\n\x1b'
    assert len(value["crc"]) == 8


def test_lone_surrogates_pass(tmp_path: Path) -> None:
    assert decode_record(encode_record({"a": "\ud800"})[:-1]) == {"a": "\ud800"}


def test_each_process_starts_a_segment_and_touches_no_other(tmp_path: Path) -> None:
    fill(tmp_path, {"a": {}})
    first = numbered_files(tmp_path)[0].read_bytes()
    Journal(tmp_path).close()
    assert len(numbered_files(tmp_path)) == 1, "a run without calls leaves nothing"
    fill(tmp_path, {"b": {}})
    assert [p.name for p in numbered_files(tmp_path)] == ["000001.jsonl", "000002.jsonl"]
    assert numbered_files(tmp_path)[0].read_bytes() == first


def test_another_process_sees_what_was_flushed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.put("a", {"x": 1})
    assert content(tmp_path) == {}
    journal.flush()
    assert content(tmp_path) == {"a": {"x": 1}}
    journal.put("b", {"x": 2})
    assert journal.get("b") == {"x": 2}, "what is still buffered is found as well"
    journal.close()


def test_damage_after_opening_is_not_served(tmp_path: Path) -> None:
    fill(tmp_path, {"a": {"x": 1}})
    journal = Journal(tmp_path)
    segment = numbered_files(tmp_path)[0]
    segment.write_bytes(segment.read_bytes().replace(b'"x":1', b'"x":2'))
    assert journal.get("a") is None and journal.counts.corrupt == 1
    journal.close()
