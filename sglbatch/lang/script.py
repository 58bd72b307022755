"""What a program's function does, as a list of steps that any row of the same shape can go through without Python.

The steps are in the order in which the function takes them, over all of its branches. They were recorded by running
it once on abstract values (``recording``), and go as far as nothing is asked of those. Only a script that goes to the
end of its program is run; another one says what the program asks first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from sglbatch.errors import CallError
from sglbatch.lang.guard import Guard
from sglbatch.lang.holes import HoledText, Shape, ShapelessError, fill, flatten
from sglbatch.lang.operations import Append, Ask, Attach, Fork, Join, JoinMode, Mark, Operation
from sglbatch.lang.stream import Stream
from sglbatch.lang.waits import Drained, Ready, Settled
from sglbatch.types import CallPath, Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Say:
    """Constant text. ``stream``, here and below: number of the branch; 0 is the program's own."""

    stream: int
    text: HoledText
    specials: frozenset[str]
    turn: int


@dataclass(frozen=True, slots=True)
class Do:
    """An operation that is the same for all rows."""

    stream: int
    operation: Operation


@dataclass(frozen=True, slots=True)
class Put:
    """Set a variable. ``value``: see ``holes.fill``."""

    stream: int
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Split:
    """Fork into branches with these paths, which get the next numbers."""

    stream: int
    paths: tuple[CallPath, ...]


@dataclass(frozen=True, slots=True)
class Bring:
    """Join branches, by their numbers."""

    stream: int
    branches: tuple[int, ...]
    mode: JoinMode


@dataclass(frozen=True, slots=True)
class Wait:
    """For a variable, or (no name) for everything on the branch."""

    stream: int
    name: str | None


@dataclass(frozen=True, slots=True)
class Read:
    """Take a variable's value for a hole; ``shape`` is the one it had when it was recorded."""

    stream: int
    name: str
    hole: str
    shape: Shape


Step: TypeAlias = Say | Do | Put | Split | Bring | Wait | Read


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Args:
    stopped: what the program does behind the last step that only Python can follow ("branches on ..."), or None.
    returned: what it returns, see ``holes.fill``; of no meaning where it stopped.
    """

    steps: tuple[Step, ...]
    stopped: str | None
    returned: Any = None


class Stage(Protocol):
    """What a script needs of the program that it runs in."""

    guard: Guard
    turn: int

    @property
    def streams(self) -> list[Stream]: ...

    def new_stream(self, path: CallPath) -> Stream: ...

    def hold(self, ready: Ready) -> None: ...

    def end_function(self, returned: Any) -> None: ...


class ScriptRun:
    """A ``FunctionRun`` of a script.

    Args:
        script: with what the holes of its arguments stand for; what it reads is added there.
    """

    def __init__(self, script: tuple[Script, dict[str, Any]], stage: Stage) -> None:
        self._script, self._holes = script
        self._stage = stage
        self._streams = stage.streams
        self._at = 0
        self._at_start = [False]
        """For each branch: nothing of the open message has been added yet, so texts lose their leading white space."""
        self.left_off = False

    @property
    def is_inside(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is held."""

    def resume(self) -> None:
        steps = self._script.steps
        while self._at < len(steps):
            step = steps[self._at]
            self._at += 1
            match step:
                case Say():
                    self._say(step)
                case Do(stream=number, operation=operation):
                    self._do(number, operation)
                case Put(stream=number, name=name, value=value):
                    self._streams[number].put(name, fill(value, self._holes))
                case Split():
                    self._split(step)
                case Bring():
                    self._bring(step)
                case Wait(stream=number, name=name):
                    stream = self._streams[number]
                    ready: Ready = Drained(stream) if name is None else Settled(stream, name)
                    self._stage.turn += 1
                    if not ready():
                        self._stage.hold(ready)
                        return
                case Read():
                    if not self._read(step):
                        self.left_off = True
                        return
        self._stage.end_function(fill(self._script.returned, self._holes))

    def _say(self, step: Say) -> None:
        number = step.stream
        text = step.text.filled(self._holes)
        if self._at_start[number]:
            text = text.lstrip()
        if not text and not step.text.is_constant:
            return
        if text:
            self._at_start[number] = False
        self._streams[number].add(Append(Text(text, step.specials), step.turn))

    def _do(self, number: int, operation: Operation) -> None:
        if isinstance(operation, Mark):
            self._at_start[number] = operation.role is not None
        elif isinstance(operation, (Ask, Attach)):
            self._at_start[number] = False
        self._streams[number].add(operation)

    def _split(self, step: Split) -> None:
        children = tuple(self._stage.new_stream(path) for path in step.paths)
        self._at_start += [self._at_start[step.stream]] * len(children)
        self._streams[step.stream].add(Fork(children))

    def _bring(self, step: Bring) -> None:
        stream = self._streams[step.stream]
        children = tuple(self._streams[number] for number in step.branches)
        for child in children:
            child.joiner = stream
        stream.add(Join(children, step.mode))

    def _read(self, step: Read) -> bool:
        """False where the value is not of the kind that was recorded."""
        variable = self._streams[step.stream].variables.get(step.name)
        if variable is None:
            return False
        try:
            value = self._stage.guard.protect(variable.value) if variable.generated else variable.value
            holes: dict[str, Any] = {}  # its size is bounded by itself, as it was when it was recorded
            shape = flatten(step.hole, value, holes)
        except (CallError, ShapelessError):
            return False
        self._holes.update(holes)
        return shape == step.shape
