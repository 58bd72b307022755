"""The tokens of one request before it is made, its values taken to be short, typical or long."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sglbatch.api_spec import bodies, ways
from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.asking import FIELD_TOKENS
from sglbatch.api_spec.lengths import lengths
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.speculation import room_ahead
from sglbatch.api_spec.tokens import Counter
from sglbatch.types import Following, Generate, NextAsk, TextCall, TextChoices

Length: TypeAlias = Literal["short", "typical", "long"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTokens:
    """Args:
    length: which of ``Lengths`` values have.
    batch: requests go in batches, where nothing is known yet of what is of use ahead.
    """

    model: ApiModel
    counter: Counter
    length: Length
    batch: bool

    def by_text(self, call: TextCall) -> Tokens:
        """A generation; ahead with the template's text and a surplus at the end.

        A stop string ends it, or the model's own end. A model that goes on behind a value, into a template that it
        follows or because nothing holds it to a form, does so up to the request's limit.
        """
        values = sum(self.sizes(call)) + self.between(call)
        limit = self._limit(call)
        *_, last = ways.asks_of((NextAsk(name=call.name, question=call.question), *call.following))
        stops = ways.common_stops(call)[: self.model.family.num_stops] if ways.is_free(last.question) else ()
        if self.length == "short":
            generated = values
        elif stops:
            generated = values + 1
        elif call.following or not ways.is_free(call.question) or self.length == "long":
            generated = limit
        else:
            generated = values + 1
        prompt = prompt_tokens(call, self.model, self.counter)
        return Tokens(prompt=prompt, generated=min(limit, generated))

    def _limit(self, call: TextCall) -> int:
        """The ``max_tokens`` of the request, what is asked ahead as far as it has been of use."""
        first, *later = [self.most(ask.question) for ask, _ in walk(call)]
        if not call.following:
            return first
        most = self.between(call) + sum(later)
        most = most if call.ahead_tokens is None else min(most, call.ahead_tokens)
        return first + self.room(most, call)

    def room(self, most: int, call: TextCall) -> int:
        """Tokens to ask for ahead, of at most so many: a wave goes before anything has been of use."""
        return most if self.batch else room_ahead(most, self.between(call) + sum(self.sizes(call)[1:]))

    def between(self, call: TextCall) -> int:
        """Tokens of the template's own text ahead."""
        return sum(self.counter.count(part) for part in call.following if isinstance(part, str))

    def sizes(self, call: TextCall) -> list[int]:
        """Tokens of the values."""
        return [self.size(ask.question, text) for ask, text in walk(call)]

    def by_fields(self, call: TextCall) -> Tokens:
        """One JSON object, or a value by itself."""
        asks = [ask for ask, _ in walk(call)]
        whole: Following = (asks[0], *call.following)
        last = max(i for i, part in enumerate(whole) if isinstance(part, NextAsk))
        outgoing = bodies.fields(call, asks, whole[: last + 1], self.model, max_tokens=0, seed=0)
        empty = json.dumps(dict.fromkeys(bodies.field_names(asks), ""))
        frame = 0 if bodies.is_whole(asks) else self.counter.count(empty)
        if self.length == "long":
            frame += len(asks) * FIELD_TOKENS // 2  # white space, escapes
        prompt = prompt_of_body(outgoing.body, self.model, self.counter)
        return Tokens(prompt=prompt, generated=frame + sum(self.sizes(call)))

    def size(self, question: Generate | TextChoices, before: str) -> int:
        """Tokens of a value behind the text ``before``."""
        found = lengths(question, before, self.counter)
        return {"short": found.short, "typical": found.typical, "long": found.long}[self.length]

    def most(self, question: Generate | TextChoices) -> int:
        return ways.most_tokens(question, self.counter)


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
