"""Writes finished rows as one Parquet or JSON Lines file with typed columns."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, cast

from sglbatch.data.atomic import atomic_file, check_place
from sglbatch.data.columns import ColumnSet
from sglbatch.data.outputrow import RESERVED_COLUMNS, Column, OutputRow, check_collisions
from sglbatch.data.values import clean_text, to_json
from sglbatch.errors import SglbatchError

__all__ = [
    "RESERVED_COLUMNS",
    "Column",
    "OutputRow",
    "WriteReport",
    "check_collisions",
    "check_writable",
    "output_format",
    "suffix_of",
    "write_output",
]

_SUFFIXES: Final = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteReport:
    """What was written. ``warnings`` are sentences for the user: columns without one type, replaced characters."""

    path: Path
    num_rows: int
    num_failed: int
    columns: tuple[str, ...]
    warnings: tuple[str, ...]


def suffix_of(path: Path) -> str:
    """What says the output's format, ``.jsonl.gz`` whole; "" where nothing does."""
    return max((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), key=len, default="")


def output_format(path: Path) -> Literal["parquet", "jsonl"]:
    """Raises SglbatchError unknown-format."""
    if not path.name.endswith(_SUFFIXES):
        raise SglbatchError(
            "unknown-format", f"{path} has a format that cannot be written", hint="name it " + ", ".join(_SUFFIXES)
        )
    return "parquet" if path.name.endswith(".parquet") else "jsonl"


def check_writable(path: Path) -> None:
    """Call it before any work.

    Raises:
        SglbatchError: unknown-format, cannot-write.
    """
    output_format(path)
    check_place(path)


def write_output(path: Path, rows: Callable[[], Iterable[OutputRow]], *, columns: Sequence[Column]) -> WriteReport:
    """Write all rows to ``path``, atomically, in the order given.

    Columns: kept ones, variables in first-seen order (``columns`` first), ``_return`` when any row returned
    something, extras, ``_error``, ``_finish``, ``_usage`` (which names, for an API model, by what ``means`` each select
    was answered). A variable has its declared type if all its values have it;
    without a declaration the least type that holds all its values; where there is none, JSON text (Parquet) or the
    values as they are (JSONL), and a warning. Rows are held in memory only a batch at a time.

    Args:
        rows: called twice, to learn the types and to write; both times it must give the same rows.

    Raises:
        SglbatchError: unknown-format, cannot-write.
    """
    is_parquet = output_format(path) == "parquet"
    column_set, warnings = ColumnSet.learn(rows(), columns)
    names = (*(column.name for column in column_set.columns), "_error", "_finish", "_usage")
    notes: Counter[str] = Counter()
    num_rows = num_failed = 0

    def records() -> Iterator[dict[str, Any]]:
        nonlocal num_rows, num_failed
        for row in rows():
            num_rows += 1
            num_failed += row.error is not None
            yield column_set.record(row, json_as_text=is_parquet, notes=notes) | _fixed(row, column_set)

    with atomic_file(path) as file:
        if is_parquet:
            from sglbatch.data.parquet_output import write_parquet

            write_parquet(file, records(), column_set)
        else:
            with _compressed(file, path) as stream:
                stream.writelines(f"{to_json(record, notes)}\n".encode() for record in records())
    warnings += [f"{count} {note}" for note, count in sorted(notes.items())]
    return WriteReport(path=path, num_rows=num_rows, num_failed=num_failed, columns=names, warnings=tuple(warnings))


def _fixed(row: OutputRow, column_set: ColumnSet) -> dict[str, Any]:
    ignored: Counter[str] = Counter()
    error = row.error and {
        "code": clean_text(row.error.code, ignored),
        "message": clean_text(row.error.message, ignored),
        "call": row.error.call and clean_text(row.error.call, ignored),
    }
    given = {clean_text(name, ignored): reason for name, reason in row.finish.items()}
    finish = {name: given.get(name) for name in column_set.finish_names} if given else None
    usage: dict[str, Any] = {
        "prompt_tokens": row.usage.prompt_tokens,
        "generated_tokens": row.usage.generated_tokens,
    }
    if column_set.means_names:
        means = {clean_text(name, ignored): text for name, text in row.means.items()}
        usage["means"] = {name: means.get(name) for name in column_set.means_names} if means else None
    return {"_error": error, "_finish": finish, "_usage": usage}


@contextmanager
def _compressed(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    if path.suffix == ".gz":
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as stream:
            yield cast(BinaryIO, stream)
    elif path.suffix == ".zst":
        import pyarrow as pa

        # Arrow closes what it writes to, and the file has to stay open for its fsync.
        with os.fdopen(os.dup(file.fileno()), "wb") as copy, pa.CompressedOutputStream(copy, "zstd") as stream:
            yield stream
    else:
        yield file
