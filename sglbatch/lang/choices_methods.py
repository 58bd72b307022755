"""How a select decides from token log-probabilities: SGLang's three methods, beside our own ``exact``.

Source: the choices methods of SGLang's frontend language. They compare token by token, so they favour some lengths and
spellings; ``exact`` compares what each choice is worth as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglbatch.errors import SglbatchError
from sglbatch.types import ChoicesMethod, TokenLogprob


@dataclass(frozen=True, slots=True)
class NamedMethod:
    """What programs pass as ``choices_method``."""

    name: ChoicesMethod

    def __repr__(self) -> str:
        return self.name


exact: Final = NamedMethod("exact")
"""The choice's whole probability, what longer choices that begin with it take left out. The default."""
token_length_normalized: Final = NamedMethod("token_length_normalized")
"""The highest mean log-probability of a token."""
greedy_token_selection: Final = NamedMethod("greedy_token_selection")
"""Token by token, only the best go on; a choice that has ended goes on with its mean."""
unconditional_likelihood_normalized: Final = NamedMethod("unconditional_likelihood_normalized")
"""The highest mean of the tokens' log-probabilities less those that they have with nothing before them."""

METHODS: Final = (exact, token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)


def method_of(value: object) -> ChoicesMethod:
    """The method that a ``choices_method`` argument names; None is ``exact``.

    Raises:
        SglbatchError: ``invalid-argument``.
    """
    for method in METHODS:
        if value in (method, method.name):
            return method.name
    if value is None:
        return exact.name
    known = ", ".join(method.name for method in METHODS)
    raise SglbatchError("invalid-argument", f"there is no choices_method {value!r}", hint=f"choose from: {known}")


def decide(
    method: ChoicesMethod,
    token_logprobs: Sequence[Sequence[TokenLogprob]],
    unconditional: Sequence[Sequence[TokenLogprob]] = (),
) -> int:
    """The index of the chosen alternative; the first of equal ones."""
    conditional = [_values(option) for option in token_logprobs]
    if method == "greedy_token_selection":
        return _greedy(_matrix(conditional))
    if method == "unconditional_likelihood_normalized":
        return _argmax(_differences(conditional, [_values(option) for option in unconditional]))
    assert method == "token_length_normalized", f"{method} is not decided from token log-probabilities"
    return _argmax([_mean(option) for option in conditional])


def meta_info(
    method: ChoicesMethod,
    token_logprobs: Sequence[Sequence[TokenLogprob]],
    unconditional: Sequence[Sequence[TokenLogprob]],
) -> dict[str, Any]:
    """What ``get_meta_info`` says of the decision, under SGLang's names."""
    conditional = [_values(option) for option in token_logprobs]
    meta: dict[str, Any] = {
        "normalized_prompt_logprobs": [_mean(option) for option in conditional],
        "input_token_logprobs": [list(option) for option in token_logprobs],
        "output_token_logprobs": [[] for _ in token_logprobs],
    }
    if method == "greedy_token_selection":
        meta["greedy_logprob_matrix"] = _matrix(conditional)
    if method == "unconditional_likelihood_normalized":
        without = [_values(option) for option in unconditional]
        meta["unconditional_token_logprobs"] = [list(option) for option in unconditional]
        meta["normalized_unconditional_prompt_logprobs"] = _differences(conditional, without)
    return meta


def _values(option: Sequence[TokenLogprob]) -> list[float]:
    """A first token with nothing before it counts 0."""
    return [0.0 if logprob is None else logprob for logprob, _ in option]


def _differences(conditional: Sequence[list[float]], unconditional: Sequence[list[float]]) -> list[float]:
    return [
        _mean([with_prompt - alone for with_prompt, alone in zip(a, b, strict=True)])
        for a, b in zip(conditional, unconditional, strict=True)
    ]


def _matrix(options: Sequence[list[float]]) -> list[list[float]]:
    longest = max(map(len, options))
    return [option + [_mean(option)] * (longest - len(option)) for option in options]


def _greedy(matrix: Sequence[Sequence[float]]) -> int:
    left = list(range(len(matrix)))
    for column in zip(*matrix, strict=True):
        best = max(column[i] for i in left)
        left = [i for i in left if column[i] == best]
    return left[0]


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
