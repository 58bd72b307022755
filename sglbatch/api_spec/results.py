"""Values as the results of calls."""

from __future__ import annotations

from collections.abc import Sequence

from sglbatch.api_spec.first_token import Decision
from sglbatch.api_spec.matching import Taken
from sglbatch.api_spec.token_logprobs import Told
from sglbatch.api_spec.tokens import Counter
from sglbatch.types import Generate, Result, TextCall, TextChoices, TokenLogprob


def result_of(
    found: Taken, question: Generate | TextChoices, counter: Counter, *, request_id: int, means: str
) -> Result:
    """A value as its call's result.

    Args:
        counter: names the tokens whose log-probabilities were asked for.
        means: by which the value was had; a select's result names it.
    """
    is_choice = found.choice is not None
    most = (question.num_top_logprobs if isinstance(question, Generate) else None) or 0
    tops = [token.top[:most] for token in found.told] if most else []
    return Result(
        request_id=request_id,
        text="" if is_choice else found.text,
        finish_reason=found.finish,
        choice=found.choice,
        choice_logprobs=found.logprobs,
        output_logprobs=_token_logprobs(found.told, counter),
        output_top_logprobs=tuple(_token_logprobs(top, counter) for top in tops),
        means=means if is_choice else None,
    )


def _token_logprobs(told: Sequence[Told], counter: Counter) -> tuple[TokenLogprob, ...]:
    ids = [counter.token_id(token.piece, token.token_id) for token in told]
    return tuple(
        (token.logprob, token.piece.decode("utf-8", "replace") if token_id is None else token_id)
        for token, token_id in zip(told, ids, strict=True)
    )


def chosen(call: TextCall, decision: Decision) -> Taken:
    """The value of a select that its first token has decided."""
    assert isinstance(call.question, TextChoices)
    text = call.question.choices[decision.choice]
    return Taken(text=text, finish="choice", end=0, choice=decision.choice, logprobs=decision.logprobs)
