"""One finished row on its way to the output, and the names the output keeps for itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sglbatch.errors import SglbatchError
from sglbatch.types import ErrorInfo, Usage, VarType

RESERVED_COLUMNS: Final = ("_return", "_error", "_finish", "_usage")


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A variable of the program.

    Args:
        declared: None: its type is found from its values.
        asked: an answer was to set it: ``_finish`` has a place for it, though maybe no row has a reason there.
    """

    name: str
    declared: VarType | None = None
    asked: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputRow:
    """One finished row.

    Args:
        values: variable -> value; a variable the row never set is absent.
        returned: what the program returned; counts only with ``has_returned``.
        finish: variable -> finish reason.
        means: variable -> how an endpoint was brought to choose it.
        kept: input columns to copy, by their output names, in output order.
        extras: further columns (``_transcript``).
    """

    values: dict[str, Any]
    returned: Any
    has_returned: bool
    error: ErrorInfo | None
    finish: dict[str, str]
    usage: Usage
    kept: dict[str, Any]
    extras: dict[str, Any]
    means: dict[str, str] = field(default_factory=dict)


def check_collisions(kept: Sequence[str], produced: Iterable[str], prefix: str = "") -> dict[str, str]:
    """Input column -> output column of the kept columns.

    Args:
        produced: what the run makes: variables and extras; the reserved names count anyway.

    Raises:
        SglbatchError: column-collision, two columns would have one name; reserved-name, a variable has a name that
            every output uses.
    """
    made = set(produced)
    reserved = sorted(made.intersection(RESERVED_COLUMNS))
    if reserved:
        raise SglbatchError(
            "reserved-name", f"{reserved[0]} is a column that every output has", hint="give the variable another name"
        )
    names = {column: prefix + column for column in kept}
    taken = [column for column, name in names.items() if name in made or name in RESERVED_COLUMNS]
    if taken:
        raise SglbatchError(
            "column-collision",
            f"input column {taken[0]!r} and an output column would both be named {names[taken[0]]!r}",
            hint="--keep-prefix in_" if prefix != "in_" else "--keep-prefix input_",
        )
    return names
