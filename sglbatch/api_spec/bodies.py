"""What is sent: the bodies of requests, and how a template's text becomes messages where it is not already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sglbatch.api_spec.constraints import field_schema
from sglbatch.api_spec.model import ApiModel
from sglbatch.types import Following, Generate, NextAsk, TextCall, TextChoices

CHAT: Final = "/chat/completions"
COMPLETIONS: Final = "/completions"

_BEGIN: Final = (
    "Begin your answer with exactly the text between the lines, and go on from where it stops.\n-----\n{}\n-----"
)
_CONTINUE: Final = (
    "Continue the text between the lines from exactly where it stops. Write only what comes next, without repeating "
    "any of it and without a comment.\n-----\n{}\n-----"
)
_FILL: Final = (
    "In the text between the lines, the blanks are written as {{{{name}}}}. Answer with a JSON object that has the "
    "text of each blank, in this order: {names}.\n-----\n{text}\n-----"
)
_AGAIN: Final = "The answer {answer!r} does not have the form that is asked for. Answer again."

Message = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """One HTTP request.

    Args:
        max_tokens: the most that it can generate and bill.
        seed: of the call and the try: with the body it says which request of which row this is.
    """

    path: str
    body: dict[str, Any]
    max_tokens: int
    seed: int

    def pieces(self) -> list[str]:
        """The texts that are billed as the prompt."""
        found = [str(message["content"]) for message in self.body.get("messages", ())]
        found += [self.body["prompt"]] if "prompt" in self.body else []
        return found + ([json.dumps(self.body["response_format"])] if "response_format" in self.body else [])


def by_chat(call: TextCall, model: ApiModel) -> bool:
    """Whether the call goes to the chat endpoint."""
    return call.chat or not model.family.completions


def messages_of(call: TextCall) -> list[Message]:
    """A call as messages. Nothing begins the model's own turn for it: endpoints differ in what they do with that."""
    if not call.chat:
        return [("user", _CONTINUE.format(call.prefix))]
    begin = [("user", _BEGIN.format(call.prefix))] if call.prefix.strip() else []
    return [*call.messages, *begin]


def generation(
    call: TextCall, question: Generate, model: ApiModel, *, max_tokens: int, stops: Sequence[str], seed: int
) -> Outgoing:
    """Free text from where the call's text stops."""
    family = model.family
    most = max_tokens + family.hidden_tokens
    body: dict[str, Any] = {"model": model.model}
    if by_chat(call, model):
        path = CHAT
        body |= {"messages": _json(messages_of(call)), family.max_tokens_field: most}
    else:
        path = COMPLETIONS
        body |= {"prompt": call.prefix, "max_tokens": most}
    sent_stops = list(stops)[: family.num_stops]
    body |= {"stop": sent_stops} if sent_stops else {}
    body |= _sampling(question, model, seed) | _logprobs(question, path)
    return Outgoing(path=path, body=body, max_tokens=most, seed=seed)


def first_token(call: TextCall, model: ApiModel, *, seed: int) -> Outgoing:
    """The likeliest first tokens of an answer, at the model's own temperature."""
    question = Generate(max_tokens=1, temperature=1.0)
    asked = generation(call, question, model, max_tokens=1, stops=(), seed=seed)
    logprobs = {"logprobs": True, "top_logprobs": model.family.num_top_logprobs}
    return replace(asked, body=asked.body | logprobs)


def fields(
    call: TextCall,
    asks: Sequence[NextAsk],
    text: Following,
    model: ApiModel,
    *,
    max_tokens: int,
    seed: int,
    rejected: str | None = None,
) -> Outgoing:
    """The values of several gens and selects as one JSON object that the endpoint holds to a schema.

    Args:
        text: what the template has from where the call's text stops, the asks in it.
        rejected: an earlier answer that was of no use.
    """
    names = field_names(asks)
    blanks = iter(names)
    shown = "".join(part if isinstance(part, str) else "{{" + next(blanks) + "}}" for part in text)
    messages = list(call.messages) if call.chat else []
    messages.append(("user", _FILL.format(names=", ".join(names), text=call.prefix + shown)))
    if rejected is not None:
        messages += [("user", _AGAIN.format(answer=rejected[:200]))]
    properties = {name: field_schema(ask.question) for name, ask in zip(names, asks, strict=True)}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    if is_whole(asks):
        schema = properties[names[0]]
    first = asks[0].question
    body: dict[str, Any] = {
        "model": model.model,
        "messages": _json(messages),
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "blanks", "strict": True, "schema": schema},
        },
        model.family.max_tokens_field: max_tokens + model.family.hidden_tokens,
    }
    question = first if isinstance(first, Generate) else Generate(max_tokens=1, temperature=first.temperature)
    most = max_tokens + model.family.hidden_tokens
    return Outgoing(path=CHAT, body=body | _sampling(question, model, seed), max_tokens=most, seed=seed)


def is_whole(asks: Sequence[NextAsk]) -> bool:
    """A JSON schema asked for alone is the answer's own schema: what it refers to stays where it is."""
    return len(asks) == 1 and _schema_of(asks[0]) is not None


def stands_alone(ask: NextAsk) -> bool:
    """A schema that refers to its own parts cannot be a field of another; log-probabilities are of one answer's own
    tokens."""
    if isinstance(ask.question, Generate) and ask.question.num_top_logprobs is not None:
        return True
    source = _schema_of(ask)
    return source is not None and '"$ref"' in source


def _schema_of(ask: NextAsk) -> str | None:
    constraint = ask.question.constraint if isinstance(ask.question, Generate) else None
    return constraint.source if constraint is not None and constraint.kind == "json_schema" else None


def field_names(asks: Sequence[NextAsk]) -> list[str]:
    """A name for each field: the variable's where it has one of its own."""
    names: list[str] = []
    for i, ask in enumerate(asks, start=1):
        name = ask.name or "value"
        names.append(name if name not in names else f"{name}_{i}")
    return names


def as_generation(question: Generate | TextChoices, max_tokens: int) -> Generate:
    """The generation that stands for a select where choices cannot be scored; a gen as it is."""
    if isinstance(question, Generate):
        return question
    return Generate(max_tokens=max_tokens, temperature=question.temperature)


def _sampling(question: Generate, model: ApiModel, seed: int) -> dict[str, Any]:
    if not model.family.sampling:
        return {}
    body: dict[str, Any] = {"temperature": question.temperature}
    if question.temperature > 0:
        body["seed"] = seed & 0x7FFFFFFF
    optional = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    body |= {name: getattr(question, name) for name, neutral in optional.items() if getattr(question, name) != neutral}
    body |= {"top_k": question.top_k} if question.top_k > 0 else {}
    return body | ({"min_p": question.min_p} if question.min_p > 0 else {})


def _logprobs(question: Generate, path: str) -> dict[str, Any]:
    """At least one of the likeliest tokens: some servers take 0 for not asking at all."""
    if question.num_top_logprobs is None:
        return {}
    most = max(1, question.num_top_logprobs)
    return {"logprobs": True, "top_logprobs": most} if path == CHAT else {"logprobs": most}


def _json(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]
