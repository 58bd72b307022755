"""How one call of a program is answered by an endpoint: as free text, as fields of a schema, or as a choice."""

from __future__ import annotations

import json
from collections import Counter as Counts
from collections import deque
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from sglbatch.api_spec import bodies
from sglbatch.api_spec.answers import Answer
from sglbatch.api_spec.bodies import Outgoing
from sglbatch.api_spec.fields import field_values
from sglbatch.api_spec.first_token import Decision, decide
from sglbatch.api_spec.gains import Gains
from sglbatch.api_spec.matching import Taken
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.probing import Trials
from sglbatch.api_spec.results import chosen, result_of
from sglbatch.api_spec.speculation import Speculation, place_of
from sglbatch.api_spec.text_values import TextReader
from sglbatch.api_spec.tokens import Counter
from sglbatch.api_spec.ways import (
    BY_FIELD,
    BY_FIELDS,
    BY_INSISTING,
    BY_LOGPROBS,
    BY_TEXT,
    FIT_PROBES,
    FIT_WINDOW,
    MOSTLY,
    as_prompted,
    asks_of,
    common_stops,
    first_means,
    has_schema,
    joinable,
    most_tokens,
    second_means,
)
from sglbatch.errors import CallError
from sglbatch.types import (
    Following,
    NextAsk,
    Result,
    TextCall,
    TextChoices,
    Usage,
)

MAX_ASKS: Final = 3
"""How often a value is asked for that does not come in its form."""

FIELD_TOKENS: Final = 16
"""Room for a field's name and marks in a JSON object, beyond its value."""

MESSAGE_TOKENS: Final = 16
"""Room for what an endpoint puts around each message."""

_ONE_OF: Final = "Answer with exactly one of these and nothing else: {}"
_MATCHING: Final = "Answer with nothing but a text that matches the regular expression {}"


class Poster(Protocol):
    """Sends one request; ``client.Client`` does, and a batch may."""

    async def post(self, outgoing: Outgoing, *, prompt_tokens: int, most_prompt_tokens: int) -> Answer:
        """Raises CallError where the call fails, SglbatchError where the job has to end."""


@dataclass(kw_only=True)
class Used:
    """Tokens of all the requests of one call, as the endpoint says."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.prompt, generated_tokens=self.generated)


@dataclass(kw_only=True, slots=True)
class _Tried:
    """How a cheaper means has done at a place."""

    fits: deque[bool] = field(default_factory=lambda: deque(maxlen=FIT_WINDOW))
    trials: Trials = field(default_factory=Trials)


@dataclass(kw_only=True)
class Asking:
    """Answers calls. One for a run; it knows no threads and no clock.

    Args:
        methods: how many calls were answered by which means.
        tried: for each cheaper means and place of a template, whether it gave what was asked for, lately.
        has_logprobs: the endpoint names the likeliest tokens, as far as is known.
        ahead: for each place of a template, the calls that go ahead.
    """

    model: ApiModel
    counter: Counter
    speculation: Speculation
    poster: Poster
    methods: Counts[str] = field(default_factory=Counts)
    tried: dict[Hashable, _Tried] = field(default_factory=dict)
    has_logprobs: bool = True
    ahead: dict[Hashable, Trials] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reader = TextReader(model=self.model, counter=self.counter)
        self.gains = Gains(speculation=self.speculation, counter=self.counter)

    async def answer(self, call: TextCall, *, request_id: int, seed: int, used: Used) -> Result:
        """The call's result, with what came ahead.

        Args:
            used: is filled in, also where the call fails.

        Raises:
            CallError: the call fails. SglbatchError: the job has to end.
        """
        call = replace(call, following=joinable(call))
        asks = [NextAsk(name=call.name, question=call.question), *asks_of(call.following)]
        trials = self.ahead.setdefault(place_of(call), Trials())
        if len(asks) < 2 or call.ahead_tokens == 0 or not await self._begins_ahead(call, trials):
            call = replace(call, following=())
        with trials.trying() if call.following else nullcontext():
            taken, means = await self._taken(call, seed, used)
        self.methods[means] += 1
        first, *ahead = [
            result_of(found, call.question, self.counter, request_id=request_id, means=means) for found in taken
        ]
        return replace(first, usage=used.usage, ahead=tuple(ahead))

    async def _begins_ahead(self, call: TextCall, trials: Trials) -> bool:
        """Whether a call goes ahead; where that is being tried, those that try show it."""
        place = place_of(call)
        await trials.settled(lambda: self.speculation.is_open(place))
        return self.speculation.begin(place)

    async def _taken(self, call: TextCall, seed: int, used: Used) -> tuple[list[Taken], str]:
        """The values, and by what means they were had."""
        alone = replace(call, following=())
        means = first_means(call, self.model)
        if means == BY_LOGPROBS:
            if self.has_logprobs and await self._tries(means, alone):
                decision = await self._first_token(alone, seed, used)
                if decision is not None:
                    return [chosen(alone, decision)], means
            means = second_means(call, self.model)
        if means in (BY_FIELD, BY_FIELDS):
            return await self._fields(call, seed, used), means
        if means == BY_TEXT:
            return await self._text(call, seed, used) or await self._text(alone, seed, used), means
        schema = has_schema(self.model)
        if not schema or await self._tries(means, alone):
            tried = self.tried.setdefault((means, place_of(alone)), _Tried())
            with tried.trials.trying():
                taken = await self._text(call, seed, used)
                tried.fits.append(bool(taken))
            if taken:
                return taken, means
        if schema:
            return await self._fields(alone, seed, used), BY_FIELD
        return await self._insist(alone, seed, used), BY_INSISTING

    async def _tries(self, means: str, call: TextCall) -> bool:
        """Whether to try the cheaper means first: a few calls do, and the others where it mostly gave the answer."""
        tried = self.tried.setdefault((means, place_of(call)), _Tried())
        await tried.trials.settled(lambda: tried.trials.under_way + len(tried.fits) >= FIT_PROBES > len(tried.fits))
        return len(tried.fits) < FIT_PROBES or sum(tried.fits) >= MOSTLY * len(tried.fits)

    # --- by the first token ---

    async def _first_token(self, call: TextCall, seed: int, used: Used) -> Decision | None:
        """The choice that the log-probabilities of the first token name; None where they do not."""
        assert isinstance(call.question, TextChoices)
        tried = self.tried[BY_LOGPROBS, place_of(call)]
        with tried.trials.trying():
            try:
                answer = await self._post(bodies.first_token(call, self.model, seed=seed), call, used)
            except CallError as error:
                if error.code != "refused-request":
                    raise
                self.has_logprobs = False  # the schema shows whether it was the log-probabilities that were refused
                return None
            self.has_logprobs = bool(answer.first_token)
            decision = decide(call.question, answer.first_token, seed=seed)
            tried.fits.append(decision is not None)
            return decision

    # --- free text ---

    async def _text(self, call: TextCall, seed: int, used: Used) -> list[Taken]:
        """What one generation gives; [] where its value cannot be told or does not fit."""
        own = most_tokens(call.question, self.counter)
        question = bodies.as_generation(call.question, own)
        place, ahead = place_of(call), 0
        stops = question.stop
        if call.following:
            most = self._tokens_ahead(call.following)
            limit = most if call.ahead_tokens is None else min(most, call.ahead_tokens)
            ahead = self.speculation.budget(place, limit)
            stops = common_stops(call)
        answer = await self._post(
            bodies.generation(as_prompted(call), question, self.model, max_tokens=own + ahead, stops=stops, seed=seed),
            call,
            used,
        )
        text = self.reader.text(call, answer)
        taken = self.reader.values(call, text, answer, stops_sent=bool(stops[: self.model.family.num_stops]))
        if call.following:
            self.gains.of_text(call, text, answer, taken)
        return taken

    def _tokens_ahead(self, following: Following) -> int:
        total = 0
        for part in following:
            total += self.counter.count(part) if isinstance(part, str) else most_tokens(part.question, self.counter)
        return total

    # --- fields ---

    async def _fields(self, call: TextCall, seed: int, used: Used) -> list[Taken]:
        """Values held to a schema, checked again here; at least the first."""
        text: Following = (NextAsk(name=call.name, question=call.question), *call.following)
        asks = asks_of(text)
        last = max(i for i, part in enumerate(text) if isinstance(part, NextAsk))
        max_tokens = sum(most_tokens(ask.question, self.counter) + FIELD_TOKENS for ask in asks)
        rejected: str | None = None
        for attempt in range(MAX_ASKS):
            outgoing = bodies.fields(
                call, asks, text[: last + 1], self.model, max_tokens=max_tokens, seed=seed + attempt, rejected=rejected
            )
            answer = await self._post(outgoing, call, used)
            taken = field_values(asks, answer.text, self.counter.first)
            if call.following:
                self.gains.of_fields(call, answer, taken)
            if taken:
                return taken
            rejected = answer.text
        if answer.finish == "length":
            raise CallError("truncated", f"the answer was cut off at {max_tokens} tokens, {MAX_ASKS} times")
        raise CallError(
            "no-match", f"{MAX_ASKS} answers did not have the form asked for; the last: {answer.text[:100]!r}"
        )

    # --- insisting ---

    async def _insist(self, call: TextCall, seed: int, used: Used) -> list[Taken]:
        """Asks in words where nothing enforces the form, and checks what comes."""
        question = call.question
        assert isinstance(question, TextChoices) or question.constraint is not None
        if isinstance(question, TextChoices):
            words = _ONE_OF.format(", ".join(json.dumps(choice, ensure_ascii=False) for choice in question.choices))
        else:
            assert question.constraint is not None
            words = _MATCHING.format(question.constraint.source)
        asked = replace(call, messages=(*call.messages, ("user", words))) if call.chat else call
        for attempt in range(MAX_ASKS):
            taken = await self._text(asked, seed + attempt, used)
            if taken:
                return taken
        raise CallError("no-match", f"{MAX_ASKS} answers did not have the form asked for")

    async def _post(self, outgoing: Outgoing, call: TextCall, used: Used) -> Answer:
        pieces = outgoing.pieces()
        count = sum(self.counter.count(piece) + MESSAGE_TOKENS for piece in pieces)
        # A token has at least one byte.
        most = count if self.counter.exact else sum(len(piece.encode()) + MESSAGE_TOKENS for piece in pieces)
        answer = await self.poster.post(outgoing, prompt_tokens=count, most_prompt_tokens=most)
        if answer.tokens is not None:
            used.prompt += answer.tokens.prompt
            used.cached += answer.tokens.cached
            used.generated += answer.tokens.generated
        if answer.refusal is not None:
            raise CallError("refused", f"the model refuses: {answer.refusal[:200]}")
        if answer.finish == "content_filter":
            raise CallError("content-filter", "the provider's content filter withheld the answer")
        return answer
