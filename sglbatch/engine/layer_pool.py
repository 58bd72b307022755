"""The KV pool of one layer.

Shape suffixes: N slots (the last one is scratch), K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sglbatch.engine.attention.torch import AttentionKind


class Attention(Protocol):
    """The attention of one flat batch: ``attention.torch`` or ``attention.triton``."""

    write_slots_T: torch.Tensor
    """Where the keys and values of the batch's tokens go."""

    def __call__(
        self,
        q_TQD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        kind: AttentionKind,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class LayerPool:
    """Keys and values of one layer, and the attention of the step that is running."""

    def __init__(self) -> None:
        self.k_NKD: torch.Tensor = torch.empty(0)
        self.v_NKD: torch.Tensor = torch.empty(0)
        self.attention: Attention | None = None
        self.num_query_heads = 0
        self.has_window = False
        self.has_sinks = False
        self.head_shapes: tuple[tuple[int, int], tuple[int, int]] | None = None
        """(K, D) of keys and of values, seen by the probe."""

    def write(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Puts the running step's keys and values into the pool, before its attention reads them."""
        assert self.attention is not None
        slots_T = self.attention.write_slots_T.long()
        self.k_NKD.index_copy_(0, slots_T, k_TKD)
        self.v_NKD.index_copy_(0, slots_T, v_TKD)

    def allocate(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        assert self.head_shapes is not None
        k_shape, v_shape = self.head_shapes
        self.k_NKD = torch.empty(num_slots + 1, *k_shape, dtype=dtype, device=device)
        self.v_NKD = torch.empty(num_slots + 1, *v_shape, dtype=dtype, device=device)
