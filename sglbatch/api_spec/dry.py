"""A backend that asks nobody: it answers with placeholders and writes down what each call would use.

Programs go on after an answer, and how depends on the answer. So a dry run is made several times with different
answers; what they cost spans a range. Calls are asked by the same means as in a run (``ways``).
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Final, Literal, TypeAlias

from sglbatch.api_spec import ways
from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.lengths import shortest, shows_how_it_goes_on
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.request_tokens import Length, RequestTokens, prompt_tokens, walk
from sglbatch.api_spec.speculation import PROBES, place_of
from sglbatch.api_spec.tokens import Counter
from sglbatch.types import BackendStats, Generate, Request, Result, TextCall, TextChoices, Usage

CACHE_FROM: Final = 1024
CACHE_STEP: Final = 128

HIDDEN_SHARE: Final = {"short": 16, "typical": 3, "long": 1}
"""A share of the room for hidden tokens."""

FAILING: Final = round(1 / (1 - ways.MOSTLY))
"""One in so many calls by a cheaper means may have to be made again, and the means still comes first."""


Choice: TypeAlias = Literal["first", "last", "any"]
Template: TypeAlias = Literal["followed", "ignored", "likely", "single"]
Fails: TypeAlias = Literal["never", "sometimes", "always"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """What answers are taken to be.

    Args:
        length: which of ``Lengths``.
        fails: how often a cheaper means does not give the answer: never; as often as it may and still come first;
            always, which is noticed.
        choice: which of a select's.
        template: ``followed``: one call fills all the variables that it can; ``ignored``: nothing comes of what is
            asked ahead, which is noticed (where the prompt's examples show the template's text: nothing every other
            time);
            ``likely``: followed where examples show it, else ignored; ``single``: nothing is asked ahead.
    """

    length: Length
    choice: Choice
    template: Template
    fails: Fails = "never"


@dataclass(frozen=True, kw_only=True, slots=True)
class DryCall:
    """A request that would be made.

    Args:
        once: comes a fixed number of times, however many rows there are.
        is_request: a request of its own, not a part of another one that goes further than it needs to.
    """

    program_id: int
    tokens: Tokens
    once: bool = False
    is_request: bool = True


class DryBackend:
    """A ``types.Backend`` that answers at once. ``calls`` has what it was asked.

    Args:
        batch: calls go in batches: all of a wave goes ahead, before it is seen what comes of it.
    """

    def __init__(self, model: ApiModel, counter: Counter, guess: Guess, *, batch: bool = False) -> None:
        self._model = model
        self._batch = batch
        self._counter = counter
        self._guess = guess
        self._tokens = RequestTokens(model=model, counter=counter, length=guess.length, batch=batch)
        self._waiting: deque[Request] = deque()
        self._last_prompt: dict[int, int] = {}
        self._seen: Counts[Hashable] = Counts()
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

    # --- one call ---

    def _answer(self, request: Request) -> Result:
        assert request.text is not None
        call = replace(request.text, following=ways.joinable(request.text))
        alone = replace(call, following=())
        goes_ahead = bool(ways.asks_of(call.following)) and call.ahead_tokens != 0 and self._goes_ahead(call)
        is_followed = goes_ahead and self._is_followed(call)
        before = len(self.calls)
        if is_followed or not goes_ahead:
            self._ask(call if is_followed else alone, request.program_id)
        else:
            self._ask(alone, request.program_id)
            self._note_waste(call, request.program_id)
        walked = walk(call if is_followed else alone)
        results = [_result(request.request_id, ask.question, self._text(ask.question, text)) for ask, text in walked]
        made = [each.tokens for each in self.calls[before:]]
        usage = Usage(prompt_tokens=sum(t.prompt for t in made), generated_tokens=sum(t.generated for t in made))
        return replace(results[0], usage=usage, ahead=tuple(results[1:]))

    def _goes_ahead(self, call: TextCall) -> bool:
        """A structured call always does; free text until it has been seen that nothing comes of it."""
        if self._guess.template == "single":
            return False
        if self._batch or self._guess.template == "followed" or self._is_likely(call):
            return True
        place = ("ahead", place_of(call))
        self._seen[place] += 1
        return self._seen[place] <= PROBES

    def _is_followed(self, call: TextCall) -> bool:
        """What is asked ahead is found in the answer. Asked for once for each call."""
        if ways.second_means(call, self._model) == ways.BY_FIELDS or self._guess.template == "followed":
            return True
        if not self._is_likely(call):
            return False
        self._seen["likely"] += 1
        return self._guess.template == "likely" or self._seen["likely"] % 2 == 0

    def _is_likely(self, call: TextCall) -> bool:
        return ways.second_means(call, self._model) == ways.BY_FIELDS or shows_how_it_goes_on(
            call.prefix, call.following
        )

    def _ask(self, call: TextCall, program_id: int) -> None:
        """Note the requests that the call takes."""
        means = ways.first_means(call, self._model, batch=self._batch)
        if means in (ways.BY_FIELD, ways.BY_FIELDS):
            self._note(program_id, self._tokens.by_fields(call))
        elif means == ways.BY_TEXT:
            self._note(program_id, self._tokens.by_text(call))
        else:
            self._note_uncertain(program_id, call, means)

    def _note_waste(self, call: TextCall, program_id: int) -> None:
        """What is generated ahead for nothing: a few times only, unless the template is followed now and then, or
        all of a wave goes before it is seen."""
        questions = [ask.question for ask, _ in walk(call)]
        most = self._tokens.between(call) + sum(map(self._tokens.most, questions[1:]))
        most = most if call.ahead_tokens is None else min(most, call.ahead_tokens)
        likely = self._is_likely(call)
        if likely:
            most = self._tokens.room(most, call)
        left_over = max(0, self._tokens.most(questions[0]) - self._tokens.sizes(call)[0])
        wasted = Tokens(prompt=0, generated=most + left_over)
        if not self._counter.exact:  # its own value cannot be told from the rest, so it is asked for again
            alone = prompt_tokens(replace(call, following=()), self._model, self._counter)
            wasted = Tokens(prompt=alone, generated=most + self._tokens.most(questions[0]))
        once = not likely and not self._batch
        self.calls.append(DryCall(program_id=program_id, tokens=wasted, once=once, is_request=False))

    def _note_uncertain(self, program_id: int, call: TextCall, means: str) -> None:
        """The cheaper means, and at the worst another one beside it or in its place."""
        alone = replace(call, following=())
        cheap = self._tokens.by_text(call)
        if means == ways.BY_LOGPROBS:
            cheap = Tokens(prompt=cheap.prompt, generated=1)
        fails = self._guess.fails
        if fails != "always":
            self._note(program_id, cheap)
        if fails == "never":
            return
        sure = self._tokens.by_fields(alone) if ways.has_schema(self._model) else self._tokens.by_text(alone)
        place = (means, place_of(alone))
        self._seen[place] += 1
        if fails == "always":
            self._note(program_id, sure)
            if self._seen[place] <= ways.FIT_PROBES:
                self.calls.append(DryCall(program_id=program_id, tokens=cheap, once=True))
        elif self._seen[place] % FAILING == 0:
            self._note(program_id, sure)

    def _note(self, program_id: int, tokens: Tokens) -> None:
        shared = self._last_prompt.get(program_id, 0)
        cached = shared // CACHE_STEP * CACHE_STEP if shared >= CACHE_FROM else 0
        hidden = self._model.family.hidden_tokens // HIDDEN_SHARE[self._guess.length]
        whole = Tokens(
            prompt=tokens.prompt, generated=tokens.generated + hidden, cached=min(cached, tokens.prompt), hidden=hidden
        )
        self.calls.append(DryCall(program_id=program_id, tokens=whole))
        self._last_prompt[program_id] = tokens.prompt

    # --- values ---

    def _text(self, question: Generate | TextChoices, before: str) -> str:
        if isinstance(question, TextChoices):
            self._seen["choices"] += 1
            places = {"first": 0, "last": -1, "any": self._seen["choices"] % len(question.choices)}
            return question.choices[places[self._guess.choice]]
        if question.constraint is not None:
            return shortest(question.constraint)
        return " word" * self._tokens.size(question, before)


MADE_UP_LOGPROB: Final = -1.0


def _result(request_id: int, question: Generate | TextChoices, text: str) -> Result:
    if isinstance(question, TextChoices):
        # Evenly likely: a program may read the log-probabilities where an endpoint can give them.
        even = (-log(len(question.choices)),) * len(question.choices)
        choice = question.choices.index(text)
        return Result(request_id=request_id, finish_reason="choice", choice=choice, choice_logprobs=even)
    if question.num_top_logprobs is None:
        return Result(request_id=request_id, text=text)
    told = tuple((MADE_UP_LOGPROB, " " + word) for word in text.split())  # a program may read them
    tops = tuple((entry,) * question.num_top_logprobs for entry in told) if question.num_top_logprobs else ()
    return Result(request_id=request_id, text=text, output_logprobs=told, output_top_logprobs=tops)
