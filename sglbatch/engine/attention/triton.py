"""Attention over a flat batch with our Triton kernels; the same interface as ``attention.torch``.

Shape suffixes as in ``kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
import triton

from sglbatch.engine.attention.kernels import attend_tiles, merge_parts
from sglbatch.engine.attention.torch import AttentionKind
from sglbatch.engine.attention.worklist import WorkList, make_work_list
from sglbatch.engine.batch import FlatBatch
from sglbatch.engine.transfer import upload

WIDE_PAIRS = 128
WIDE_LAUNCH = {"BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
NARROW_LAUNCH = {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}


class TritonAttention:
    """The attention of one flat batch on a GPU (or under Triton's interpreter); made once a step.

    Args:
        group: query heads for each key/value head.
        rows: flat rows whose final states are needed.
    """

    def __init__(self, batch: FlatBatch, device: torch.device, *, group: int, rows: Sequence[int] = ()) -> None:
        self._group = group
        works = make_work_list(batch, group=group, wide_pairs=WIDE_PAIRS, narrow_pairs=narrow_pairs(group))
        self._num_parts = works.num_parts
        self._num_rows = len(batch.input_ids)
        arrays = {f.name: getattr(works, f.name) for f in fields(WorkList) if f.name != "num_parts"}
        arrays["input_ids"] = batch.input_ids.astype(np.int32)
        arrays["write_slots"] = batch.write_slots.astype(np.int32)
        arrays["rows"] = np.array(rows, dtype=np.int32)
        self._ints = upload(arrays, device)
        self.rows_R = self._ints["rows"]
        self.input_ids_T = self._ints["input_ids"]
        self.positions_T = self._ints["positions"]
        self.write_slots_T = self._ints["write_slots"]
        self._parts: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def write(self, k_NKD: torch.Tensor, v_NKD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Puts the batch's keys and values of one layer into the pool, before that layer's attention reads them."""
        k_NKD[self.write_slots_T] = k_TKD
        v_NKD[self.write_slots_T] = v_TKD

    def __call__(
        self,
        q_TQD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        kind: AttentionKind,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention output [T, Q, E] in q's dtype. ``q_TQD`` may have a row stride larger than Q * D."""
        T, Q, E = q_TQD.shape[0], q_TQD.shape[1], v_NKD.shape[2]
        if self._parts is None or self._lse is None or self._parts.shape[1:] != (Q, E):
            self._parts = q_TQD.new_empty(self._num_parts, Q, E)
            self._lse = torch.empty(self._num_parts, Q, dtype=torch.float32, device=q_TQD.device)
        self._attend_tiles(q_TQD, k_NKD, v_NKD, kind, wide=True)
        self._attend_tiles(q_TQD, k_NKD, v_NKD, kind, wide=False)
        out_TQE = q_TQD.new_empty(T, Q, E)
        q_block = min(8, triton.next_power_of_2(Q))
        merge_parts[(T, triton.cdiv(Q, q_block))](
            self._parts,
            self._lse,
            self._ints["row_first"],
            self._ints["row_parts"],
            self._lse if sinks_Q is None else sinks_Q,
            out_TQE,
            Q=Q,
            E=E,
            Q_BLOCK=q_block,
            E_PAD=triton.next_power_of_2(E),
            HAS_SINKS=sinks_Q is not None,
            num_warps=4,
        )
        return out_TQE

    def _attend_tiles(
        self, q_TQD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, kind: AttentionKind, *, wide: bool
    ) -> None:
        height = "wide" if wide else "narrow"
        tiles = self._ints[f"{height}_work"]
        if not len(tiles):
            return
        K, D, E = k_NKD.shape[1], k_NKD.shape[2], v_NKD.shape[2]
        ints = self._ints
        attend_tiles[(len(tiles), K)](
            q_TQD,
            k_NKD,
            v_NKD,
            self._parts,
            self._lse,
            tiles,
            ints[f"{height}_index"],
            ints["row"],
            ints["num_rows"],
            ints["slot"],
            ints["num_slots"],
            ints["causal"],
            ints["part"],
            ints["slots"],
            ints["kv_positions"],
            ints["positions"],
            kind.scaling,
            kind.softcap or 1.0,
            kind.window or 0,
            q_TQD.stride(0),
            K=K,
            G=self._group,
            D=D,
            E=E,
            D_PAD=max(16, triton.next_power_of_2(D)),
            E_PAD=max(16, triton.next_power_of_2(E)),
            BLOCK_M=WIDE_PAIRS if wide else narrow_pairs(self._group),
            HAS_SOFTCAP=kind.softcap is not None,
            HAS_WINDOW=kind.window is not None,
            **(WIDE_LAUNCH if wide else NARROW_LAUNCH),
        )


def narrow_pairs(group: int) -> int:
    """Height of the tiles of works with few rows: a whole number of rows, and enough for a matrix product."""
    return max(16, int(triton.next_power_of_2(group)))
