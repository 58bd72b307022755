"""Answers made up before a model has given any: what a program is tried with, to see what it asks next."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from sglbatch.engine.fsm.automaton import Automaton
from sglbatch.engine.fsm.compiled import Compiler
from sglbatch.errors import ConstraintError
from sglbatch.lang.calls import Choices, ModelCall
from sglbatch.types import BackendStats, Choose, Constraint, Generate, Request, Result, Usage

FREE_TEXTS: Final = (" yes", " 42")
"""What unconstrained gens answer, in turn: a word, and what a program that expects a number can read."""

VARIANTS: Final = 4

MAX_VISITS: Final = 4
"""How often a search for short matches goes through one state of the automaton."""


class MadeUpAnswers:
    """Answers that the calls allow.

    Args:
        variant: 0 to VARIANTS - 1; each makes other choices and texts.
        compiler: of their constraints.
    """

    def __init__(self, variant: int, compiler: Compiler) -> None:
        self._variant = variant
        self._compiler = compiler
        self._texts: dict[Constraint | None, str] = {}

    def text(self, call: ModelCall) -> str:
        if isinstance(call.question, Choices):
            choices = call.question.choices
            return choices[self._variant * (len(choices) - 1) // (VARIANTS - 1)]
        constraint = call.question.constraint
        if constraint not in self._texts:
            self._texts[constraint] = made_up_text(call.question, self._compiler, self._variant)
        return self._texts[constraint]


def made_up_text(question: Generate, compiler: Compiler, variant: int = 0) -> str:
    """A text that a gen may answer."""
    example = None if question.constraint is None else _example(question.constraint, compiler, variant)
    return FREE_TEXTS[variant % len(FREE_TEXTS)] if example is None else example


def _example(constraint: Constraint, compiler: Compiler, variant: int) -> str | None:
    """A short text that matches; None where there is no telling."""
    if constraint.kind != "regex":
        return "{}"
    try:
        compiled = compiler.compile(constraint)
    except ConstraintError:
        return None  # the plan has its own check of constraints
    assert isinstance(compiled, Automaton), "what a regex compiles to"
    return short_match(compiled, skip=variant // 2, descending=bool(variant % 2))


def short_match(automaton: Automaton, *, skip: int = 0, descending: bool = False) -> str:
    """A short text that the automaton accepts, found breadth first.

    Args:
        skip: so many shorter ones are passed over, as far as there are more.
        descending: later letters come before earlier ones.
    """
    found = b""
    todo: deque[tuple[int, bytes]] = deque([(automaton.start, b"")])
    visits = Counter({automaton.start: 1})
    while todo:
        state, data = todo.popleft()
        if automaton.accepting[state]:
            found = data
            if not skip:
                break
            skip -= 1
        following = automaton.table[state].tolist()
        for byte in range(255, -1, -1) if descending else range(256):
            if following[byte] >= 0 and visits[following[byte]] < MAX_VISITS:
                visits[following[byte]] += 1
                todo.append((following[byte], data + bytes([byte])))
    return found.decode("utf-8", "replace")


class RehearsalBackend:
    """Answers at once, and keeps what was asked and answered.

    Args:
        answer: the answer to a request.
    """

    identity = "rehearsal"

    def __init__(self, answer: Callable[[Request], Result], *, context_len: int) -> None:
        self.context_len = context_len
        self.answered: list[tuple[Request, Result]] = []
        self._answer = answer
        self._waiting: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Result]:
        now, self._waiting = self._waiting, []
        answered = [(request, self._answer(request)) for request in now]
        self.answered += answered
        return [result for _, result in answered]

    def finish_program(self, program_id: int) -> None:
        """Nothing is kept for programs."""

    def stats(self) -> BackendStats:
        return BackendStats(requests=len(self.answered))

    def close(self) -> None:
        self._waiting = []


def stand_in(request: Request, compiler: Compiler, *, longest: bool) -> Result:
    """An answer of one token, or of as many as there may be; its ids are nobody else's."""
    operation = request.operation
    prompt_len = len(request.prompt_ids)
    if isinstance(operation, Choose):
        return Result(
            request_id=request.request_id,
            choice=0,
            finish_reason="choice",
            usage=Usage(prompt_tokens=prompt_len, generated_tokens=0),
        )
    num_tokens = operation.max_tokens if longest else 1
    first = -1 - request.request_id * 1_000_003
    return Result(
        request_id=request.request_id,
        text=made_up_text(operation, compiler),
        output_ids=tuple((first - i) % -(2**31) for i in range(num_tokens)),
        finish_reason="length",
        usage=Usage(prompt_tokens=prompt_len, generated_tokens=num_tokens),
    )
