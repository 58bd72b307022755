"""Rows whose program is known by a script: they start without Python's running the function, or never run it.

A row's first calls are made from the script's opening, so that a row that waits for them holds little more than its
arguments. When the first answer arrives its program takes over: on the script if that goes to the program's end, else
by running the function. A row in which a call fails leaves the script for the function too, with the answers so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sglbatch.errors import CallError
from sglbatch.lang.calls import Answer, Call, ModelCall
from sglbatch.lang.environment import Environment
from sglbatch.lang.expressions import TemplateError
from sglbatch.lang.guard import Guard
from sglbatch.lang.opening import Opening
from sglbatch.lang.outcome import Outcome
from sglbatch.lang.program import Program
from sglbatch.lang.row_program import RowKey, made
from sglbatch.lang.script import Script
from sglbatch.types import CallPath, TextCall

if TYPE_CHECKING:
    from sglbatch.lang.function import SglFunction

MakeRow = Callable[[Mapping[str, Any], int, str], Program]
"""(arguments, program id, row key) -> the row's program under the run's options."""


class Replay:
    """One row on a script, in the place of its ``Program``.

    Args:
        opening: of the script.
        arguments: of the row, of the shape that the script is for.
        holes: what the holes of the arguments stand for.
        make: makes the row's program when it is needed.
    """

    def __init__(
        self,
        script: Script,
        opening: Opening,
        *,
        function: SglFunction,
        arguments: Mapping[str, Any],
        holes: dict[str, Any],
        make: MakeRow,
        program_id: int,
        row_key: RowKey,
    ) -> None:
        self.function = function
        self.program_id = program_id
        self._row_key = row_key
        self._script = script
        self._opening = opening
        self._arguments = arguments
        self._holes = holes
        self._make = make
        self._new_calls: list[Call] = []
        self._program: Program | None = None
        self._asked: dict[CallPath, Call] = {}
        """The program's own form of the opening's calls, where it was started with them."""

    @property
    def row_key(self) -> str:
        self._row_key = key = made(self._row_key)
        return key

    @property
    def done(self) -> bool:
        return self._program is not None and self._program.done

    @property
    def outcome(self) -> Outcome:
        return Outcome() if self._program is None else self._program.outcome

    @property
    def template_error(self) -> TemplateError | None:
        return None if self._program is None else self._program.template_error

    def start(self, environment: Environment, guard: Guard) -> None:
        """See ``Program.start``."""
        self._environment = environment
        self._guard = guard
        try:
            self._holes = {name: guard.protect(value) for name, value in self._holes.items()}
        except CallError:
            self._program = self._made(on_script=False)  # which says what is wrong
            self._program.start(environment, guard)
            return
        if self._opening.fits(self._holes):
            self._new_calls = [call.filled(self._holes, self._texts_of(call.path)) for call in self._opening.calls]
        else:
            self._program = self._made(on_script=True)
            self._program.start(environment, guard)

    def take_calls(self) -> list[Call]:
        """See ``Program.take_calls``."""
        if self._program is not None:
            return self._program.take_calls()
        calls, self._new_calls = self._new_calls, []
        return calls

    def may_extend(self, path: CallPath) -> bool:
        """See ``Program.may_extend``."""
        if self._program is not None:
            return self._program.may_extend(path)
        return next(call.may_extend for call in self._opening.calls if call.path == path)

    def deliver(self, path: CallPath, answer: Answer, position: int | None = None) -> None:
        """See ``Program.deliver``."""
        if self._program is None:
            self._program = self._made(on_script=True)
            asked = {call.path: call.name for call in self._opening.calls}
            self._program.park_before_start(self._environment, self._guard, asked)
        self._program.deliver(path, answer, position)

    def wake(self) -> None:
        """See ``Program.wake``."""
        if self._program is not None or self._script.stopped is not None:
            return
        program = self._started()
        if program.script is None:  # Python has run, to see this row's calls: it runs again from the first answer on
            self._program, self._asked = None, {}
            if not program.done:
                program.park()

    def park(self) -> None:
        """See ``Program.park``."""
        if self._program is not None and not self._program.parked:
            self._program.park()

    def _made(self, *, on_script: bool) -> Program:
        program = self._make(self._arguments, self.program_id, self.row_key)
        if on_script and self._script.stopped is None:
            program.script = (self._script, self._holes)
        return program

    def _started(self) -> Program:
        """The program, started, while the row stands at its opening's calls."""
        self._program = program = self._made(on_script=True)
        program.start(self._environment, self._guard)
        self._asked = {call.path: call for call in program.take_calls()}
        return program

    def _texts_of(self, path: CallPath) -> Callable[[], TextCall]:
        """The call as text, which needs what follows it in the program: so that is started."""

        def as_text() -> TextCall:
            if self._program is None:
                self._started()
            call = self._asked[path]
            assert isinstance(call, ModelCall), "a script makes no outside calls"
            return call.as_text()

        return as_text
