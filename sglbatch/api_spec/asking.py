"""How one call of a program is answered by an endpoint: as free text, as fields of a schema, or as a choice."""

from __future__ import annotations

import json
from collections import Counter as Counts
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from sglbatch.api_spec import bodies
from sglbatch.api_spec.answers import Answer
from sglbatch.api_spec.bodies import Outgoing
from sglbatch.api_spec.constraints import accepts, field_text, longest
from sglbatch.api_spec.matching import Matcher, Taken, first_stop
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.speculation import PROBES, Speculation, place_of
from sglbatch.api_spec.tokens import Counter
from sglbatch.errors import CallError
from sglbatch.types import (
    FinishReason,
    Following,
    Generate,
    NextAsk,
    Result,
    TextCall,
    TextChoices,
    Usage,
)

MAX_ASKS: Final = 3
"""How often a value is asked for that does not come in its form."""

FIT_WINDOW: Final = 16

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


@dataclass(kw_only=True)
class Asking:
    """Answers calls. One for a run; it knows no threads and no clock.

    Args:
        methods: how many calls were answered by which means.
        fits: for each place of a template, whether free text had the form asked for, lately.
    """

    model: ApiModel
    counter: Counter
    speculation: Speculation
    poster: Poster
    methods: Counts[str] = field(default_factory=Counts)
    fits: dict[Hashable, deque[bool]] = field(default_factory=dict)

    async def answer(self, call: TextCall, *, request_id: int, seed: int, used: Used) -> Result:
        """The call's result, with what came ahead.

        Args:
            used: is filled in, also where the call fails.

        Raises:
            CallError: the call fails. SglbatchError: the job has to end.
        """
        first_ask = NextAsk(name=call.name, question=call.question)
        call = replace(call, following=() if bodies.stands_alone(first_ask) else _joinable(call.following))
        asks = [first_ask, *_asks(call.following)]
        goes_ahead = len(asks) > 1 and call.ahead_tokens != 0 and self.speculation.begin(place_of(call))
        if not goes_ahead:
            call = replace(call, following=())
        taken = await self._taken(call, seed, used)
        first, *ahead = [_result(found, request_id) for found in taken]
        return replace(first, usage=used.usage, ahead=tuple(ahead))

    async def _taken(self, call: TextCall, seed: int, used: Used) -> list[Taken]:
        chat = bodies.by_chat(call, self.model)
        free = isinstance(call.question, Generate) and call.question.constraint is None
        schema = self.model.family.schema and self.model.family.chat
        if chat and schema and (call.following or not free):
            self.methods["fields by schema" if call.following else "one field by schema"] += 1
            return await self._fields(call, seed, used)
        alone = replace(call, following=())
        if free:
            taken = await self._text(call, seed, used) or await self._text(alone, seed, used)
            self.methods["text"] += 1
            return taken
        fits = self.fits.setdefault(place_of(alone), deque(maxlen=FIT_WINDOW))
        if not schema or len(fits) < PROBES or 2 * sum(fits) >= len(fits):
            taken = await self._text(call, seed, used)
            fits.append(bool(taken))
            if taken:
                self.methods["text that fits"] += 1
                return taken
        if schema:
            self.methods["one field by schema"] += 1
            return await self._fields(alone, seed, used)
        return await self._insist(alone, seed, used)

    # --- free text ---

    async def _text(self, call: TextCall, seed: int, used: Used) -> list[Taken]:
        """What one generation gives; [] where its value cannot be told or does not fit."""
        question = self._as_generation(call.question)
        place, ahead = place_of(call), 0
        stops = question.stop
        if call.following:
            most = self._tokens_ahead(call.following)
            limit = most if call.ahead_tokens is None else min(most, call.ahead_tokens)
            ahead = self.speculation.budget(place, limit)
            stops = _common_stops(call)
        sent = call
        if isinstance(call.question, TextChoices):
            # A space goes with the word behind it: tokenised by itself it leads models astray.
            sent = replace(call, prefix=call.prefix.rstrip(" "))
        answer = await self._post(
            bodies.generation(
                sent, question, self.model, max_tokens=question.max_tokens + ahead, stops=stops, seed=seed
            ),
            call,
            used,
        )
        text = self._without_prefix(answer.text, call)
        if isinstance(call.question, TextChoices):
            text = _aligned(text, call.question)
        taken = self._match(call, text, answer, bool(stops[: self.model.family.num_stops]))
        if call.following:
            self._record(call, place, text, answer, taken)
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
            total += self.counter.count(part) if isinstance(part, str) else self._most_tokens(part.question)
        return total

    def _most_tokens(self, question: Generate | TextChoices) -> int:
        if isinstance(question, Generate):
            return question.max_tokens
        return max(self.counter.count(choice) for choice in question.choices) + 2

    def _as_generation(self, question: Generate | TextChoices) -> Generate:
        if isinstance(question, Generate):
            return question
        return bodies.choice_question(question, self._most_tokens(question))

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
        asks = _asks(text)
        last = max(i for i, part in enumerate(text) if isinstance(part, NextAsk))
        max_tokens = sum(self._most_tokens(ask.question) + FIELD_TOKENS for ask in asks)
        rejected: str | None = None
        for attempt in range(MAX_ASKS):
            outgoing = bodies.fields(
                call, asks, text[: last + 1], self.model, max_tokens=max_tokens, seed=seed + attempt, rejected=rejected
            )
            answer = await self._post(outgoing, call, used)
            taken = self._field_values(asks, answer)
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

    def _field_values(self, asks: Sequence[NextAsk], answer: Answer) -> list[Taken]:
        """The fields' values up to the first that is missing or not in its form."""
        try:
            value = json.loads(answer.text)
        except ValueError:
            return []
        if bodies.is_whole(asks):
            found = self._field_value(asks[0].question, answer.text)
            return [] if found is None else [found]
        if not isinstance(value, dict):
            return []
        taken: list[Taken] = []
        for name, ask in zip(bodies.field_names(asks), asks, strict=True):
            text = field_text(ask.question, value[name]) if name in value else None
            found = None if text is None else self._field_value(ask.question, text)
            if found is None or (taken and not found.text):
                break
            taken.append(found)
            if found.finish == "length":
                break
        return taken

    def _field_value(self, question: Generate | TextChoices, text: str) -> Taken | None:
        if isinstance(question, TextChoices):
            if text not in question.choices:
                return None
            return Taken(text=text, finish="choice", end=0, choice=question.choices.index(text))
        if question.constraint is not None:
            return Taken(text=text, finish="constraint", end=0) if accepts(question.constraint, text) else None
        cut = first_stop(text, question)
        value = text if cut is None else text[:cut]
        within = self.counter.first(value, question.max_tokens)
        if within is not None and within != value:
            return Taken(text=within, finish="length", end=0)
        return Taken(text=value, finish="stop", end=0)

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
                self.methods["asked in words"] += 1
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


def _asks(parts: Following) -> list[NextAsk]:
    return [part for part in parts if isinstance(part, NextAsk)]


def _joinable(parts: Following) -> Following:
    """Up to the first call that can only be asked by itself."""
    for i, part in enumerate(parts):
        if isinstance(part, NextAsk) and bodies.stands_alone(part):
            return parts[:i]
    return parts


def _common_stops(call: TextCall) -> tuple[str, ...]:
    """Stop strings that can end the whole generation: the last question's, where nothing before it could meet them."""
    *before, last = [call.question, *(ask.question for ask in _asks(call.following))]
    if not isinstance(last, Generate):
        return ()
    texts = [part for part in call.following if isinstance(part, str)]
    earlier = {stop for question in before if isinstance(question, Generate) for stop in question.stop}
    return tuple(s for s in last.stop if s not in earlier and not any(s in text for text in texts))


def _aligned(text: str, question: TextChoices) -> str:
    """Spaces before a choice are the endpoint's way of tokenising, unless the choices have them themselves."""
    return text if any(choice[0].isspace() for choice in question.choices) else text.lstrip(" ")


def _result(found: Taken, request_id: int) -> Result:
    return Result(
        request_id=request_id,
        text="" if found.choice is not None else found.text,
        finish_reason=found.finish,
        choice=found.choice,
    )
