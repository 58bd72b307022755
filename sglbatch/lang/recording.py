"""Recording what a program's function does for rows of one shape, as a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from sglbatch.errors import SglbatchError
from sglbatch.lang.abstract import TraceStop, shows_placeholder
from sglbatch.lang.calls import ModelCall
from sglbatch.lang.environment import Environment
from sglbatch.lang.guard import Guard
from sglbatch.lang.holes import HoledText, ShapelessError, abstracted, flatten, holed
from sglbatch.lang.looks import Look, first_look
from sglbatch.lang.operations import Append, Ask, Assign, Fork, Join, Operation, OrderFree
from sglbatch.lang.outcome import template_line
from sglbatch.lang.program import Program
from sglbatch.lang.script import Bring, Do, Put, Read, Say, Script, Split, Step, Wait
from sglbatch.lang.state import ProgramState
from sglbatch.lang.stream import Stream
from sglbatch.lang.trace import made_up_answer
from sglbatch.lang.waits import Drained, Ready, Settled
from sglbatch.types import ErrorInfo

MakeProgram = Callable[[Mapping[str, Any]], Program]
"""The program of a row with these arguments, under the run's options."""


def record_script(make: MakeProgram, arguments: Mapping[str, Any], environment: Environment, guard: Guard) -> Script:
    """Run a program on abstract values in the place of a row's.

    Args:
        arguments: of the row: what the script is good for is every row whose arguments have the same shape.

    Raises:
        ShapelessError: an argument is of a kind that is not traced.
    """
    for name, value in arguments.items():
        flatten(name, value, {})
    abstract = {name: abstracted(f"a:{name}", value, f"the column {name!r}") for name, value in arguments.items()}
    program = make(abstract)
    recorder = program.tracer = _Recorder(program)
    try:
        program.start(environment, guard)
        while not program.done:
            for call in program.take_calls():
                program.deliver(call.path, made_up_answer(call, _Placeholders()))
    except TraceStop as stop:
        place = recorder.place or template_line(stop, program.function.source)
        stopped = stop.reason + (f" ({place})" if place else "")
    else:
        error: SglbatchError | ErrorInfo | None = program.template_error or program.outcome.error
        assert error is not None, "a recording ends with its function, or with an error"
        stopped = f"fails on values that are not known yet: {error.code}: {error.message}"
    steps = tuple(recorder.steps)
    return Script(steps=steps, stopped=None if recorder.has_ended else stopped, returned=recorder.returned)


class _Placeholders:
    """Answers that nothing may be asked of: what a program reads of them is a hole of its own."""

    def text(self, call: ModelCall) -> str:
        return f"{call.name} {call.path}"


class _Recorder:
    """The ``Tracer`` that keeps steps."""

    def __init__(self, program: Program) -> None:
        self.steps: list[Step] = []
        self._program = program
        self._code = program.function.function.__code__
        self._look = first_look(program.function.function)
        self._set: list[tuple[Any, Any]] = []
        self._num_reads = 0
        self._num_streams = 1
        self._has_read = False
        self.has_ended = False
        self.returned: Any = None
        """With holes; of a function that has ended."""
        self.place: str | None = None
        """Where the function was found to know more than its abstract values tell it."""

    def added(self, stream: Stream, operation: Operation) -> None:
        self._check_line()
        number = self._number(stream)
        match operation:
            case Append(text=text, turn=turn):
                if shows_placeholder(text.specials):
                    raise TraceStop("makes special tokens of a row's values")
                said = HoledText.of(text.text)
                self.steps.append(Say(stream=number, text=said, specials=text.specials, turn=turn))
            case Assign(name=name, value=value):
                kept = holed(value, f"sets {name!r} to")
                self._set.append((value, kept))
                self.steps.append(Put(number, name, kept))
            case Fork(children=children):
                self._num_streams += len(children)
                self.steps.append(Split(number, tuple(child.path for child in children)))
            case Join(children=children, mode=mode):
                self.steps.append(Bring(number, tuple(map(self._number, children)), mode))
            case OrderFree():
                pass  # its texts follow as operations of their own
            case Ask() if shows_placeholder((operation.name, operation.question)):
                raise TraceStop(f"asks for {operation.name!r} with arguments from a row's values")
            case _:
                self.steps.append(Do(number, operation))

    def waits(self, ready: Ready) -> None:
        self._check_line(reading=True)
        if isinstance(ready, Settled):
            self.steps.append(Wait(self._number(ready.stream), ready.name))
        elif isinstance(ready, Drained):
            self.steps.append(Wait(self._number(ready.stream), None))
        else:
            raise TraceStop("waits for something outside")

    def wrap(self, value: Any, stream: Stream, name: str | None) -> Any:
        if name is None:
            raise TraceStop("reads its whole text")
        hole = f"r:{self._num_reads}"
        self._num_reads += 1
        what = f"the variable {name!r}"
        try:
            shape = flatten(hole, value, {})
        except ShapelessError:
            raise TraceStop(f"reads {what}, which is no text") from None
        self.steps.append(Read(self._number(stream), name, hole, shape))
        return abstracted(hole, value, what)

    def ends(self, returned: Any) -> None:
        if self._look is not None:
            raise self._stop(self._look)
        for value, kept in self._set:
            if holed(value, "sets a variable to") != kept:
                raise TraceStop("changes a list or dictionary behind setting it as a variable")
        self.returned = None if isinstance(returned, ProgramState) else holed(returned, "returns")
        self.has_ended = True
        raise TraceStop("has ended")

    def _number(self, stream: Stream) -> int:
        number = self._program.streams.index(stream)
        if number >= self._num_streams:
            raise TraceStop("runs a function on a text of its own")
        return number

    def _check_line(self, *, reading: bool = False) -> None:
        """Raises TraceStop where the function may know more than its abstract values tell it."""
        look = self._look
        if look is None:
            return
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code is not self._code:
            frame = frame.f_back
        if frame.f_code is self._code and frame.f_lineno < look.line:
            return
        if not (reading and look.reads_first and not self._has_read):
            raise self._stop(look)
        self._has_read = True

    def _stop(self, look: Look) -> TraceStop:
        self.place = f"{self._program.function.source.name}:{look.at}"
        return TraceStop(look.reason)
