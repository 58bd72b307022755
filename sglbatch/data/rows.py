"""The rows of a data set: several files in order, read one at a time or at any place."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sglbatch.data.csvrows import index_csv
from sglbatch.data.jsonl import index_jsonl
from sglbatch.data.paths import InputFile, expand_paths
from sglbatch.data.row import Row, RowSource, Values
from sglbatch.data.spool import OpenFiles, Spool, content_hash, decompressed_chunks, stream_chunks, unreadable
from sglbatch.errors import SglbatchError
from sglbatch.types import ErrorInfo


class Inputs:
    """The files that rows come from, whichever of their rows are looked at; ``close`` removes what was spooled."""

    def __init__(self, paths: Sequence[tuple[str, Path]], *, spool: Spool, files: OpenFiles) -> None:
        self._paths = list(paths)
        self._spool = spool
        self._files = files

    @cached_property
    def fingerprint(self) -> list[dict[str, Any]]:
        """See ``Rows.fingerprint``."""
        try:
            return [
                {"name": name, "size_bytes": path.stat().st_size, "blake2b": content_hash(path)}
                for name, path in self._paths
            ]
        except OSError as error:
            raise unreadable(str(error.filename), error) from error

    def close(self) -> None:
        self._files.close()
        self._spool.close()


class Rows:
    """The rows of all input files, in order. Only offsets are in memory; a row is read when it is asked for.

    A row that cannot be read counts as a row and carries its error. Close it (or use ``with``) to remove
    spooled copies of compressed and piped inputs.
    """

    def __init__(self, sources: Sequence[RowSource], inputs: Inputs) -> None:
        self._sources = list(sources)
        self._ends = np.cumsum([len(source) for source in sources], dtype=np.int64)  # [num_files]
        self._inputs = inputs

    @property
    def columns(self) -> list[str]:
        """Every column of any file, in first-seen order."""
        return list(dict.fromkeys(itertools.chain.from_iterable(source.columns for source in self._sources)))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[Row]:
        index = 0
        for source in self._sources:
            for i, content in enumerate(source):
                yield _row(index, content, source.where(i))
                index += 1

    def get(self, index: int) -> Row:
        """Row ``index`` of the input. Raises IndexError when there is none."""
        source, i = self._place(index)
        return _row(index, source.read(i), source.where(i))

    def where(self, index: int) -> str:
        """As ``Row.where`` of row ``index``, which is not read."""
        source, i = self._place(index)
        return source.where(i)

    def _place(self, index: int) -> tuple[RowSource, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        file_index = int(np.searchsorted(self._ends, index, side="right"))
        source = self._sources[file_index]
        return source, index - int(self._ends[file_index]) + len(source)

    def use(self, columns: Collection[str]) -> Rows:
        """The same rows with only these columns: the others are not read, so what is wrong in them is no error."""
        return Rows([source.use(columns) for source in self._sources], self._inputs)

    def select(self, indices: Sequence[int]) -> Rows:
        """Only the rows at these places, ascending; of the same input."""
        return Rows([_Selected(self, indices)], self._inputs)

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """What the input is, ready for JSON: name, size_bytes and blake2b (of the stored bytes) of every file."""
        return self._inputs.fingerprint

    @property
    def identity(self) -> list[list[Any]]:
        """[bytes, hash] of every input file: what the data is, not where it lies."""
        return [[file["size_bytes"], file["blake2b"]] for file in self.fingerprint]

    def close(self) -> None:
        self._inputs.close()

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Selected:
    """Some of the rows of a data set, as a source."""

    def __init__(self, rows: Rows, indices: Sequence[int]) -> None:
        self._rows = rows
        self._indices = indices

    @property
    def columns(self) -> list[str]:
        return self._rows.columns

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> Values | ErrorInfo:
        row = self._rows.get(int(self._indices[index]))
        content = row.error if row.values is None else row.values
        assert content is not None
        return content

    def __iter__(self) -> Iterator[Values | ErrorInfo]:
        return map(self.read, range(len(self)))

    def where(self, index: int) -> str:
        return self._rows.where(int(self._indices[index]))

    def use(self, columns: Collection[str]) -> _Selected:
        return _Selected(self._rows.use(columns), self._indices)


def open_rows(
    paths: Sequence[str], *, limit: int | None = None, spool_dir: Path | None = None, stdin: BinaryIO | None = None
) -> Rows:
    """Open a data set: files, globs, or ``-`` for JSONL on standard input.

    Args:
        paths: read in this order; a glob's matches are sorted.
        limit: only the first ``limit`` rows; what lies behind them is not looked at, for columns neither.
        spool_dir: where copies of compressed and piped inputs go (default: the system's temporary folder).
        stdin: what ``-`` reads (default: the process's standard input).

    Raises:
        SglbatchError: no row at all (empty-data), a file that is missing, unreadable or not what its name says.
    """
    if limit is not None and limit < 1:
        raise SglbatchError("bad-limit", f"the limit is {limit}", hint="give a number of rows, at least 1")
    inputs = expand_paths(paths)
    spool, files = Spool(spool_dir), OpenFiles()
    opened: list[tuple[str, Path]] = []
    sources: list[RowSource] = []
    left = limit
    for file in inputs:
        if left == 0:
            break
        path, stored = _readable_copy(file, spool, stdin)
        opened.append((file.name, stored))
        sources.append(_open_source(file, path, spool=spool, files=files, limit=left))
        left = None if left is None else left - len(sources[-1])
    rows = Rows(sources, Inputs(opened, spool=spool, files=files))
    if not len(rows):
        names = ", ".join(file.name for file in inputs[:5]) + (", ..." if len(inputs) > 5 else "")
        raise SglbatchError(
            "empty-data", f"the data set has no rows: {names}", hint="give a file with at least one row"
        )
    return rows


def _readable_copy(file: InputFile, spool: Spool, stdin: BinaryIO | None) -> tuple[Path, Path]:
    """(the path to read rows from, the path whose bytes are the input)."""
    if file.path is None:
        path = spool.copy("standard input", stream_chunks(stdin or sys.stdin.buffer))
        return path, path
    if file.codec is None:
        return file.path, file.path
    return spool.copy(file.name, decompressed_chunks(file.name, file.path, file.codec)), file.path


def _open_source(file: InputFile, path: Path, *, spool: Spool, files: OpenFiles, limit: int | None) -> RowSource:
    if file.format == "parquet":
        from sglbatch.data.parquet import open_parquet

        return open_parquet(file.name, path, spool=spool, files=files, limit=limit)
    if file.format == "jsonl":
        may_be_document = file.name.lower().removesuffix(".gz").removesuffix(".zst").endswith(".json")
        return index_jsonl(file.name, path, files=files, limit=limit, may_be_document=may_be_document)
    delimiter = "\t" if file.format == "tsv" else ","
    return index_csv(file.name, path, files=files, limit=limit, delimiter=delimiter)


def _row(index: int, content: Values | ErrorInfo, where: str) -> Row:
    if isinstance(content, ErrorInfo):
        return Row(index=index, values=None, error=content, where=where)
    return Row(index=index, values=content, error=None, where=where)
