"""Finished rows of a job on disk, so that memory holds one offset a row and other processes can look on.

A file ``rows/NNNNNN.jsonl`` of checksummed lines, one for each finished row in the order of finishing; a new file for
every run of the job. The output is written from it, in input order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglbatch.job.records import (
    AppendFile,
    ReadCounts,
    decode_record,
    encode_record,
    next_numbered,
    numbered_files,
    read_records,
)
from sglbatch.types import ErrorInfo, Usage, VarType


@dataclass(frozen=True, kw_only=True)
class FinishedRow:
    """One row's outcome as it is kept: everything the output can show of it.

    Args:
        index: place in the input, from 0.
        key: the row's key; "" for a row that could not be read.
        values: the variables.
        returned: what the program returned; None when it returned nothing.
        dtypes: the variables' declared types; of those that an error kept from being set too.
        means: how an endpoint was brought to choose each select's value.
        cut: max_tokens cut one of its answers.
        logprobs: of the variables' answers, where they are saved; see ``meta_info.kept_logprobs``.
        answer_spans: of the transcript, see ``Outcome``; not kept on disk.
    """

    index: int
    key: str
    values: dict[str, Any] = field(default_factory=dict)
    returned: Any = None
    error: ErrorInfo | None = None
    finish: dict[str, str] = field(default_factory=dict)
    means: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    usage: Usage = field(default_factory=lambda: Usage(prompt_tokens=0, generated_tokens=0))
    dtypes: dict[str, VarType] = field(default_factory=dict)
    transcript: str | None = None
    logprobs: dict[str, Any] = field(default_factory=dict)
    answer_spans: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "row": self.index,
            "key": self.key,
            "values": self.values,
            "returned": self.returned,
            "error": self.error and {"code": self.error.code, "message": self.error.message, "call": self.error.call},
            "finish": self.finish,
            "means": self.means,
            "cut": self.cut or None,
            "usage": [self.usage.prompt_tokens, self.usage.generated_tokens],
            "dtypes": {name: asdict(declared) for name, declared in self.dtypes.items()},
            "transcript": self.transcript,
            "logprobs": self.logprobs,
        }
        return {k: v for k, v in record.items() if v is not None and v != {}}

    @staticmethod
    def from_json(record: dict[str, Any]) -> FinishedRow:
        return FinishedRow(
            index=record["row"],
            key=record["key"],
            values=record.get("values", {}),
            returned=record.get("returned"),
            error=ErrorInfo(**record["error"]) if "error" in record else None,
            finish=record.get("finish", {}),
            means=record.get("means", {}),
            cut=record.get("cut", False),
            usage=Usage(prompt_tokens=record["usage"][0], generated_tokens=record["usage"][1]),
            dtypes={name: _var_type(value) for name, value in record.get("dtypes", {}).items()},
            transcript=record.get("transcript"),
            logprobs=record.get("logprobs", {}),
        )


def _var_type(value: dict[str, Any]) -> VarType:
    return VarType(**{**value, "choices": tuple(value["choices"])})


class RowStore:
    """The rows file of one run. ``create`` starts a new one for writing, ``open`` reads an existing one."""

    def __init__(self, path: Path, *, num_rows: int, writer: AppendFile | None) -> None:
        self.path = path
        self._writer = writer
        self._places: npt.NDArray[np.int64] = np.full((num_rows, 2), -1, np.int64)  # [row, (offset, length)]
        self.counts = ReadCounts()

    @staticmethod
    def create(folder: Path, *, num_rows: int) -> RowStore:
        folder.mkdir(parents=True, exist_ok=True)
        path = next_numbered(folder)
        return RowStore(path, num_rows=num_rows, writer=AppendFile(path))

    @staticmethod
    def open(path: Path, *, num_rows: int) -> RowStore:
        store = RowStore(path, num_rows=num_rows, writer=None)
        for offset, length, record in read_records(path, store.counts):
            if record["row"] < num_rows:
                store._places[record["row"]] = (offset, length)
        return store

    @property
    def num_finished(self) -> int:
        return int((self._places[:, 0] >= 0).sum())

    def __contains__(self, index: int) -> bool:
        return bool(self._places[index, 0] >= 0)

    def put(self, row: FinishedRow) -> None:
        """Adds a finished row; a row finishes once."""
        assert self._writer is not None and row.index not in self
        line = encode_record(row.to_json())
        self._places[row.index] = (self._writer.append(line), len(line) - 1)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def sync(self) -> None:
        if self._writer is not None:
            self._writer.flush()
            self._writer.sync()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __iter__(self) -> Iterator[FinishedRow]:
        """The finished rows in input order, read one at a time."""
        self.flush()
        finished = np.flatnonzero(self._places[:, 0] >= 0)
        with self.path.open("rb") as file:
            for index in finished:
                offset, length = self._places[index]
                file.seek(int(offset))
                record = decode_record(file.read(int(length)))
                assert record is not None, f"row {index} changed on disk after it was read"
                yield FinishedRow.from_json(record)


def remove_older(folder: Path, keep: Path) -> None:
    """Deletes the rows files of earlier runs, once ``keep`` holds every row."""
    for path in numbered_files(folder):
        if path != keep:
            path.unlink()
