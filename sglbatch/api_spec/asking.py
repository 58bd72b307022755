"""How one call of a program is answered by an endpoint: as free text, as fields of a schema, or as a choice."""

from __future__ import annotations

import json
from collections import Counter as Counts
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from sglbatch.api_spec import bodies
from sglbatch.api_spec.answers import Answer
from sglbatch.api_spec.bodies import Outgoing
from sglbatch.api_spec.constraints import longest
from sglbatch.api_spec.fields import field_values
from sglbatch.api_spec.first_token import Decision, decide
from sglbatch.api_spec.matching import Matcher, Taken, first_stop, first_stop_span
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.probing import Trials
from sglbatch.api_spec.speculation import Speculation, place_of
from sglbatch.api_spec.token_logprobs import Told, between
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
    FinishReason,
    Following,
    Generate,
    NextAsk,
    Result,
    TextCall,
    TextChoices,
    TokenLogprob,
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
        first, *ahead = [self._result(found, request_id, means, call.question) for found in taken]
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
                    return [_chosen(alone, decision)], means
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
        text = self._without_prefix(answer.text, call)
        text = _aligned(text, call)
        taken = self._match(call, text, answer, bool(stops[: self.model.family.num_stops]))
        if call.following:
            self._record(call, place, text, answer, taken)
        if question.num_top_logprobs is not None:
            return [_with_told(found, text, question, answer) for found in taken]
        return taken

    def _match(self, call: TextCall, text: str, answer: Answer, stops_sent: bool) -> list[Taken]:
        question = call.question
        own_end = answer.finish == "stop"
        if not call.following and isinstance(question, Generate) and question.constraint is None:
            return [self._only_value(text, question, answer)]
        matcher = Matcher(first_tokens=self._cutter(answer), longest=longest)
        return matcher.match(
            text, ended=own_end and not stops_sent, stopped=own_end, first=question, following=call.following
        )

    def _only_value(self, text: str, question: Generate, answer: Answer) -> Taken:
        """The value of a generation that was asked for nothing else: the endpoint itself has held ``max_tokens``."""
        cut = first_stop(text, question)
        value = text if cut is None else text[:cut]
        finish: FinishReason = "stop" if cut is not None or answer.finish != "length" else "length"
        within = self._cutter(answer)(value, question.max_tokens) if self.model.family.hidden_tokens else value
        if within is not None and within != value:
            value, finish = within, "length"
        if not value and answer.finish == "length":
            raise CallError("truncated", "the model used up its tokens before its answer began")
        return Taken(text=value, finish=finish, end=len(value))

    def _cutter(self, answer: Answer) -> Any:
        """Cuts a value to its tokens; an answer that as a whole has no more than that needs no cutting."""
        shown = None if answer.tokens is None else answer.tokens.generated - answer.tokens.hidden

        def first(text: str, max_tokens: int) -> str | None:
            if shown is not None and shown <= max_tokens and not self.counter.exact:
                return text
            return self.counter.first(text, max_tokens)

        return first

    def _record(self, call: TextCall, place: Any, text: str, answer: Answer, taken: Sequence[Taken]) -> None:
        generated = answer.tokens.generated if answer.tokens is not None else self.counter.count(answer.text)
        prompt = answer.tokens.prompt if answer.tokens is not None else self.counter.count(call.prefix)
        if not taken:
            self.speculation.record(place, saved_prompt_tokens=-prompt, used_tokens=0, reach=0, wasted_tokens=generated)
            return
        first_len = self.counter.count(taken[0].text)
        values = sum(self.counter.count(found.text) for found in taken[1:])
        saved = sum(prompt + self.counter.count(text[: found.end]) for found in taken[:-1])
        reach = self.counter.count(text[: taken[-1].end]) - first_len if len(taken) > 1 else 0
        self.speculation.record(
            place,
            saved_prompt_tokens=saved,
            used_tokens=values,
            reach=reach,
            wasted_tokens=max(0, generated - first_len - values),
        )

    def _tokens_ahead(self, following: Following) -> int:
        total = 0
        for part in following:
            total += self.counter.count(part) if isinstance(part, str) else most_tokens(part.question, self.counter)
        return total

    def _without_prefix(self, text: str, call: TextCall) -> str:
        """A chat model may repeat the beginning that it was given."""
        prefix = call.prefix
        if not bodies.by_chat(call, self.model) or not prefix.strip():
            return text
        for begin in (prefix, prefix.lstrip(), prefix.strip()):
            if text.startswith(begin):
                return text[len(begin) :]
        return text

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
                self._record_fields(call, asks, answer, taken)
            if taken:
                return taken
            rejected = answer.text
        if answer.finish == "length":
            raise CallError("truncated", f"the answer was cut off at {max_tokens} tokens, {MAX_ASKS} times")
        raise CallError(
            "no-match", f"{MAX_ASKS} answers did not have the form asked for; the last: {answer.text[:100]!r}"
        )

    def _record_fields(self, call: TextCall, asks: Sequence[NextAsk], answer: Answer, taken: Sequence[Taken]) -> None:
        generated = answer.tokens.generated if answer.tokens is not None else self.counter.count(answer.text)
        prompt = answer.tokens.prompt if answer.tokens is not None else self.counter.count(call.prefix)
        values = [self.counter.count(found.text) for found in taken]
        self.speculation.record(
            place_of(call),
            saved_prompt_tokens=prompt * (len(taken) - 1),
            used_tokens=sum(values[1:]),
            reach=0,
            wasted_tokens=max(0, generated - sum(values)),
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

    def _result(self, found: Taken, request_id: int, means: str, question: Generate | TextChoices) -> Result:
        is_choice = found.choice is not None
        most = (question.num_top_logprobs if isinstance(question, Generate) else None) or 0
        tops = [token.top[:most] for token in found.told] if most else []
        return Result(
            request_id=request_id,
            text="" if is_choice else found.text,
            finish_reason=found.finish,
            choice=found.choice,
            choice_logprobs=found.logprobs,
            output_logprobs=self._token_logprobs(found.told),
            output_top_logprobs=tuple(map(self._token_logprobs, tops)),
            means=means if is_choice else None,
        )

    def _token_logprobs(self, told: Sequence[Told]) -> tuple[TokenLogprob, ...]:
        ids = [self.counter.token_id(token.piece, token.token_id) for token in told]
        return tuple(
            (token.logprob, token.piece.decode("utf-8", "replace") if token_id is None else token_id)
            for token, token_id in zip(told, ids, strict=True)
        )

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


def _aligned(text: str, call: TextCall) -> str:
    """Spaces before a form are the prompt's or the endpoint's way of tokenising, unless the form has them itself."""
    question = call.question
    if isinstance(question, TextChoices):
        return text if any(choice[0].isspace() for choice in question.choices) else text.lstrip(" ")
    if question.constraint is None:
        return text
    if question.constraint.kind == "json_schema":
        return text.lstrip()
    return text if longest(question, text) is not None and not call.prefix.endswith(" ") else text.lstrip(" ")


def _chosen(call: TextCall, decision: Decision) -> Taken:
    assert isinstance(call.question, TextChoices)
    text = call.question.choices[decision.choice]
    return Taken(text=text, finish="choice", end=0, choice=decision.choice, logprobs=decision.logprobs)


def _with_told(found: Taken, text: str, question: Generate, answer: Answer) -> Taken:
    """With the log-probabilities of the value's tokens, a stop string that ends it included.

    Args:
        text: the answer without a beginning that it has repeated; all of it but a stop string is the value.
    """
    if answer.text and not answer.told:
        raise CallError(
            "no-logprobs", "the endpoint names no log-probabilities for this answer; return_logprob asks for them"
        )
    repeated, stop = len(answer.text) - len(text), first_stop_span(text, question)
    if not repeated and stop is None:
        return replace(found, told=answer.told)
    told = between(answer.told, answer.text, repeated, None if stop is None else repeated + stop[1])
    if told is None:
        raise CallError("no-logprobs", "the tokens whose log-probabilities the endpoint names are not its answer's")
    return replace(found, told=told)
