"""An endpoint's answer, read with suspicion: what is not as documented is an error here and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Garbled(ValueError):
    """Not an answer of the protocol: tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What an endpoint says it has used.

    Args:
        prompt, cached: tokens of the prompt, and those of them that it had in its cache.
        generated, hidden: tokens generated, and those of them that are not in the answer.
    """

    prompt: int
    generated: int
    cached: int = 0
    hidden: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One choice of an answer. ``tokens`` is None where the endpoint's numbers cannot be."""

    text: str
    finish: str
    refusal: str | None
    tokens: Tokens | None


def read_answer(content: bytes) -> Answer:
    """The answer in the body of a chat or completions response.

    Raises:
        Garbled: it is not JSON, or not of that form.
    """
    try:
        value = json.loads(content)
    except ValueError:
        raise Garbled("the answer is not JSON") from None
    choices = value.get("choices") if isinstance(value, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Garbled("the answer has no choices")
    choice = choices[0]
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    refusal = message.get("refusal") if isinstance(message, dict) else None
    if text is None and (refusal or choice.get("finish_reason") in ("content_filter", "length")):
        text = ""
    if not isinstance(text, str):
        raise Garbled("the answer has no text")
    return Answer(
        text=text,
        finish=str(choice.get("finish_reason")),
        refusal=str(refusal) if refusal else None,
        tokens=_tokens(value.get("usage")),
    )


def _tokens(usage: Any) -> Tokens | None:
    if not isinstance(usage, dict):
        return None
    prompt, generated = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if prompt is None or generated is None:
        return None
    cached = _count(usage.get("prompt_tokens_details"), "cached_tokens") or 0
    hidden = _count(usage.get("completion_tokens_details"), "reasoning_tokens") or 0
    return Tokens(prompt=prompt, generated=generated, cached=min(cached, prompt), hidden=min(hidden, generated))


def _count(value: Any, name: str) -> int | None:
    count = value.get(name) if isinstance(value, Mapping) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 1 << 40 else None
