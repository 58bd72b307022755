"""A backend that asks nobody: it answers with placeholders and writes down what each call would use.

Programs go on after an answer, and how depends on the answer. So a dry run is made several times with different
answers; what they cost spans a range.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

from sglbatch.api_spec import bodies
from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.asking import FIELD_TOKENS
from sglbatch.api_spec.constraints import compiled
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.speculation import PROBES, place_of
from sglbatch.api_spec.tokens import Counter
from sglbatch.types import (
    BackendStats,
    Constraint,
    Following,
    Generate,
    NextAsk,
    Request,
    Result,
    TextCall,
    TextChoices,
    Usage,
)

CACHE_FROM: Final = 1024
CACHE_STEP: Final = 128

_LENGTHS: Final = {"short": 16, "typical": 3, "long": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """What answers are taken to be.

    Args:
        length: of free text: a sixteenth, a third or all of its max_tokens.
        choice: which of a select's.
        ahead: one call fills all the variables that it can.
    """

    length: Literal["short", "typical", "long"]
    choice: Literal["first", "last", "any"]
    ahead: bool


@dataclass(frozen=True, slots=True)
class DryCall:
    """One call that would be made. ``follow_up``: an answer came before it, so its prompt is a guess."""

    program_id: int
    tokens: Tokens
    follow_up: bool


class DryBackend:
    """A ``types.Backend`` that answers at once. ``calls`` has what it was asked."""

    def __init__(self, model: ApiModel, counter: Counter, guess: Guess) -> None:
        self._model = model
        self._counter = counter
        self._guess = guess
        self._waiting: deque[Request] = deque()
        self._asked: Counts[int] = Counts()
        self._last_prompt: dict[int, int] = {}
        self._misfits: Counts[Hashable] = Counts()
        self.calls: list[DryCall] = []

    @property
    def identity(self) -> str:
        return self._model.identity

    @property
    def context_len(self) -> int:
        return self._model.context_len

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def step(self) -> list[Result]:
        results = [self._answer(request) for request in self._waiting]
        self._waiting.clear()
        return results

    def finish_program(self, program_id: int) -> None:
        """Nothing is kept."""

    def stats(self) -> BackendStats:
        return BackendStats(requests=len(self.calls))

    def close(self) -> None:
        self._waiting.clear()

    def _answer(self, request: Request) -> Result:
        call = request.text
        assert call is not None
        following = call.following if self._guess.ahead and call.ahead_tokens != 0 else ()
        asks = [NextAsk(name=call.name, question=call.question)]
        asks += [part for part in following if isinstance(part, NextAsk)]
        texts = [self._text(ask.question, request.request_id) for ask in asks]
        free = isinstance(call.question, Generate) and call.question.constraint is None
        if bodies.by_chat(call, self._model) and self._model.family.schema and (len(asks) > 1 or not free):
            prompt, generated = self._fields_tokens(call, asks, following, texts)
        else:
            prompt = self._counter.num_tokens(request.prompt_ids)
            generated = self._text_tokens(following, asks, texts)
            if self._guess.length == "long" and not free and self._model.family.chat and self._model.family.schema:
                fields = self._fields_tokens(call, asks[:1], (), texts)
                prompt, generated = max(prompt, fields[0]), max(generated, fields[1])
            self._note_failed(call, asks[0], request.program_id, texts[0])
        self._note(request.program_id, prompt, generated + self._hidden())
        first, *ahead = [_result(request.request_id, ask.question, text) for ask, text in zip(asks, texts, strict=True)]
        return Result(
            request_id=request.request_id,
            text=first.text,
            finish_reason=first.finish_reason,
            choice=first.choice,
            usage=Usage(prompt_tokens=prompt, generated_tokens=generated),
            ahead=tuple(ahead),
        )

    def _note_failed(self, call: TextCall, ask: NextAsk, program_id: int, text: str) -> None:
        """At the worst, free text is not in its form and is asked for again under a schema, until that is learned."""
        formless = isinstance(ask.question, Generate) and ask.question.constraint is None
        if self._guess.length != "long" or formless or not (self._model.family.schema and self._model.family.chat):
            return
        place = place_of(replace(call, following=()))
        self._misfits[place] += 1
        if self._misfits[place] <= PROBES:
            self._note(program_id, *self._fields_tokens(call, [ask], (), [text]))

    def _note(self, program_id: int, prompt: int, generated: int) -> None:
        shared = self._last_prompt.get(program_id, 0)
        cached = shared // CACHE_STEP * CACHE_STEP if shared >= CACHE_FROM else 0
        self.calls.append(
            DryCall(
                program_id,
                Tokens(prompt=prompt, generated=generated, cached=min(cached, prompt)),
                follow_up=self._asked[program_id] > 0,
            )
        )
        self._asked[program_id] += 1
        self._last_prompt[program_id] = prompt

    def _hidden(self) -> int:
        return self._model.family.hidden_tokens // _LENGTHS[self._guess.length]

    def _text_tokens(self, following: Following, asks: Sequence[NextAsk], texts: Sequence[str]) -> int:
        """Tokens of the values; ahead, those of the template's text too, and of a surplus at the end.

        Where nothing holds the model to a form, it goes on behind a value that has one, to the call's limit.
        """
        long = self._guess.length == "long"
        values = sum(
            self._most_tokens(ask.question) if long else self._value_tokens(ask.question, text)
            for ask, text in zip(asks, texts, strict=True)
        )
        between = sum(self._counter.count(part) for part in following if isinstance(part, str))
        return values + between + (4 if following else 0)

    def _fields_tokens(
        self, call: TextCall, asks: Sequence[NextAsk], following: Following, texts: Sequence[str]
    ) -> tuple[int, int]:
        whole: Following = (asks[0], *following)
        last = max(i for i, part in enumerate(whole) if isinstance(part, NextAsk))
        outgoing = bodies.fields(call, asks, whole[: last + 1], self._model, max_tokens=0, seed=0)
        messages = [(str(m["role"]), str(m["content"])) for m in outgoing.body["messages"]]
        prompt = self._counter.num_tokens(self._counter.chat_ids(messages))
        values = sum(self._value_tokens(ask.question, text) for ask, text in zip(asks, texts, strict=True))
        return prompt, values + len(asks) * FIELD_TOKENS // 2

    def _value_tokens(self, question: Generate | TextChoices, text: str) -> int:
        if isinstance(question, Generate) and question.constraint is None:
            return max(1, question.max_tokens // _LENGTHS[self._guess.length])
        return self._counter.count(text)

    def _most_tokens(self, question: Generate | TextChoices) -> int:
        if isinstance(question, Generate):
            return question.max_tokens
        return max(self._counter.count(choice) for choice in question.choices) + 2

    def _text(self, question: Generate | TextChoices, number: int) -> str:
        if isinstance(question, TextChoices):
            places = {"first": 0, "last": -1, "any": number % len(question.choices)}
            return question.choices[places[self._guess.choice]]
        if question.constraint is not None:
            return _shortest(question.constraint)
        return " word" * max(1, question.max_tokens // _LENGTHS[self._guess.length])


def _result(request_id: int, question: Generate | TextChoices, text: str) -> Result:
    if isinstance(question, TextChoices):
        return Result(request_id=request_id, finish_reason="choice", choice=question.choices.index(text))
    return Result(request_id=request_id, text=text)


@lru_cache(maxsize=256)
def _shortest(constraint: Constraint) -> str:
    """The shortest text that a regex allows; of a schema an empty object."""
    if constraint.kind != "regex":
        return "{}"
    automaton = compiled(constraint.source)
    paths: dict[int, bytes] = {automaton.start: b""}
    queue = deque([automaton.start])
    while queue:
        state = queue.popleft()
        if automaton.accepting[state]:
            return paths[state].decode("utf-8", "ignore")
        # Letters and digits first: among equally short texts they read best.
        for byte in (*range(97, 123), *range(48, 58), *range(256)):
            target = int(automaton.table[state, byte])
            if target >= 0 and target not in paths:
                paths[target] = paths[state] + bytes([byte])
                queue.append(target)
    return ""
