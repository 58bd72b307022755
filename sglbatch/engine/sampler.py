"""From logits to tokens.

Shape suffixes: R rows, V vocabulary, W = ceil(V / 32) mask words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from sglbatch.engine.transfer import to_device
from sglbatch.types import TokenLogprob

MASK_ROWS = 512
"""Rows whose masks are applied at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one row's token is drawn.

    Args:
        temperature: 0 is greedy.
        uniform: the row's random number in [0, 1).
        mask_W: int32 bitmask of allowed tokens, or None for all.
        penalties: token id -> what is taken off its logit.
        banned: tokens that may not come.
        num_top_logprobs: None asks for the token alone; else for log-probabilities too, see ``Drawn``.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    uniform: float = 0.0
    mask_W: npt.NDArray[np.int32] | None = None
    penalties: Mapping[int, float] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    num_top_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def filters(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


GREEDY = Sampling(temperature=0.0)
"""The most probable token, nothing else asked."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token with log-probabilities under the model's own distribution: its own, and the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...]


def draw(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> list[int | Drawn]:
    """One token a row, with log-probabilities where the row asks for them. ``logits_RV`` as for ``sample``."""
    asked = [i for i, s in enumerate(samplings) if s.num_top_logprobs is not None]
    logprobs = dict(zip(asked, torch.log_softmax(logits_RV[asked], dim=-1), strict=True)) if asked else {}
    drawn: list[int | Drawn] = list(sample(logits_RV, samplings))
    for i, logprobs_V in logprobs.items():
        token_id, num_top = drawn[i], samplings[i].num_top_logprobs
        assert isinstance(token_id, int) and num_top is not None
        top = logprobs_V.topk(num_top)
        pairs = tuple(zip(top.values.tolist(), top.indices.tolist(), strict=True))
        drawn[i] = Drawn(token_id, float(logprobs_V[token_id]), pairs)
    return drawn


def sample(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> list[int]:
    """One token a row. ``logits_RV`` is fp32 and may be changed."""
    tokens: list[int] = sample_tokens(logits_RV, samplings).tolist()
    return tokens


def sample_tokens(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """As ``sample``, int64 [R] on the logits' device."""
    if all(s is GREEDY for s in samplings):
        return logits_RV.argmax(dim=-1)
    for i, sampling in enumerate(samplings):
        if sampling.penalties or sampling.banned:
            _adjust(logits_RV[i], sampling)
    _apply_masks(logits_RV, samplings)
    tokens = logits_RV.argmax(dim=-1)
    for filters in (False, True):  # apart, since they walk the vocabulary in different orders
        drawn = [i for i, s in enumerate(samplings) if not s.greedy and s.filters == filters]
        if drawn:
            rows = to_device(drawn, logits_RV.device)
            tokens[rows] = _draw(logits_RV[rows], [samplings[i] for i in drawn], filters=filters)
    return tokens


def _adjust(logits_V: torch.Tensor, sampling: Sampling) -> None:
    if sampling.penalties:
        logits_V[list(sampling.penalties)] -= torch.tensor(list(sampling.penalties.values()), device=logits_V.device)
    if sampling.banned:
        logits_V[list(sampling.banned)] = float("-inf")


def _apply_masks(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    masked = [(i, s.mask_W) for i, s in enumerate(samplings) if s.mask_W is not None]
    if not masked:
        return
    distinct = {id(mask): mask for _, mask in masked}
    place = {key: i for i, key in enumerate(distinct)}
    words_MW = to_device(np.stack(list(distinct.values())), logits_RV.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    allowed_MV = ((words_MW[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits_RV.shape[1]]
    for begin in range(0, len(masked), MASK_ROWS):
        part = masked[begin : begin + MASK_ROWS]
        rows = to_device([i for i, _ in part], logits_RV.device)
        allowed_RV = allowed_MV[to_device([place[id(mask)] for _, mask in part], logits_RV.device)]
        logits_RV[rows] = logits_RV[rows].masked_fill(~allowed_RV, float("-inf"))


def _draw(logits_RV: torch.Tensor, samplings: Sequence[Sampling], *, filters: bool) -> torch.Tensor:
    """Inverse of the cumulative distribution, after temperature, top-k, top-p and min-p in this order."""
    device = logits_RV.device
    temperature_R = to_device([s.temperature for s in samplings], device)
    probs_RV = torch.softmax(logits_RV / temperature_R[:, None], dim=-1).double()
    order_RV: torch.Tensor | None = None
    if filters:
        probs_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
        probs_RV = _filtered(probs_RV, samplings)
    cumulative_RV = probs_RV.cumsum(dim=-1)
    uniform_R = to_device(np.array([s.uniform for s in samplings]), device)
    threshold_R1 = (uniform_R * cumulative_RV[:, -1])[:, None]
    index_R1 = torch.searchsorted(cumulative_RV, threshold_R1, right=True)
    last_R1 = (probs_RV > 0).cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    index_R1 = torch.minimum(index_R1, last_R1)
    return (index_R1 if order_RV is None else order_RV.gather(1, index_R1)).squeeze(1)


def _filtered(probs_RV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Zeroes what the filters take out of descending probabilities; the most probable token always stays."""
    device = probs_RV.device
    vocab_size = probs_RV.shape[1]
    top_k_R1 = to_device([s.top_k if s.top_k > 0 else vocab_size for s in samplings], device)[:, None]
    top_p_R1 = to_device(np.array([s.top_p for s in samplings]), device)[:, None]
    min_p_R1 = to_device(np.array([s.min_p for s in samplings]), device)[:, None]
    probs_RV = probs_RV.masked_fill(torch.arange(vocab_size, device=device) >= top_k_R1, 0.0)
    probs_RV = probs_RV / probs_RV.sum(dim=-1, keepdim=True)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    drop_RV = (before_RV >= top_p_R1) | (probs_RV < min_p_R1 * probs_RV[:, :1])
    drop_RV[:, 0] = False
    return probs_RV.masked_fill(drop_RV, 0.0)


def score(logits_RV: torch.Tensor, targets: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities of each row's target tokens under the unmodified distribution."""
    values = iter(score_targets(logits_RV, targets).tolist())
    return [[next(values) for _ in tokens] for tokens in targets]


def score_targets(logits_RV: torch.Tensor, targets: Sequence[Sequence[int]]) -> torch.Tensor:
    """As ``score``, all rows' targets one after another, fp32 [sum of lens] on the logits' device."""
    rows = to_device([i for i, tokens in enumerate(targets) for _ in tokens], logits_RV.device)
    tokens_S = to_device([t for tokens in targets for t in tokens], logits_RV.device)
    lse_R = torch.logsumexp(logits_RV.float(), dim=-1)
    return logits_RV[rows, tokens_S].float() - lse_R[rows]
