"""From logits to tokens.

Shape suffixes: R rows, V vocabulary, W = ceil(V / 32) mask words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one row's token is drawn.

    Args:
        temperature: 0 is greedy.
        uniform: the row's random number in [0, 1).
        mask_W: int32 bitmask of allowed tokens, or None for all.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    uniform: float = 0.0
    mask_W: npt.NDArray[np.int32] | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def filters(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


def sample(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> list[int]:
    """One token a row. ``logits_RV`` is fp32 and may be changed."""
    _apply_masks(logits_RV, samplings)
    tokens = logits_RV.argmax(dim=-1)
    for filters in (False, True):  # apart, since they walk the vocabulary in different orders
        drawn = [i for i, s in enumerate(samplings) if not s.greedy and s.filters == filters]
        if drawn:
            tokens[drawn] = _draw(logits_RV[drawn], [samplings[i] for i in drawn], filters=filters)
    result: list[int] = tokens.tolist()
    return result


def _apply_masks(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    masked = [(i, s.mask_W) for i, s in enumerate(samplings) if s.mask_W is not None]
    if not masked:
        return
    rows = [i for i, _ in masked]
    words_RW = np.stack([mask for _, mask in masked])
    bits = np.unpackbits(words_RW.view(np.uint8), axis=1, bitorder="little", count=logits_RV.shape[1])
    allowed_RV = torch.from_numpy(bits.astype(bool)).to(logits_RV.device)
    logits_RV[rows] = logits_RV[rows].masked_fill(~allowed_RV, float("-inf"))


def _draw(logits_RV: torch.Tensor, samplings: Sequence[Sampling], *, filters: bool) -> torch.Tensor:
    """Inverse of the cumulative distribution, after temperature, top-k, top-p and min-p in this order."""
    device = logits_RV.device
    temperature_R = torch.tensor([s.temperature for s in samplings], device=device)
    probs_RV = torch.softmax(logits_RV / temperature_R[:, None], dim=-1).double()
    order_RV: torch.Tensor | None = None
    if filters:
        probs_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
        probs_RV = _filtered(probs_RV, samplings)
    cumulative_RV = probs_RV.cumsum(dim=-1)
    uniform_R = torch.tensor([s.uniform for s in samplings], dtype=torch.float64, device=device)
    threshold_R1 = (uniform_R * cumulative_RV[:, -1])[:, None]
    index_R1 = torch.searchsorted(cumulative_RV, threshold_R1, right=True)
    last_R1 = (probs_RV > 0).cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    index_R1 = torch.minimum(index_R1, last_R1)
    return (index_R1 if order_RV is None else order_RV.gather(1, index_R1)).squeeze(1)


def _filtered(probs_RV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Zeroes what the filters take out of descending probabilities; the most probable token always stays."""
    device = probs_RV.device
    vocab_size = probs_RV.shape[1]
    top_k_R1 = torch.tensor([[s.top_k if s.top_k > 0 else vocab_size] for s in samplings], device=device)
    top_p_R1 = torch.tensor([[s.top_p] for s in samplings], dtype=torch.float64, device=device)
    min_p_R1 = torch.tensor([[s.min_p] for s in samplings], dtype=torch.float64, device=device)
    probs_RV = probs_RV.masked_fill(torch.arange(vocab_size, device=device) >= top_k_R1, 0.0)
    probs_RV = probs_RV / probs_RV.sum(dim=-1, keepdim=True)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    drop_RV = (before_RV >= top_p_R1) | (probs_RV < min_p_R1 * probs_RV[:, :1])
    drop_RV[:, 0] = False
    return probs_RV.masked_fill(drop_RV, 0.0)


def score(logits_RV: torch.Tensor, targets: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities of each row's target tokens under the unmodified distribution."""
    logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    return [logprobs_RV[i, list(tokens)].tolist() for i, tokens in enumerate(targets)]
