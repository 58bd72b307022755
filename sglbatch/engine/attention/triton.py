"""Attention over a flat batch with our Triton kernels; the same interface as ``attention.torch``.

Shape suffixes as in ``kernels``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from sglbatch.engine.attention.kernels import attend_tiles, merge_parts_kernel
from sglbatch.engine.attention.torch import AttentionKind
from sglbatch.engine.attention.worklist import CHUNK, TILE_WIDTH, Ints32, WorkList, make_work_list
from sglbatch.engine.batch import FlatBatch
from sglbatch.engine.transfer import upload

WORK_ARRAYS: Final = tuple(f.name for f in fields(WorkList) if f.name != "num_parts")

# Measured on an H200 with 32 / 8 heads of 128: see benchmarks/results.
HEIGHTS: Final = ("wide", "middle", "narrow")
WIDE_PAIRS: Final = 128
MIDDLE_PAIRS: Final = 64
WIDE_LAUNCH: Final = {"BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "RUN_BLOCK": 64, "RUN_STAGES": 2}
MIDDLE_LAUNCH: Final = {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "RUN_BLOCK": 64, "RUN_STAGES": 2}
NARROW_LAUNCH: Final = {"BLOCK_N": 32, "num_warps": 1, "num_stages": 6, "RUN_BLOCK": 32, "RUN_STAGES": 1}
TENSOR_COPIES: Final = (9, 0)
"""The compute capability from which on a GPU has a tensor copy engine."""
COPY_ALIGN: Final = 16
"""Bytes of a slot that it copies come in multiples of this."""
MIDDLE_PROGRAMS: Final = 2
"""For each multiprocessor, where middle tiles are taken in turn."""
HEAD_BYTES: Final = 256
"""The largest head for which two wide tiles are worked on at a time on a multiprocessor; of larger ones fewer slots are
loaded at once."""
TWO_TILES_REGISTERS: Final = 128
"""Of a thread, so that two wide tiles have room, or one and narrow ones: it costs some spilling and gains more."""


@dataclass(frozen=True)
class Beside:
    """Wide tiles, which arithmetic bounds, run beside the others, which memory bounds.

    Multiprocessors take a kernel's programs before those of a kernel that was launched later. So wide tiles are
    launched first, as one program for each multiprocessor that takes its tiles one after another, and the other heights
    find room. Middle tiles are taken in turn too: a captured step has room for many more than most steps have.

    Attributes:
        stream: for the other heights; None: they follow.
        num_programs: the device's multiprocessors.
    """

    stream: torch.cuda.Stream | None
    num_programs: int


class TritonAttention:
    """The attention of one flat batch on a GPU (or under Triton's interpreter); made once a step.

    Args:
        ints: int32 tensors named as in ``batch_arrays``.
        num_parts: rows of the parts' buffer.
        group: query heads for each key/value head.
        beside: how wide tiles run beside the others; None: one height after the other.
    """

    def __init__(
        self, ints: Mapping[str, torch.Tensor], *, num_parts: int, group: int, beside: Beside | None = None
    ) -> None:
        self._ints = ints
        self._beside = beside
        self._group = group
        self._num_parts = num_parts
        self.input_ids_T = ints["input_ids"]
        self.positions_T = ints["positions"]
        self.write_slots_T = ints["write_slots"]
        self.rows_R = ints["rows"]
        self._lse: torch.Tensor | None = None

    @staticmethod
    def of(
        batch: FlatBatch,
        device: torch.device,
        *,
        group: int,
        rows: Sequence[int] = (),
        merge_all: bool = False,
        with_runs: bool,
    ) -> TritonAttention:
        """Uploads what the kernels need to know of a batch.

        Args:
            rows: flat rows whose final states are needed.
            merge_all: some layer has attention sinks.
            with_runs: see ``loads_runs``.
        """
        works = list_works(batch, group=group, merge_all=merge_all, with_runs=with_runs)
        ints = upload(batch_arrays(batch, works, rows), device)
        return TritonAttention(ints, num_parts=works.num_parts, group=group)

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
        parts_PQE = q_TQD.new_empty(self._num_parts, Q, E)
        if self._lse is None or self._lse.shape[1] != Q:
            self._lse = torch.empty(self._num_parts, Q, dtype=torch.float32, device=q_TQD.device)
        pool, beside = (k_NKD, v_NKD), self._beside
        other = None if beside is None else beside.stream
        if other is not None:
            other.wait_stream(torch.cuda.current_stream())
        num_programs = 0 if beside is None else beside.num_programs
        self._attend_tiles("wide", q_TQD, pool, kind, parts_PQE, num_in_turn=num_programs)
        with torch.cuda.stream(other):
            self._attend_tiles("narrow", q_TQD, pool, kind, parts_PQE)
            self._attend_tiles("middle", q_TQD, pool, kind, parts_PQE, num_in_turn=num_programs * MIDDLE_PROGRAMS)
        if other is not None:
            torch.cuda.current_stream().wait_stream(other)
        self._merge(parts_PQE, sinks_Q)
        return parts_PQE[:T]

    def _merge(self, parts_PQE: torch.Tensor, sinks_Q: torch.Tensor | None) -> None:
        num_rows, (_, Q, E) = len(self._ints["merge_rows"]), parts_PQE.shape
        if not num_rows:
            return
        q_block = min(8, triton.next_power_of_2(Q))
        merge_parts_kernel[(num_rows, triton.cdiv(Q, q_block))](
            parts_PQE,
            self._lse,
            self._ints["merge_rows"],
            self._ints["merge_first"],
            self._ints["merge_parts"],
            self._lse if sinks_Q is None else sinks_Q,
            Q=Q,
            E=E,
            Q_BLOCK=q_block,
            E_PAD=triton.next_power_of_2(E),
            HAS_SINKS=sinks_Q is not None,
            num_warps=4,
        )

    def _attend_tiles(
        self,
        height: str,
        q_TQD: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        kind: AttentionKind,
        parts_PQE: torch.Tensor,
        *,
        num_in_turn: int = 0,
    ) -> None:
        """Launches one height; ``num_in_turn`` programs take its tiles in turn, or each has one of its own (0)."""
        k_NKD, v_NKD = pool
        ints, tiles = self._ints, self._ints[f"{height}_tiles"]
        num_tiles = len(tiles) // TILE_WIDTH
        if not num_tiles:
            return
        assert kind.window is None or "kv_positions" in ints, "a window needs positions"
        K, D, E = k_NKD.shape[1], k_NKD.shape[2], v_NKD.shape[2]
        launch = tile_launch(height, max(D, E) * k_NKD.element_size(), q_TQD.device)
        D_PAD, E_PAD = (max(16, triton.next_power_of_2(size)) for size in (D, E))
        has_runs = height != "narrow" and "runs" in ints
        k_blocks, v_blocks = (
            _in_blocks(pool_NKD, launch["RUN_BLOCK"], size) if has_runs else pool_NKD
            for pool_NKD, size in ((k_NKD, D_PAD), (v_NKD, E_PAD))
        )
        attend_tiles[(num_in_turn or K * num_tiles,)](
            q_TQD,
            k_NKD,
            v_NKD,
            k_blocks,
            v_blocks,
            parts_PQE,
            self._lse,
            tiles,
            ints[f"num_{height}"],
            ints["slots"],
            ints.get("kv_positions", ints["slots"]),
            ints.get("runs", ints["slots"]),
            ints["seen_from"],
            ints["seen_until"],
            ints["positions"],
            kind.scaling,
            kind.softcap or 1.0,
            kind.window or 0,
            q_TQD.stride(0),
            K=K,
            G=self._group,
            D=D,
            E=E,
            D_PAD=D_PAD,
            E_PAD=E_PAD,
            CHUNK=CHUNK,
            BLOCK_M=tile_pairs(self._group)[height],
            HAS_SOFTCAP=kind.softcap is not None,
            HAS_WINDOW=kind.window is not None,
            HAS_RUNS=has_runs,
            TILE_WIDTH=TILE_WIDTH,
            IN_TURN=num_in_turn > 0,
            **launch,
        )


def _in_blocks(pool_NKD: torch.Tensor, num_slots: int, width: int) -> TensorDescriptor:
    N, K, D = pool_NKD.shape
    return TensorDescriptor(pool_NKD, shape=[N, K * D], strides=[K * D, 1], block_shape=[num_slots, width])


def tile_pairs(group: int) -> dict[str, int]:
    """Heights of tiles, in (row, query head) pairs: a whole number of rows, and enough for a matrix product."""
    narrow = max(16, int(triton.next_power_of_2(group)))
    return {"wide": max(WIDE_PAIRS, narrow), "middle": max(MIDDLE_PAIRS, narrow), "narrow": narrow}


def tile_launch(height: str, head_bytes: int, device: torch.device) -> dict[str, int]:
    """How tiles are launched."""
    launch = {"wide": WIDE_LAUNCH, "middle": MIDDLE_LAUNCH, "narrow": NARROW_LAUNCH}[height]
    head_bytes = int(triton.next_power_of_2(head_bytes))
    for block in ("BLOCK_N", "RUN_BLOCK"):
        launch = launch | {block: max(16, launch[block] * HEAD_BYTES // max(HEAD_BYTES, head_bytes))}
    if height == "wide" and device.type == "cuda" and head_bytes <= HEAD_BYTES:
        launch["maxnreg"] = TWO_TILES_REGISTERS
    return launch


def loads_runs(pools_NKD: Iterable[torch.Tensor]) -> bool:
    """Whether runs of slots of all these pools are loaded as blocks.

    On GPUs without a tensor copy engine Triton addresses each element of a block, with too few registers.
    """
    return all(_has_tensor_copies(pool.device) and pool[0].nbytes % COPY_ALIGN == 0 for pool in pools_NKD)


def _has_tensor_copies(device: torch.device) -> bool:
    if device.type == "cpu":  # Triton's interpreter
        return True
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= TENSOR_COPIES


def list_works(batch: FlatBatch, *, group: int, merge_all: bool = False, with_runs: bool = True) -> WorkList:
    """The work list with this module's tile heights."""
    pairs = {f"{height}_pairs": pairs for height, pairs in tile_pairs(group).items()}
    return make_work_list(batch, group=group, merge_all=merge_all, with_runs=with_runs, **pairs)


def batch_arrays(batch: FlatBatch, works: WorkList, rows: Sequence[int]) -> dict[str, Ints32]:
    """All that a step's kernels read, by name."""
    arrays = {name: getattr(works, name) for name in WORK_ARRAYS}
    num_tiles = {f"num_{height}": np.array([len(arrays[f"{height}_tiles"])], dtype=np.int32) for height in HEIGHTS}
    return {name: array.ravel() for name, array in arrays.items() if array is not None} | {
        "input_ids": batch.input_ids.astype(np.int32),
        "write_slots": batch.write_slots.astype(np.int32),
        "rows": np.array(rows, dtype=np.int32),
        **num_tiles,
    }
