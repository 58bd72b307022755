"""What is left of a program when it has ended: one row's results."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from sglbatch.errors import SglbatchError
from sglbatch.lang.branch_text import BranchText
from sglbatch.lang.calls import ProgramError
from sglbatch.lang.guard import strip_guard
from sglbatch.lang.stream import Stream
from sglbatch.lang.variables import Variable
from sglbatch.lang.vartypes import DTYPE_REGEX
from sglbatch.types import ErrorInfo, Result, Usage, VarType

_QUOTED: Final = re.compile(DTYPE_REGEX["str"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One finished row. After an error it holds what had been gathered until then.

    Args:
        values: named variables of the root state; generated ones are text, ``dtypes`` says what they spell. Strings
            in quotes (``gen(dtype=str)``) are without them.
        dtypes: also of variables that an error kept from being set.
        returned: what the function returned (None when it returned nothing, or a state).
        finish: finish reason of each generated variable.
        means: how an endpoint was brought to choose each select's value.
        cut: max_tokens cut an answer, also one without a name or in a branch that is not joined.
        usage: tokens of all calls of the row.
        text: of the root state; not compared.
        variables: the root state's, for what else they know; not compared.
    """

    values: dict[str, Any] = field(default_factory=dict)
    returned: Any = None
    error: ErrorInfo | None = None
    finish: dict[str, str] = field(default_factory=dict)
    means: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    usage: Usage = field(default_factory=lambda: Usage(prompt_tokens=0, generated_tokens=0))
    text: BranchText | None = field(default=None, compare=False, repr=False)
    dtypes: dict[str, VarType] = field(default_factory=dict)
    variables: Mapping[str, Variable] = field(default_factory=dict, compare=False, repr=False)

    @property
    def transcript(self) -> str:
        """The root state's whole text, markup of the chat template included."""
        return "" if self.text is None else self.text.plain()

    @property
    def answer_spans(self) -> tuple[tuple[int, int], ...]:
        """Where the transcript has answers: [first, behind the last) character of each."""
        return () if self.text is None else self.text.answer_spans()


def outcome_of(root: Stream, *, returned: Any, error: ErrorInfo | None, results: Iterable[Result]) -> Outcome:
    """The outcome of a program whose root stream has ended."""
    variables = root.variables
    usage = Usage(prompt_tokens=0, generated_tokens=0)
    cut = False
    for result in results:
        usage = usage + result.usage
        cut |= result.finish_reason == "length"
    lost = {name: _plain_type(kind) for name, kind in root.lost_types.items() if name not in variables}
    return Outcome(
        values={name: _plain(variable) for name, variable in variables.items()},
        returned=strip_guard(returned),
        error=error,
        finish={name: v.finish for name, v in variables.items() if v.finish is not None},
        means={name: v.means for name, v in variables.items() if v.means is not None},
        cut=cut,
        usage=usage,
        text=root.text,
        dtypes={name: _plain_type(variable.var_type) for name, variable in variables.items()} | lost,
        variables=variables,
    )


def _plain(variable: Variable) -> Any:
    value = variable.value if variable.generated else strip_guard(variable.value)
    return _without_quotes(value) if variable.var_type.quoted else value


def _without_quotes(value: Any) -> Any:
    """What strings in quotes spell, also those of a list."""
    if isinstance(value, list):
        return [_without_quotes(item) for item in value]
    return value[1:-1] if type(value) is str and _QUOTED.fullmatch(value) else value


def _plain_type(var_type: VarType) -> VarType:
    if not var_type.choices and not var_type.quoted:
        return var_type
    return replace(var_type, choices=strip_guard(var_type.choices), quoted=False)


def describe(error: BaseException, source: Path) -> ErrorInfo:
    """A row's error for an exception that left its function, with the innermost line inside the template."""
    place = template_line(error, source)
    suffix = f" ({place})" if place else ""
    if isinstance(error, ProgramError):
        return error.info
    if isinstance(error, SglbatchError):
        return ErrorInfo(code=error.code, message=error.message + suffix)
    text = str(strip_guard(str(error)))
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return ErrorInfo(code="program-error", message=message + suffix)


def template_line(error: BaseException, source: Path) -> str | None:
    """``file:line`` of the innermost frame of the traceback inside the template."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(source)]
    return f"{source.name}:{lines[-1]}" if lines else None
