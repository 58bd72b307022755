"""A program's values, and how a join brings those of branches together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglbatch.lang.vartypes import list_of, merge_types
from sglbatch.types import VarType

Meta = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A value of the program.

    Args:
        meta: of the call that set it; one for each answer where there are several.
        generated: straight from the model, not yet guarded.
        joined: a list made by a join; a later join of the same name extends it.
        means: see ``types.Result``; of several answers all that there were.
    """

    value: Any
    var_type: VarType
    finish: str | None = None
    meta: Meta | list[Meta] | None = None
    generated: bool = False
    joined: bool = False
    means: str | None = None


def all_means(variables: Sequence[Variable]) -> str | None:
    """The means of several answers as one text."""
    return ", ".join(sorted({variable.means for variable in variables if variable.means is not None})) or None


def worst_finish(finishes: Sequence[str]) -> str | None:
    """One finish reason for several answers: ``length`` where any was cut."""
    return "length" if "length" in finishes else next(iter(finishes), None)


def gathered(found: Sequence[Variable | None], readable: Callable[[Variable], Any]) -> Variable:
    """One variable of several branches as a list with an entry for each branch; None where it was not set.

    Args:
        readable: a variable's value as data that may go back into a prompt.
    """
    present = [variable for variable in found if variable is not None]
    var_type = present[0].var_type
    for variable in present[1:]:
        var_type = merge_types(var_type, variable.var_type)
    return Variable(
        value=[None if variable is None else readable(variable) for variable in found],
        var_type=list_of(var_type),
        finish=worst_finish([v.finish for v in present if v.finish is not None]),
        joined=True,
        means=all_means(present),
    )


def extended(before: Variable | None, joined: Variable) -> Variable:
    """A joined variable behind the results of an earlier join of the same name, so that nothing is lost."""
    if before is None or not before.joined:
        return joined
    return Variable(
        value=[*before.value, *joined.value],
        var_type=merge_types(before.var_type, joined.var_type),
        finish=worst_finish([finish for finish in (before.finish, joined.finish) if finish is not None]),
        joined=True,
        means=all_means([before, joined]),
    )
