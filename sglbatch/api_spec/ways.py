"""By which means an endpoint is asked for the answer to a call. Pure: running and estimating go by the same rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sglbatch.api_spec import bodies
from sglbatch.api_spec.constraints import most_bytes
from sglbatch.api_spec.first_token import can_tell
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.tokens import Counter
from sglbatch.types import Following, Generate, NextAsk, TextCall, TextChoices

BY_TEXT: Final = "text"
BY_FITTING_TEXT: Final = "text that fits"
BY_FIELDS: Final = "fields by schema"
BY_FIELD: Final = "one field by schema"
BY_LOGPROBS: Final = "logprobs of choices"
BY_INSISTING: Final = "asked in words"

FIT_PROBES: Final = 2
"""Calls at a place of a template that try the cheaper means before it is seen whether it gives the answer."""
FIT_WINDOW: Final = 16

MOSTLY: Final = 0.75
"""The cheaper means comes first where it gives the answer so often: where it fails, both are paid for."""


def is_free(question: Generate | TextChoices) -> bool:
    """Any text will do."""
    return isinstance(question, Generate) and question.constraint is None


def has_schema(model: ApiModel) -> bool:
    """Answers can be held to a schema."""
    return model.family.schema and model.family.chat


def first_means(call: TextCall, model: ApiModel, *, batch: bool = False) -> str:
    """By what a call is asked first.

    Args:
        call: with what is taken ahead in ``following``.
        batch: in a batch, where a means that does not tell costs another wave, which may be a day.
    """
    if not batch and by_first_token(call, model):
        return BY_LOGPROBS
    return second_means(call, model)


def second_means(call: TextCall, model: ApiModel) -> str:
    """By what it is asked where the first token's log-probabilities are not known or did not tell."""
    free = is_free(call.question)
    if bodies.by_chat(call, model) and has_schema(model) and (call.following or not free):
        return BY_FIELDS if call.following else BY_FIELD
    return BY_TEXT if free else BY_FITTING_TEXT


def by_first_token(call: TextCall, model: ApiModel) -> bool:
    """Whether a select may be answered by the first token's log-probabilities: asked alone, at the beginning of the
    model's turn, among choices that first tokens tell apart."""
    question = call.question
    return (
        isinstance(question, TextChoices)
        and call.chat
        and not call.following
        and not call.prefix.strip()
        and model.family.num_top_logprobs > 0
        and can_tell(question)
    )


def asks_of(parts: Following) -> list[NextAsk]:
    return [part for part in parts if isinstance(part, NextAsk)]


def joinable(call: TextCall) -> Following:
    """What follows a call up to the first call that can only be asked by itself."""
    if bodies.stands_alone(NextAsk(name=call.name, question=call.question)):
        return ()
    for i, part in enumerate(call.following):
        if isinstance(part, NextAsk) and bodies.stands_alone(part):
            return call.following[:i]
    return call.following


def as_prompted(call: TextCall) -> TextCall:
    """The call as its text is sent. A space goes with the word behind it: alone it leads models astray."""
    if is_free(call.question) or not call.prefix.endswith(" "):
        return call
    return replace(call, prefix=call.prefix.rstrip(" "))


def most_tokens(question: Generate | TextChoices, counter: Counter) -> int:
    """The most tokens that an answer is generated with: one more than a form can have, which shows that it has ended.

    A token has at least one byte.
    """
    if isinstance(question, TextChoices):
        return max(counter.count(choice) for choice in question.choices) + 2
    longest = None if question.constraint is None else most_bytes(question.constraint)
    return question.max_tokens if longest is None else min(question.max_tokens, longest + 1)


def common_stops(call: TextCall) -> tuple[str, ...]:
    """Stop strings that can end the whole generation: the last question's, where nothing before it could meet them."""
    *before, last = [call.question, *(ask.question for ask in asks_of(call.following))]
    if not isinstance(last, Generate):
        return ()
    texts = [part for part in call.following if isinstance(part, str)]
    earlier = {stop for question in before if isinstance(question, Generate) for stop in question.stop}
    return tuple(s for s in last.stop if s not in earlier and not any(s in text for text in texts))
