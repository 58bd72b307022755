"""Drawing on a CPU, and the oracle of the kernel.

A token's *distance* is (largest logit - its own) / temperature: minus the logarithm of its probability over the largest
one. Filters keep the nearest tokens: all with a smaller rank than a last one, and the first few of that rank.

Shape suffixes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from sglbatch.engine.draw.race import exponentials

ROWS_AT_ONCE: Final = 8
"""Rows of a CPU's block: their arrays stay in its cache."""
FIRST_CANDIDATES: Final = 512
MORE_CANDIDATES: Final = 8192
"""Tokens that are looked at for the edge of top-p, and then, before all are sorted."""
RANK_SHIFT: Final = 3
"""Distances count as equal from here on: rank = bits of the float >> 3, 10^-6 of the distance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """How rows are drawn, an array for each number; all on the logits' device.

    Args:
        rows_R: int32, rows of the logits.
        keys_R2: int32, see ``race.race_keys``.
        temperature_R, top_p_R, min_p_R: fp32.
        top_k_R: int32; the vocabulary's size where it is off.
        filters: some row has a filter.
    """

    rows_R: torch.Tensor
    keys_R2: torch.Tensor
    temperature_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor
    filters: bool


def draw_tokens(logits_RV: torch.Tensor, ways: Ways) -> torch.Tensor:
    """Int64, the token of each of ``ways.rows_R``: after temperature, top-k, top-p and min-p in this order.

    Args:
        logits_RV: fp32; -inf is a token that cannot come.
    """
    parts = []
    for begin in range(0, len(ways.rows_R), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        distance_RV = logits_RV[ways.rows_R[part].long()]
        distance_RV.sub_(distance_RV.amax(dim=-1, keepdim=True)).div_(-ways.temperature_R[part, None])
        weight_RV = torch.exp(-distance_RV)
        if ways.filters:
            weight_RV *= _kept(distance_RV, weight_RV, ways, part)
        weight_RV /= exponentials(ways.keys_R2[part], logits_RV.shape[1])
        parts.append(weight_RV.numpy().argmax(axis=-1))  # five times as fast as torch's
    return torch.from_numpy(np.concatenate(parts))


def _kept(distance_RV: torch.Tensor, weight_RV: torch.Tensor, ways: Ways, part: slice) -> torch.Tensor:
    """Bool [R, V]: what the filters leave."""
    kept_RV = weight_RV >= ways.min_p_R[part, None]
    vocab_size = distance_RV.shape[1]
    top_k_R1, top_p_R1 = ways.top_k_R[part, None], ways.top_p_R[part, None]
    if (top_k_R1 == vocab_size).all() and (top_p_R1 == 1.0).all():
        return kept_RV
    rank_RV = distance_RV.view(torch.int32) >> RANK_SHIFT
    last_R1, num_last_R1 = _edge(rank_RV, weight_RV.sum(dim=-1, keepdim=True), top_k_R1, top_p_R1)
    is_last_RV = rank_RV == last_R1
    if (is_last_RV.sum(dim=-1, keepdim=True) > num_last_R1).any():
        is_last_RV &= is_last_RV.cumsum(dim=-1) <= num_last_R1
    return kept_RV & ((rank_RV < last_R1) | is_last_RV)


def _edge(
    rank_RV: torch.Tensor, total_R1: torch.Tensor, top_k_R1: torch.Tensor, top_p_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last rank that top-k and top-p leave, int32 [R, 1], and how many tokens of it.

    Args:
        total_R1: all tokens' weights together.
    """
    vocab_size = rank_RV.shape[1]
    by_k_R1, by_p_R1 = top_k_R1 < vocab_size, top_p_R1 < 1.0
    largest_k = int(torch.where(by_k_R1, top_k_R1, 0).max())
    for wanted in (max(FIRST_CANDIDATES, largest_k), max(MORE_CANDIDATES, largest_k), vocab_size):
        num = min(wanted, vocab_size)
        some = num < vocab_size
        rank_RC = (rank_RV.topk(num, dim=-1, largest=False) if some else rank_RV.sort(dim=-1)).values
        mass_RC = torch.exp(-(rank_RC << RANK_SHIFT).view(torch.float32)).cumsum(dim=-1)
        place_R1 = (torch.where(by_k_R1, top_k_R1, vocab_size) - 1).clamp_(max=num - 1).long()
        wanted_R1 = top_p_R1 * torch.where(by_k_R1, mass_RC.gather(1, place_R1), total_R1)
        if (by_k_R1 | (by_p_R1 & (mass_RC[:, -1:] >= wanted_R1)) | (num == vocab_size) | ~by_p_R1).all():
            break
    nucleus_R1 = torch.minimum(torch.searchsorted(mass_RC, wanted_R1), place_R1)
    place_R1 = torch.where(by_p_R1, nucleus_R1, place_R1)
    last_R1 = rank_RC.gather(1, place_R1)
    num_last_R1 = place_R1 + 1 - (rank_RC < last_R1).sum(dim=-1, keepdim=True)
    # a row with neither filter has its edge behind everything
    is_free_R1 = ~(by_k_R1 | by_p_R1)
    return last_R1.masked_fill(is_free_R1, torch.iinfo(torch.int32).max), num_last_R1
