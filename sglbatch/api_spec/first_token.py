"""A select by the first token of the answer: one generated token in place of an object held to a schema. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from typing import Final

from sglbatch.types import TextChoices

TopLogprobs = Sequence[tuple[str, float]]
"""(token, log-probability) of the likeliest first tokens."""

MIN_MASS: Final = 0.5
"""A model that answers something else at least half of the time is asked under a schema."""

MAX_UNTOLD: Final = 0.01
"""Where a choice is drawn, all of its distribution has to be known, up to this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """``logprobs``: normalised, of each choice; None where the endpoint did not name all of them."""

    choice: int
    logprobs: tuple[float, ...] | None


def can_tell(question: TextChoices) -> bool:
    """Whether first tokens may tell the choices apart: none is the beginning of another."""
    texts = sorted(_stripped(question))
    return all(texts) and not any(b.startswith(a) for a, b in pairwise(texts))


def decide(question: TextChoices, top: TopLogprobs, *, seed: int) -> Decision | None:
    """The choice that the first tokens name; None where they leave it open.

    A token counts for the only choice that can begin with it. A choice is no likelier than its first tokens, so the
    best one is certain when it is ahead of the second by more than what was not told: tokens that several choices
    begin with, and those too unlikely to be named.
    """
    texts = _stripped(question)
    mass, unclear, named = [0.0] * len(texts), 0.0, 0.0
    for token, logprob in top:
        p = exp(min(0.0, logprob))
        named += p
        fitting = [i for i, text in enumerate(texts) if _may_begin(text, token.lstrip())]
        if len(fitting) == 1:
            mass[fitting[0]] += p
        elif fitting:
            unclear += p
    untold = unclear + max(0.0, 1.0 - named)
    best, second = sorted(mass, reverse=True)[:2] if len(mass) > 1 else (mass[0], 0.0)
    if sum(mass) < MIN_MASS or best - second <= untold:
        return None
    if question.temperature > 0:
        return _drawn(question, mass, seed=seed) if untold <= MAX_UNTOLD * sum(mass) else None
    return Decision(choice=mass.index(best), logprobs=_logprobs(mass))


def _drawn(question: TextChoices, mass: Sequence[float], *, seed: int) -> Decision:
    highest = max(mass)
    weights = [(p / highest) ** (1 / question.temperature) for p in mass]
    (choice,) = random.Random(seed).choices(range(len(mass)), weights)
    return Decision(choice=choice, logprobs=_logprobs(mass))


def _logprobs(mass: Sequence[float]) -> tuple[float, ...] | None:
    return tuple(log(p / sum(mass)) for p in mass) if all(mass) else None


def _stripped(question: TextChoices) -> list[str]:
    return [choice.strip() for choice in question.choices]


def _may_begin(text: str, token: str) -> bool:
    """Whether an answer that begins with ``token`` may be ``text``, or ``text`` and more behind it."""
    if len(token) <= len(text):
        return bool(token) and text.startswith(token)
    return token.startswith(text) and not token[len(text)].isalnum()
