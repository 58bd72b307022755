"""The values of gens and selects in a JSON object that an endpoint was to hold to a schema: checked again here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sglbatch.api_spec import bodies
from sglbatch.api_spec.constraints import accepts, field_text
from sglbatch.api_spec.matching import FirstTokens, Taken, first_stop
from sglbatch.types import Generate, NextAsk, TextChoices


def field_values(asks: Sequence[NextAsk], answer: str, first_tokens: FirstTokens) -> list[Taken]:
    """The fields' values up to the first that is missing or not in its form.

    Args:
        first_tokens: cuts a value to its ``max_tokens``.
    """
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return []
    if bodies.is_whole(asks):
        found = _field_value(asks[0].question, answer, first_tokens)
        return [] if found is None else [found]
    if not isinstance(value, dict):
        return []
    taken: list[Taken] = []
    for name, ask in zip(bodies.field_names(asks), asks, strict=True):
        text = field_text(ask.question, value[name]) if name in value else None
        found = None if text is None else _field_value(ask.question, text, first_tokens)
        if found is None or (taken and not found.text):
            break
        taken.append(found)
        if found.finish == "length":
            break
    return taken


def _field_value(question: Generate | TextChoices, text: str, first_tokens: FirstTokens) -> Taken | None:
    if isinstance(question, TextChoices):
        if text not in question.choices:
            return None
        return Taken(text=text, finish="choice", end=0, choice=question.choices.index(text))
    if question.constraint is not None:
        return Taken(text=text, finish="constraint", end=0) if accepts(question.constraint, text) else None
    cut = first_stop(text, question)
    value = text if cut is None else text[:cut]
    within = first_tokens(value, question.max_tokens)
    if within is not None and within != value:
        return Taken(text=within, finish="length", end=0)
    return Taken(text=value, finish="stop", end=0)
