"""CSV and TSV with a header line: text values, records found by the csv module itself."""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from sglbatch.data.jsonl import Extents, ExtentsBuilder, decode_utf8, only, skip_bom
from sglbatch.data.row import BadRow, Values
from sglbatch.data.spool import OpenFiles, unreadable
from sglbatch.errors import SglbatchError
from sglbatch.types import ErrorInfo


@dataclass(frozen=True, kw_only=True)
class CsvRows:
    """RowSource over an uncompressed CSV file. Values are text; an empty field is "" and never null.

    Quoting is RFC 4180's: a field in double quotes may hold delimiters, line ends and doubled quotes.
    Empty lines are no rows.
    """

    name: str
    path: Path
    files: OpenFiles
    delimiter: str
    header: list[str]
    extents: Extents
    used: frozenset[str] | None = None

    @property
    def columns(self) -> list[str]:
        return [name for name in self.header if self.used is None or name in self.used]

    def __len__(self) -> int:
        return len(self.extents.starts)

    def read(self, index: int) -> Values | ErrorInfo:
        data = self.files.read(self.path, int(self.extents.starts[index]), int(self.extents.ends[index]))
        try:
            fields = _parse_record(decode_utf8(data), self.delimiter)
        except BadRow as error:
            return error.info
        if len(fields) != len(self.header):
            return ErrorInfo(
                code="bad-row", message=f"the record has {len(fields)} fields, the header has {len(self.header)}"
            )
        return only(dict(zip(self.header, fields, strict=True)), self.used)

    def __iter__(self) -> Iterator[Values | ErrorInfo]:
        return (self.read(index) for index in range(len(self)))

    def where(self, index: int) -> str:
        return f"{self.name}:{self.extents.lines[index]}"

    def use(self, columns: Collection[str]) -> CsvRows:
        return replace(self, used=frozenset(columns))


def index_csv(name: str, path: Path, *, files: OpenFiles, limit: int | None, delimiter: str) -> CsvRows:
    """Find the records of a CSV file, at most ``limit`` of them after the header.

    Raises:
        SglbatchError: unreadable-file, bad-encoding, bad-header.
    """
    builder = ExtentsBuilder()
    header: list[str] | None = None
    try:
        with path.open("rb") as file:
            for start, end, line in _records(name, file, delimiter):
                if header is None:
                    header = _header(name, line, files.read(path, start, end), delimiter)
                elif limit is not None and len(builder) >= limit:
                    break
                else:
                    builder.add(start, end, line)
    except OSError as error:
        raise unreadable(name, error) from error
    return CsvRows(name=name, path=path, files=files, delimiter=delimiter, header=header or [], extents=builder.build())


class _CountedLines:
    """Lines for a csv reader, which takes only as many as its record needs: so ``offset`` is where the record ends."""

    def __init__(self, file: BinaryIO, offset: int) -> None:
        self._file = file
        self.offset = offset
        self.num_lines = 0

    def __iter__(self) -> _CountedLines:
        return self

    def __next__(self) -> str:
        data = self._file.readline()
        if not data:
            raise StopIteration
        self.offset += len(data)
        self.num_lines += 1
        return data.decode("utf-8", "surrogateescape")


def _records(name: str, file: BinaryIO, delimiter: str) -> Iterator[tuple[int, int, int]]:
    """(start, end, first line) of every record; one that cannot be parsed ends at the line where that showed."""
    lines = _CountedLines(file, skip_bom(name, file))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        start, line = lines.offset, lines.num_lines + 1
        try:
            with _unlimited_fields():
                fields = next(reader)
        except StopIteration:
            return
        except csv.Error:
            fields = None  # the row's error comes when the row is read
        if fields != []:
            yield start, lines.offset, line


def _header(name: str, line: int, data: bytes, delimiter: str) -> list[str]:
    where = f"{name}:{line}"
    try:
        header = _parse_record(decode_utf8(data), delimiter)
    except BadRow as error:
        raise SglbatchError("bad-header", str(error), where=where, hint="the first line names the columns") from error
    repeated = sorted({column for column in header if header.count(column) > 1})
    if repeated:
        raise SglbatchError(
            "bad-header",
            f"column {repeated[0]!r} occurs more than once",
            where=where,
            hint="give every column its own name",
        )
    return header


def _parse_record(text: str, delimiter: str) -> list[str]:
    """Raises BadRow bad-csv."""
    try:
        with _unlimited_fields():
            return next(csv.reader([text], delimiter=delimiter, strict=True))
    except csv.Error as error:
        reason = "a quoted field is never closed" if "unexpected end" in str(error) else str(error)
        raise BadRow("bad-csv", f"not CSV: {reason}") from error


@contextmanager
def _unlimited_fields() -> Iterator[None]:
    """The csv module refuses fields over 128 KiB unless its process-wide limit is raised; put back at once."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)
