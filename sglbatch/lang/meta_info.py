"""What ``get_meta_info`` says of an answer, under SGLang's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglbatch.lang import choices_methods
from sglbatch.lang.calls import Choices
from sglbatch.lang.variables import Meta, Variable
from sglbatch.types import Generate, Result, TokenLogprob

TokenText = Callable[[int], str]


def meta_info(question: Generate | Choices, result: Result, token_text: TokenText | None) -> dict[str, Any]:
    """Token counts and finish reason; log-probabilities where the call asked for them.

    Args:
        token_text: gives the text of a token, for log-probabilities that come with it; None: they come without.
    """
    meta: dict[str, Any] = {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.generated_tokens,
        "cached_tokens": result.cached_tokens,
        "finish_reason": {"type": result.finish_reason},
    }
    return meta | (
        _of_choices(question, result) if isinstance(question, Choices) else _of_text(question, result, token_text)
    )


def _of_choices(question: Choices, result: Result) -> dict[str, Any]:
    if question.method != "exact":
        return choices_methods.meta_info(question.method, result.choice_token_logprobs, result.unconditional_logprobs)
    logprobs = result.choice_logprobs
    if logprobs is None:
        return {}  # a backend that only names the choice
    return {
        "choice_logprobs": dict(zip(question.choices, logprobs, strict=True)),
        "normalized_prompt_logprobs": list(logprobs),
    }


def _of_text(question: Generate, result: Result, token_text: TokenText | None) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    if question.num_top_logprobs is None:
        return meta
    meta["output_token_logprobs"] = _entries(result.output_logprobs, token_text)
    if question.num_top_logprobs:
        meta["output_top_logprobs"] = [_entries(top, token_text) for top in result.output_top_logprobs]
    if question.input_logprobs_from is not None:
        meta["input_token_logprobs"] = _entries(result.input_logprobs, token_text)
        known = [logprob for logprob, _ in result.input_logprobs if logprob is not None]
        meta["normalized_prompt_logprobs"] = sum(known) / len(known) if known else None
    return meta


def _entries(
    logprobs: tuple[TokenLogprob, ...], token_text: TokenText | None
) -> list[tuple[float | None, int | None, str | None]]:
    """A token that is known by its text only has it whether it was asked for or not: nothing else names it."""
    return [
        (logprob, None, token)
        if isinstance(token, str)
        else (logprob, token, token_text(token) if token_text else None)
        for logprob, token in logprobs
    ]


def kept_logprobs(variable: Variable, token_text: TokenText) -> list[Any] | None:
    """What ``--save logprobs`` keeps of a variable: ``{"text", "logprob"}`` of each generated token, or of each choice.

    The token that ended an answer is among its tokens. Of several answers a list of these; None where the model was not
    asked, or does not tell.
    """
    if variable.meta is None:
        return None
    if isinstance(variable.meta, list):
        several = [_kept(meta, variable, token_text) for meta in variable.meta]
        return several if any(one is not None for one in several) else None
    return _kept(variable.meta, variable, token_text)


def _kept(meta: Meta, variable: Variable, token_text: TokenText) -> list[dict[str, Any]] | None:
    if variable.generated:
        if "output_token_logprobs" not in meta:
            return None
        entries = meta["output_token_logprobs"]
        return [{"text": token_text(i) if text is None else text, "logprob": p} for p, i, text in entries]
    if "normalized_prompt_logprobs" not in meta:
        return None
    choices, scores = variable.var_type.choices, meta["normalized_prompt_logprobs"]
    return [{"text": text, "logprob": p} for text, p in zip(choices, scores, strict=True)]
