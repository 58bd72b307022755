"""A program's function as it runs: it goes on until it waits for something, and then again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from sglbatch.lang.program import Program


class FunctionRun(Protocol):
    """Two ways to run it: Python's, and its script's."""

    @property
    def is_inside(self) -> bool:
        """The caller is the function itself."""

    @property
    def left_off(self) -> bool:
        """It cannot go on; Python has to run the function from its start."""

    def resume(self) -> None:
        """Go on to the next wait, which the program is told of, or to the end."""

    def close(self) -> None:
        """Give up."""


class GreenletRun:
    """Runs the function in a greenlet."""

    def __init__(self, program: Program) -> None:
        self._greenlet = _ProgramGreenlet(program)
        self._closing = False

    @property
    def is_inside(self) -> bool:
        return getcurrent() is self._greenlet

    @property
    def left_off(self) -> bool:
        return False

    def resume(self) -> None:
        self._greenlet.parent = getcurrent()
        self._greenlet.switch()

    def leave(self) -> None:
        """Back to whoever has resumed it; to be called inside."""
        if self._closing:
            raise GreenletExit
        getcurrent().parent.switch()

    def close(self) -> None:
        if not self._greenlet.dead:
            self._closing = True
            self._greenlet.parent = getcurrent()
            self._greenlet.throw(GreenletExit)


class _ProgramGreenlet(greenlet):  # type: ignore[misc]  # greenlet is not typed here
    """It knows its program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.run_function)
        self.program = program


def current_program() -> Program | None:
    """The program in whose function the caller runs."""
    running = getcurrent()
    return running.program if isinstance(running, _ProgramGreenlet) else None
