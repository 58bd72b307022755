"""What runs one row, as a driver sees it: the row's function, or a script of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from sglbatch.lang.calls import Answer, Call
from sglbatch.lang.environment import Environment
from sglbatch.lang.expressions import TemplateError
from sglbatch.lang.guard import Guard
from sglbatch.lang.outcome import Outcome
from sglbatch.types import CallPath

if TYPE_CHECKING:
    from sglbatch.lang.function import SglFunction

RowKey: TypeAlias = str | Callable[[], str]
"""A row's key, or what makes it when it is asked for."""


def made(row_key: RowKey) -> str:
    """The key itself."""
    return row_key if isinstance(row_key, str) else row_key()


class RowProgram(Protocol):
    """``Program`` and ``Replay``; see ``Program`` for what each means."""

    @property
    def function(self) -> SglFunction: ...

    @property
    def program_id(self) -> int: ...

    @property
    def row_key(self) -> str: ...

    @property
    def done(self) -> bool: ...

    @property
    def outcome(self) -> Outcome: ...

    @property
    def template_error(self) -> TemplateError | None: ...

    def start(self, environment: Environment, guard: Guard) -> None: ...

    def take_calls(self) -> list[Call]: ...

    def may_extend(self, path: CallPath) -> bool: ...

    def deliver(self, path: CallPath, answer: Answer, position: int | None = None) -> None: ...

    def wake(self) -> None: ...

    def park(self) -> None: ...
