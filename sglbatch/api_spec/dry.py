"""A backend that asks nobody: it answers with placeholders and writes down what each call would use.

Programs go on after an answer, and how depends on the answer. So a dry run is made several times with different
answers; what they cost spans a range. Calls are asked by the same means as in a run (``ways``).
"""

from __future__ import annotations

import json
from collections import Counter as Counts
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, Final, Literal, TypeAlias

from sglbatch.api_spec import bodies, ways
from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.asking import FIELD_TOKENS
from sglbatch.api_spec.lengths import Lengths, lengths, shortest, shows_how_it_goes_on
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.speculation import PROBES, place_of, room_ahead
from sglbatch.api_spec.tokens import Counter
from sglbatch.types import BackendStats, Following, Generate, NextAsk, Request, Result, TextCall, TextChoices, Usage

CACHE_FROM: Final = 1024
CACHE_STEP: Final = 128

HIDDEN_SHARE: Final = {"short": 16, "typical": 3, "long": 1}
"""A share of the room for hidden tokens."""

FAILING: Final = round(1 / (1 - ways.MOSTLY))
"""One in so many calls by a cheaper means may have to be made again, and the means still comes first."""


Length: TypeAlias = Literal["short", "typical", "long"]
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
            self._note(program_id, self._by_fields(call))
        elif means == ways.BY_TEXT:
            self._note(program_id, self._by_text(call))
        else:
            self._note_uncertain(program_id, call, means)

    def _note_waste(self, call: TextCall, program_id: int) -> None:
        """What is generated ahead for nothing: a few times only, unless the template is followed now and then, or
        all of a wave goes before it is seen."""
        questions = [ask.question for ask, _ in walk(call)]
        most = self._between(call) + sum(map(self._most, questions[1:]))
        most = most if call.ahead_tokens is None else min(most, call.ahead_tokens)
        likely = self._is_likely(call)
        if likely:
            most = self._room(most, call)
        left_over = max(0, self._most(questions[0]) - self._sizes(call)[0])
        wasted = Tokens(prompt=0, generated=most + left_over)
        if not self._counter.exact:  # its own value cannot be told from the rest, so it is asked for again
            alone = prompt_tokens(replace(call, following=()), self._model, self._counter)
            wasted = Tokens(prompt=alone, generated=most + self._most(questions[0]))
        once = not likely and not self._batch
        self.calls.append(DryCall(program_id=program_id, tokens=wasted, once=once, is_request=False))

    def _note_uncertain(self, program_id: int, call: TextCall, means: str) -> None:
        """The cheaper means, and at the worst another one beside it or in its place."""
        alone = replace(call, following=())
        cheap = self._by_text(call)
        if means == ways.BY_LOGPROBS:
            cheap = Tokens(prompt=cheap.prompt, generated=1)
        fails = self._guess.fails
        if fails != "always":
            self._note(program_id, cheap)
        if fails == "never":
            return
        sure = self._by_fields(alone) if ways.has_schema(self._model) else self._by_text(alone)
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

    # --- tokens of one request ---

    def _by_text(self, call: TextCall) -> Tokens:
        """A generation; ahead with the template's text and a surplus at the end.

        A stop string ends it, or the model's own end. A model that goes on behind a value, into a template that it
        follows or because nothing holds it to a form, does so up to the request's limit.
        """
        values = sum(self._sizes(call)) + self._between(call)
        limit = self._limit(call)
        *_, last = ways.asks_of((NextAsk(name=call.name, question=call.question), *call.following))
        stops = ways.common_stops(call)[: self._model.family.num_stops] if ways.is_free(last.question) else ()
        if self._guess.length == "short":
            generated = values
        elif stops:
            generated = values + 1
        elif call.following or not ways.is_free(call.question) or self._guess.length == "long":
            generated = limit
        else:
            generated = values + 1
        prompt = prompt_tokens(call, self._model, self._counter)
        return Tokens(prompt=prompt, generated=min(limit, generated))

    def _limit(self, call: TextCall) -> int:
        """The ``max_tokens`` of the request, what is asked ahead as far as it has been of use."""
        first, *later = [self._most(ask.question) for ask, _ in walk(call)]
        if not call.following:
            return first
        most = self._between(call) + sum(later)
        most = most if call.ahead_tokens is None else min(most, call.ahead_tokens)
        return first + self._room(most, call)

    def _room(self, most: int, call: TextCall) -> int:
        """Tokens to ask for ahead, of at most so many: a wave goes before anything has been of use."""
        return most if self._batch else room_ahead(most, self._between(call) + sum(self._sizes(call)[1:]))

    def _between(self, call: TextCall) -> int:
        """Tokens of the template's own text ahead."""
        return sum(self._counter.count(part) for part in call.following if isinstance(part, str))

    def _sizes(self, call: TextCall) -> list[int]:
        """Tokens of the values."""
        return [self._size(lengths(ask.question, text, self._counter)) for ask, text in walk(call)]

    def _by_fields(self, call: TextCall) -> Tokens:
        """One JSON object, or a value by itself."""
        asks = [ask for ask, _ in walk(call)]
        whole: Following = (asks[0], *call.following)
        last = max(i for i, part in enumerate(whole) if isinstance(part, NextAsk))
        outgoing = bodies.fields(call, asks, whole[: last + 1], self._model, max_tokens=0, seed=0)
        empty = json.dumps(dict.fromkeys(bodies.field_names(asks), ""))
        frame = 0 if bodies.is_whole(asks) else self._counter.count(empty)
        if self._guess.length == "long":
            frame += len(asks) * FIELD_TOKENS // 2  # white space, escapes
        prompt = prompt_of_body(outgoing.body, self._model, self._counter)
        return Tokens(prompt=prompt, generated=frame + sum(self._sizes(call)))

    # --- values ---

    def _size(self, found: Lengths) -> int:
        return {"short": found.short, "typical": found.typical, "long": found.long}[self._guess.length]

    def _most(self, question: Generate | TextChoices) -> int:
        return ways.most_tokens(question, self._counter)

    def _text(self, question: Generate | TextChoices, before: str) -> str:
        if isinstance(question, TextChoices):
            self._seen["choices"] += 1
            places = {"first": 0, "last": -1, "any": self._seen["choices"] % len(question.choices)}
            return question.choices[places[self._guess.choice]]
        if question.constraint is not None:
            return shortest(question.constraint)
        return " word" * self._size(lengths(question, before, self._counter))


def walk(call: TextCall) -> list[tuple[NextAsk, str]]:
    """The call's questions, those asked ahead included, each with the text before it: values ahead are left out."""
    walked = [(NextAsk(name=call.name, question=call.question), call.prefix)]
    text = call.prefix
    for part in call.following:
        if isinstance(part, str):
            text += part
        else:
            walked.append((part, text))
    return walked


def prompt_tokens(call: TextCall, model: ApiModel, counter: Counter) -> int:
    """Of the call as a generation."""
    call = ways.as_prompted(call)
    ids = counter.chat_ids(bodies.messages_of(call)) if bodies.by_chat(call, model) else counter.text_ids(call.prefix)
    return counter.num_tokens(ids)


def prompt_of_body(body: dict[str, Any], model: ApiModel, counter: Counter) -> int:
    """Of a request that is held to a schema."""
    messages = [(str(message["role"]), str(message["content"])) for message in body["messages"]]
    prompt = counter.num_tokens(counter.chat_ids(messages))
    return prompt + (counter.count(json.dumps(body["response_format"])) if model.family.schema_in_prompt else 0)


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
