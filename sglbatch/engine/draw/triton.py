"""Drawing on a GPU: one launch, nothing of the size of the logits is made."""

from __future__ import annotations

from typing import Final

import torch

from sglbatch.engine.draw.kernels import draw_kernel
from sglbatch.engine.draw.torch import Ways

BLOCK: Final = 4096
SEARCH_BLOCK: Final = 2048
NUM_WARPS: Final = 16


def draw_tokens(logits_RV: torch.Tensor, ways: Ways) -> torch.Tensor:
    """As ``draw.torch.draw_tokens``."""
    tokens_R = torch.empty(len(ways.rows_R), dtype=torch.int64, device=logits_RV.device)
    assert logits_RV.stride(1) == 1
    draw_kernel[(len(tokens_R),)](
        logits_RV,
        logits_RV.stride(0),
        logits_RV.shape[1],
        ways.rows_R,
        ways.keys_R2,
        ways.temperature_R,
        ways.top_k_R,
        ways.top_p_R,
        ways.min_p_R,
        tokens_R,
        HAS_FILTERS=ways.filters,
        BLOCK=BLOCK,
        SEARCH_BLOCK=SEARCH_BLOCK,
        num_warps=NUM_WARPS,
    )
    return tokens_R
