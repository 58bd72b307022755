"""The scripts of a program, one for each shape of a row's arguments, and which of them are trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from sglbatch.lang.calls import Choices, ModelCall
from sglbatch.lang.environment import Environment
from sglbatch.lang.function import SglFunction
from sglbatch.lang.guard import Guard
from sglbatch.lang.holes import Shape, ShapelessError, flatten
from sglbatch.lang.opening import Opening
from sglbatch.lang.program import Program
from sglbatch.lang.recording import record_script
from sglbatch.lang.replay import MakeRow, Replay
from sglbatch.lang.row_program import RowKey, RowProgram, made
from sglbatch.lang.script import Script
from sglbatch.types import Result, Usage

MAX_SHAPES = 16
"""More of them are not worth recording: hardly a row would share one."""

CALLS_OF_A_START = 64
"""How far a row is followed where its script only starts it: Python goes on there, perhaps without end."""


class MadeUp(Protocol):
    """Gives answers that a model may have given."""

    def text(self, call: ModelCall) -> str: ...


class Scripts:
    """Makes the programs of rows: on a script where there is a trusted one for the shape of the row's arguments.

    Args:
        make: makes a row's program without a script.
        environment, guard: as the programs will be started with.
    """

    def __init__(self, function: SglFunction, make: MakeRow, *, environment: Environment, guard: Guard) -> None:
        self._function = function
        self._make = make
        self._environment = environment
        self._guard = guard
        self._trusted: dict[Shape, tuple[Script, Opening]] = {}
        self._refused: dict[Shape | None, str] = {}

    def program(self, arguments: Mapping[str, Any], program_id: int, row_key: RowKey) -> RowProgram:
        """The program of a row."""
        holes: dict[str, Any] = {}
        found = self._trusted.get(_shape(arguments, holes) or ())
        if found is None:
            return self._make(arguments, program_id, made(row_key))
        script, opening = found
        return Replay(
            script,
            opening,
            function=self._function,
            arguments=arguments,
            holes=holes,
            make=self._make,
            program_id=program_id,
            row_key=row_key,
        )

    @property
    def any_whole(self) -> bool:
        """Some rows never run Python."""
        return any(script.stopped is None for script, _ in self._trusted.values())

    @property
    def refused(self) -> tuple[str, ...]:
        """Why rows are run without a script, to go behind "the program": of each shape without one."""
        return tuple(dict.fromkeys(self._refused.values()))

    @property
    def stopped(self) -> tuple[str, ...]:
        """Why Python runs rows that start from a script from their first answer on, to go behind "the program"."""
        return tuple(dict.fromkeys(s.stopped for s, _ in self._trusted.values() if s.stopped is not None))

    def to_json(self) -> dict[str, Any]:
        return {
            "without_python": self.any_whole,
            "python_from_the_first_answer_on_because": list(self.stopped),
            "python_because": list(self.refused),
        }

    def lines(self) -> list[str]:
        """For people: how rows are run."""
        lines = [f"rows are run by Python from their first answer on: the program {reason}" for reason in self.stopped]
        lines += [f"rows are run by Python: the program {reason}" for reason in self.refused]
        if self.any_whole:
            lines.insert(0, f"{'most ' if lines else ''}rows are run from the trace, without Python")
        return lines

    def learn(self, rows: Iterable[Mapping[str, Any]], answers: Sequence[MadeUp]) -> None:
        """Record a script for every shape that these rows' arguments have, and keep those that do exactly what the
        function does on every row of the shape, with all sets of answers.
        """
        by_shape: dict[Shape | None, list[Mapping[str, Any]]] = {}
        for arguments in rows:
            by_shape.setdefault(_shape(arguments, {}), []).append(arguments)
        for shape, alike in by_shape.items():
            if shape is None:
                self._refused[shape] = "gets values of a kind that is not traced"
            elif len(self._trusted) >= MAX_SHAPES:
                self._refused[shape] = f"gets lists of more than {MAX_SHAPES} shapes"
            else:
                self._learn(shape, alike, answers)

    def _learn(self, shape: Shape, rows: Sequence[Mapping[str, Any]], answers: Sequence[MadeUp]) -> None:
        script = record_script(self._bare, rows[0], self._environment, self._guard)
        fresh = self._bare(rows[0])
        opening = Opening.of(script, fresh, self._environment, self._guard)
        if opening is None:
            self._refused[shape] = script.stopped or "asks for nothing"
            return
        self._trusted[shape] = (script, opening)
        for number, arguments in enumerate(rows):
            for made_up in answers:
                most = CALLS_OF_A_START if script.stopped else self._environment.max_calls
                alone = self._ran(self._make(arguments, 0, f"checked {number}"), made_up, most)
                if self._ran(self.program(arguments, 0, f"checked {number}"), made_up, most) != alone:
                    del self._trusted[shape]
                    self._refused[shape] = "does not do the same every time, or looks at a row's values unseen"
                    return

    def _bare(self, arguments: Mapping[str, Any]) -> Program:
        return self._make(arguments, 0, "")

    def _ran(self, program: RowProgram, answers: MadeUp, most: int) -> list[object]:
        """All that a program asks and becomes, up to its first call outside or ``most`` calls."""
        program.start(self._environment, self._guard)
        seen: list[object] = [program.template_error and program.template_error.code]
        waiting = program.take_calls()
        for _ in range(most):
            if not waiting:
                break
            call = waiting.pop(0)
            if not isinstance(call, ModelCall):
                return [*seen, (call.path, call.name, call.args)]
            seen.append((call.path, call.name, call.prompt, call.question, call.position))
            seen.append(program.may_extend(call.path))
            program.deliver(call.path, _result(call, answers.text(call)), len(seen))
            waiting += program.take_calls()
        outcome = program.outcome
        return [*seen, outcome, outcome.transcript, outcome.answer_spans]


def _result(call: ModelCall, text: str) -> Result:
    usage = Usage(prompt_tokens=1, generated_tokens=len(text))
    if isinstance(call.question, Choices):
        choice = call.question.choices.index(text)
        return Result(request_id=-1, choice=choice, finish_reason="choice", usage=usage)
    return Result(request_id=-1, text=text, output_ids=tuple(text.encode()), usage=usage)


def _shape(arguments: Mapping[str, Any], holes: dict[str, Any]) -> Shape | None:
    """The shape of a row's arguments, filling ``holes``; None where they have none."""
    try:
        return tuple([(name, flatten(f"a:{name}", value, holes)) for name, value in arguments.items()])
    except ShapelessError:
        return None
