"""The prompt tokens of a row's first call, as it would be sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from sglbatch.api_spec import bodies, ways
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.request_tokens import prompt_of_body, prompt_tokens
from sglbatch.api_spec.tokens import Counter
from sglbatch.types import NextAsk, TextCall

UNSURE_MEANS: Final = "a form that nothing enforces may have to be asked for in another way"
BILLED_SCHEMA: Final = "OpenAI does not say how a schema is billed"


def count_first_calls(
    calls: Iterable[TextCall], model: ApiModel, counter: Counter, *, batch: bool = False
) -> tuple[int, str | None]:
    """(tokens of all, why that is a guess; None: it is what the endpoint will say).

    Args:
        batch: they go in batches.
    """
    total, guesses = 0, {counter.guess: None}
    for call in calls:
        tokens, guess = _first_call(call, model, counter, batch=batch)
        total += tokens
        guesses[guess] = None
    return total, "; ".join(guess for guess in guesses if guess is not None) or None


def _first_call(call: TextCall, model: ApiModel, counter: Counter, *, batch: bool) -> tuple[int, str | None]:
    call = replace(call, following=() if call.ahead_tokens == 0 else ways.joinable(call))
    if not ways.asks_of(call.following):
        call = replace(call, following=())
    means = ways.first_means(call, model, batch=batch)
    if means not in (ways.BY_FIELD, ways.BY_FIELDS):
        return prompt_tokens(call, model, counter), None if means == ways.BY_TEXT else UNSURE_MEANS
    asks = [NextAsk(name=call.name, question=call.question), *ways.asks_of(call.following)]
    whole = (asks[0], *call.following)
    last = max(i for i, part in enumerate(whole) if isinstance(part, NextAsk))
    outgoing = bodies.fields(call, asks, whole[: last + 1], model, max_tokens=0, seed=0)
    return prompt_of_body(outgoing.body, model, counter), BILLED_SCHEMA if model.family.schema_in_prompt else None
