"""One input row, and what every format's reader gives."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from sglbatch.types import ErrorInfo

Values: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One input row. Exactly one of ``values`` and ``error`` is set.

    Args:
        index: place in the input, from 0.
        values: column -> Python value; a column the row lacks is absent.
        where: ``file:line`` (JSONL, CSV; the line a record starts at) or ``file:row N`` (Parquet, from 1).
    """

    index: int
    values: Values | None
    error: ErrorInfo | None
    where: str


class BadRow(Exception):
    """A row that cannot be read; becomes the row's error and never leaves ``data``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.info = ErrorInfo(code=code, message=message)


class RowSource(Protocol):
    """The rows of one file. ``read`` and iteration give the values or the error of a row."""

    @property
    def columns(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Values | ErrorInfo: ...

    def __iter__(self) -> Iterator[Values | ErrorInfo]: ...

    def where(self, index: int) -> str: ...

    def use(self, columns: Collection[str]) -> RowSource:
        """The same rows with only these columns in their values."""
