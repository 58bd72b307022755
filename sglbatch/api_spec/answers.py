"""An endpoint's answer, read with suspicion: what is not as documented is an error here and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglbatch.api_spec.token_logprobs import Told, read_told


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
    """One choice of an answer.

    Args:
        tokens: None where the endpoint's numbers cannot be.
        told: its tokens with their log-probabilities, where they were asked for and are named.
    """

    text: str
    finish: str
    refusal: str | None
    tokens: Tokens | None
    told: tuple[Told, ...] = ()

    @property
    def first_token(self) -> tuple[tuple[str, float], ...]:
        """The likeliest first tokens with their log-probabilities, as far as they are named."""
        top = self.told[0].top if self.told else ()
        return tuple((token.piece.decode("utf-8", "replace"), token.logprob) for token in top)


def read_answer(content: bytes) -> Answer:
    """The answer in the body of a chat or completions response.

    Raises:
        Garbled: it is not JSON, or not of that form.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
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
        tokens=_tokens(value.get("usage"), text),
        told=read_told(choice.get("logprobs")),
    )


def _tokens(usage: Any, text: str) -> Tokens | None:
    """None where the numbers are missing or cannot be: a prompt has tokens, and so has a text."""
    if not isinstance(usage, dict):
        return None
    prompt, generated = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if not prompt or generated is None or (text and not generated):
        return None
    cached = _count(usage.get("prompt_tokens_details"), "cached_tokens") or 0
    hidden = _count(usage.get("completion_tokens_details"), "reasoning_tokens") or 0
    return Tokens(prompt=prompt, generated=generated, cached=min(cached, prompt), hidden=min(hidden, generated))


def _count(value: Any, name: str) -> int | None:
    count = value.get(name) if isinstance(value, Mapping) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 1 << 40 else None
