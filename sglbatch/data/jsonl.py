"""JSON Lines: one pass finds where each row lies and which columns there are; rows are parsed when read."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sglbatch.data.row import BadRow, Values
from sglbatch.data.spool import OpenFiles, unreadable
from sglbatch.errors import SglbatchError
from sglbatch.types import ErrorInfo

UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, kw_only=True)
class Extents:
    """Where the rows of a text file lie.

    Args:
        starts, ends: int64 [num_rows], byte offsets; a row's line ending is inside.
        lines: int64 [num_rows], the line (from 1) a row starts at.
    """

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]


class ExtentsBuilder:
    """Collects extents at 24 bytes a row."""

    def __init__(self) -> None:
        self._starts, self._ends, self._lines = array("q"), array("q"), array("q")

    def add(self, start: int, end: int, line: int) -> None:
        self._starts.append(start)
        self._ends.append(end)
        self._lines.append(line)

    def __len__(self) -> int:
        return len(self._starts)

    def build(self) -> Extents:
        starts, ends, lines = (np.array(part, dtype=np.int64) for part in (self._starts, self._ends, self._lines))
        return Extents(starts=starts, ends=ends, lines=lines)


@dataclass(frozen=True, kw_only=True)
class JsonlRows:
    """RowSource over an uncompressed JSON Lines file.

    Blank lines are no rows. A key that occurs twice in an object has its last value, as in Python's json.
    """

    name: str
    path: Path
    files: OpenFiles
    columns: list[str]
    extents: Extents
    used: frozenset[str] | None = None

    def __len__(self) -> int:
        return len(self.extents.starts)

    def read(self, index: int) -> Values | ErrorInfo:
        data = self.files.read(self.path, int(self.extents.starts[index]), int(self.extents.ends[index]))
        try:
            return only(parse_object(data), self.used)
        except BadRow as error:
            return error.info

    def __iter__(self) -> Iterator[Values | ErrorInfo]:
        return (self.read(index) for index in range(len(self)))

    def where(self, index: int) -> str:
        return f"{self.name}:{self.extents.lines[index]}"

    def use(self, columns: Collection[str]) -> JsonlRows:
        return replace(self, used=frozenset(columns), columns=[name for name in self.columns if name in columns])


def index_jsonl(name: str, path: Path, *, files: OpenFiles, limit: int | None, may_be_document: bool) -> JsonlRows:
    """Find the rows of a JSON Lines file, at most ``limit`` of them.

    Args:
        may_be_document: the name (.json) leaves open whether it is one JSON document; then that is checked.

    Raises:
        SglbatchError: unreadable-file, bad-encoding, json-document.
    """
    builder = ExtentsBuilder()
    columns: dict[str, None] = {}
    try:
        with path.open("rb") as file:
            for start, end, line, data in _lines(name, file):
                if limit is not None and len(builder) >= limit:
                    break
                if may_be_document and not builder:
                    _refuse_document(name, data)
                builder.add(start, end, line)
                try:
                    columns.update(dict.fromkeys(parse_object(data)))
                except BadRow:
                    continue  # the row's error comes when the row is read
    except OSError as error:
        raise unreadable(name, error) from error
    return JsonlRows(name=name, path=path, files=files, columns=list(columns), extents=builder.build())


def skip_bom(name: str, file: BinaryIO) -> int:
    """Move past a UTF-8 byte order mark; the offset where the text starts.

    Raises:
        SglbatchError: bad-encoding, for UTF-16.
    """
    head = file.read(len(UTF8_BOM))
    if head.startswith(UTF16_BOMS):
        raise SglbatchError(
            "bad-encoding", f"{name} is UTF-16", hint=f"make it UTF-8: iconv -f UTF-16 -t UTF-8 '{name}' > utf8-copy"
        )
    start = len(UTF8_BOM) if head == UTF8_BOM else 0
    file.seek(start)
    return start


def _lines(name: str, file: BinaryIO) -> Iterator[tuple[int, int, int, bytes]]:
    """(start, end, line number, bytes) of every line that is not blank."""
    start = skip_bom(name, file)
    for line, data in enumerate(file, start=1):
        end = start + len(data)
        if data.strip():
            yield start, end, line, data
        start = end


def _refuse_document(name: str, first_line: bytes) -> None:
    text = first_line.strip()
    if text in (b"{", b"[") or text.startswith(b"["):
        filter_text = ".[]" if text.startswith(b"[") else "."
        raise SglbatchError(
            "json-document",
            f"{name} is one JSON document, not one object a line",
            hint=f"turn it into JSON Lines: jq -c '{filter_text}' '{name}' > rows.jsonl",
        )


def parse_object(data: bytes) -> Values:
    """The JSON object in ``data``.

    Raises:
        BadRow: bad-utf8, bad-json, bad-row (JSON, but no object).
    """
    try:
        value: Any = json.loads(decode_utf8(data).rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise BadRow("bad-json", f"not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise BadRow("bad-json", "not read: nested too deeply") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise BadRow("bad-json", f"not read: {error}") from error
    if not isinstance(value, dict):
        raise BadRow("bad-row", f"a row must be a JSON object, not {_JSON_NAMES[type(value)]}")
    return value


_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def decode_utf8(data: bytes) -> str:
    """Raises BadRow bad-utf8 with the place (byte in the line, from 1) of the first bad byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("bad-utf8", f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start + 1}") from error


def only(values: Values, used: frozenset[str] | None) -> Values:
    return values if used is None else {name: value for name, value in values.items() if name in used}
