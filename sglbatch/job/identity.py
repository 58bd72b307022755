"""What makes a row, a template and a data set the same as last time."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from sglbatch.errors import SglbatchError

_MAX_NAMED = 5
_PLAIN: Final = frozenset({str, int, bool, type(None)})
"""Types of values that are equal where their JSON is, told apart by type."""
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=repr)


def short_hash(value: Any) -> str:
    """16 hex digits over the canonical JSON of ``value``; values JSON has no form for go in by their ``repr``."""
    data = _ENCODER.encode(value)
    return hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def numbered_key(arguments: Mapping[str, Any], number: int) -> str:
    """The key of the ``number``-th row with these arguments."""
    return f"{short_hash(arguments)}-{number}"


class RowKeys:
    """Gives every row its key: the value of an id column, or the hash of its arguments and which occurrence it is.

    The input position has no part in it, so that rows may be added, dropped and shuffled.
    """

    def __init__(self, id_column: str | None) -> None:
        self._id_column = id_column
        self.occurrence = 0
        """Which of the rows with equal arguments the latest one was; 0 where keys are a column's."""
        self._seen: Counter[str | tuple[tuple[str, type, Any], ...]] = Counter()
        self._places: dict[str, str] = {}
        self._duplicates: list[str] = []
        self._num_duplicates = 0

    def key(self, row: Mapping[str, Any], arguments: Mapping[str, Any], *, where: str) -> str:
        """The key of the next row. Equal ids are remembered for ``check``."""
        if self._id_column is None:
            content = short_hash(arguments)
            return f"{content}-{self._counted(content)}"
        return self._by_id(row, where=where)

    def later(self, row: Mapping[str, Any], arguments: Mapping[str, Any], *, where: str) -> str | Callable[[], str]:
        """The same key, or what makes it, where only the hash is left to do: of long texts it is most of the work.

        Not for rows among which others go through ``key``.
        """
        if self._id_column is not None:
            return self._by_id(row, where=where)
        if not _PLAIN.issuperset(map(type, arguments.values())):
            return self.key(row, arguments, where=where)
        content = tuple((name, type(arguments[name]), arguments[name]) for name in sorted(arguments))
        return partial(numbered_key, arguments, self._counted(content))

    def _counted(self, content: str | tuple[tuple[str, type, Any], ...]) -> int:
        self._seen[content] += 1
        self.occurrence = self._seen[content]
        return self.occurrence

    def _by_id(self, row: Mapping[str, Any], *, where: str) -> str:
        assert self._id_column is not None
        value = row[self._id_column]
        key = value if isinstance(value, str) else json.dumps(value, default=str)
        if key in self._places:
            self._num_duplicates += 1
            if len(self._duplicates) < _MAX_NAMED:
                self._duplicates.append(f"{key!r} ({self._places[key]} and {where})")
        else:
            self._places[key] = where
        return f"id:{key}"

    def check(self) -> None:
        """Raises SglbatchError ``duplicate-id`` when two rows had the same id."""
        if self._duplicates:
            more = self._num_duplicates - len(self._duplicates)
            raise SglbatchError(
                "duplicate-id",
                f"column {self._id_column!r} is not unique: {', '.join(self._duplicates)}"
                + (f" and {more} more" if more > 0 else ""),
                hint="name a column that is different in every row, or leave --id out",
            )
