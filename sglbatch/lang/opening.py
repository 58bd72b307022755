"""The first calls of a script, ready for any row's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglbatch.lang.abstract import has_placeholder
from sglbatch.lang.calls import Choices, ModelCall
from sglbatch.lang.environment import Environment
from sglbatch.lang.guard import Guard
from sglbatch.lang.holes import HoledText, OwnHoles
from sglbatch.lang.operations import Mark
from sglbatch.lang.program import Program
from sglbatch.lang.script import Do, Script
from sglbatch.types import CallPath, Generate, Prompt, Segment, Text, TextCall


@dataclass(frozen=True, slots=True)
class HoledSegment:
    """A segment of a prompt that is different in every row."""

    text: HoledText
    specials: frozenset[str]

    def filled(self, holes: Mapping[str, Any]) -> Text:
        return Text(self.text.filled(holes), self.specials)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpeningCall:
    """Args:
    may_extend: see ``Program.may_extend``.
    """

    path: CallPath
    name: str
    prompt: tuple[Segment | HoledSegment, ...]
    question: Generate | Choices
    following: tuple[Segment | HoledSegment, ...]
    may_extend: bool

    def filled(self, holes: Mapping[str, Any], as_text: Callable[[], TextCall]) -> ModelCall:
        question = self.question
        if self.following:
            assert isinstance(question, Choices)
            texts = (segment for segment in _filled(self.following, holes) if isinstance(segment, Text))
            question = replace(question, following=tuple(texts))
        return ModelCall(
            path=self.path,
            name=self.name,
            prompt=_filled(self.prompt, holes),
            question=question,
            position=None,
            as_text=as_text,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The calls that a script asks for before it first waits for an answer.

    Args:
        names: the holes in them.
        strips: a message may begin with a hole, whose leading white space is then left out.
    """

    calls: tuple[OpeningCall, ...]
    names: tuple[str, ...]
    strips: bool

    @staticmethod
    def of(script: Script, program: Program, environment: Environment, guard: Guard) -> Opening | None:
        """None where the function itself has to run before there is something to wait for.

        Args:
            program: of a row with this script's shape, ready to be started; it is used up.
        """
        program.script = (replace(script, stopped=None), OwnHoles())
        program.start(environment, guard)
        asked = program.take_calls()
        if program.done or (program.function_ended and script.stopped is not None):
            return None
        if program.script is None:  # it has left the script, and asks with the row's own values
            return None
        calls = []
        for call in asked:
            assert isinstance(call, ModelCall), "a script makes no outside calls"
            following = call.question.following if isinstance(call.question, Choices) else ()
            is_holed = any(has_placeholder(text.text) for text in following)
            calls.append(
                OpeningCall(
                    path=call.path,
                    name=call.name,
                    prompt=tuple(map(_holed, call.prompt)),
                    question=call.question,
                    following=tuple(map(_holed, following)) if is_holed else (),
                    may_extend=program.may_extend(call.path),
                )
            )
        segments = (segment for call in calls for segment in (*call.prompt, *call.following))
        names = (name for segment in segments if isinstance(segment, HoledSegment) for name in segment.text.names)
        strips = any(isinstance(step, Do) and isinstance(step.operation, Mark) for step in script.steps)
        return Opening(calls=tuple(calls), names=tuple(dict.fromkeys(names)), strips=strips)

    def fits(self, holes: Mapping[str, Any]) -> bool:
        """With these values it says what the script says: no text vanishes, and none is stripped."""
        for name in self.names:
            text = str(holes[name])
            if not text or (self.strips and text[0].isspace()):
                return False
        return True


def _holed(segment: Segment) -> Segment | HoledSegment:
    if isinstance(segment, Text) and has_placeholder(segment.text):
        return HoledSegment(HoledText.of(segment.text), segment.specials)
    return segment


def _filled(segments: tuple[Segment | HoledSegment, ...], holes: Mapping[str, Any]) -> Prompt:
    return tuple([s.filled(holes) if isinstance(s, HoledSegment) else s for s in segments])
