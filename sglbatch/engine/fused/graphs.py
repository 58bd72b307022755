"""Captured forward passes of small steps: decoding rows, and runs of tokens.

A step is a few hundred kernel launches, which take the CPU longer than small steps take the GPU. A CUDA graph replays
them with one call. All that changes from step to step lies in integer buffers of fixed size, so one graph serves every
step of its *bucket* (rows, rounded up): missing rows, works and tiles are padded with empty ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from sglbatch.engine.attention.triton import HEIGHTS, Beside, TritonAttention, batch_arrays, list_works
from sglbatch.engine.attention.worklist import NO_TILE, TILE_WIDTH, Ints32
from sglbatch.engine.batch import FlatBatch
from sglbatch.engine.decision import IdsInFlight
from sglbatch.engine.fused.body import FusedBody
from sglbatch.engine.row_step import ROW_STEP, rounded_up
from sglbatch.engine.transfer import ALIGN, to_device

MAX_ROWS = 2048
SLOTS_FOR_ROW = 2048
"""Listed slots for which a graph has room, for each of its rows."""
RUNS_FOR_ROW = 4
"""Runs of slots for which there is room."""
LIMITED_FOR_ROW = 256
"""Of these, slots of works whose rows do not all see the same."""
SEEN = ("seen_from", "seen_until")
MIN_SHARE_OF_ROWS = 0.75
"""Of the rows that could decode, how many a step takes at least, however badly they fill the device."""

ABOUT_THE_SAME = 1.03
"""Costs of a row that differ by less are as good."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes of a graph's buffers.

    Padding rows are merged into the last, unused part. Parts that are merged may lie among the padding rows' outputs,
    which nobody reads.

    Args:
        with_runs: steps may list runs of slots.
    """

    num_rows: int
    group: int
    with_runs: bool = True

    @property
    def lens(self) -> dict[str, int]:
        """Length of each array, in the order of the buffer; ``slots`` is last, since only its used part is copied."""
        rows = self.num_rows
        wide = rows * self.group // 32 + self.num_shared
        narrow = rows + 256
        return {
            "input_ids": rows,
            "positions": rows,
            "write_slots": rows,
            "rows": rows,
            **{f"num_{height}": 1 for height in HEIGHTS},
            "wide_tiles": wide * TILE_WIDTH,
            "middle_tiles": self.num_shared * TILE_WIDTH,
            "narrow_tiles": narrow * TILE_WIDTH,
            "merge_rows": rows,
            "merge_first": rows + 1,
            "merge_parts": self.num_parts,
            **({"runs": rows * RUNS_FOR_ROW * 2} if self.with_runs else {}),
            "slots": rows * SLOTS_FOR_ROW,
        }

    @property
    def num_shared(self) -> int:
        """Shared works for which there is room: two levels of nodes with four rows each, say."""
        return self.num_rows // 2 + 32

    @property
    def num_limited(self) -> int:
        """Slots that not all rows of a work see, for which there is room."""
        return self.num_rows * LIMITED_FOR_ROW

    @property
    def num_parts(self) -> int:
        """The rows' outputs, and for each row its own part and those of four levels of nodes."""
        return 6 * self.num_rows + 1

    def fill(self, arrays: dict[str, Ints32], num_parts: int, scratch_slot: int) -> Ints32 | None:
        """The buffer's contents up to the last used slot, or None where the step does not fit."""
        lens = self.lens
        if num_parts >= self.num_parts or any(len(arrays[name]) > n for name, n in lens.items()):
            return None
        if len(arrays["seen_from"]) > self.num_limited:
            return None
        padding = {
            "write_slots": scratch_slot,
            **{f"{height}_tiles": NO_TILE for height in HEIGHTS},
            "merge_rows": self.num_parts - 1,
            "merge_first": int(arrays["merge_first"][-1]),
        }
        offsets = self.offsets
        used = offsets["slots"] + len(arrays["slots"])
        buffer = np.zeros(used, dtype=np.int32)
        for name, start in offsets.items():
            array = arrays[name]
            buffer[start : start + len(array)] = array
            if name in padding:
                buffer[start + len(array) : start + lens[name]] = padding[name]
        return buffer

    @property
    def offsets(self) -> dict[str, int]:
        """Where each array begins in the buffer."""
        offsets, end = {}, 0
        for name, n in self.lens.items():
            offsets[name] = end
            end += -(-n // ALIGN) * ALIGN
        return offsets


class Buffers:
    """What a bucket's graph reads of a step, on the device; at first a step without work.

    Attributes:
        ints: the arrays by name, see ``TritonAttention``.
    """

    def __init__(self, bucket: Bucket, device: torch.device, scratch_slot: int) -> None:
        self.bucket = bucket
        self._scratch_slot = scratch_slot
        lens, offsets = bucket.lens, bucket.offsets
        self._packed = torch.zeros(offsets["slots"] + lens["slots"], dtype=torch.int32, device=device)
        self._seen = torch.zeros(len(SEEN), bucket.num_limited, dtype=torch.int32, device=device)
        self.ints = {name: self._packed[start : start + lens[name]] for name, start in offsets.items()}
        self.ints |= dict(zip(SEEN, self._seen, strict=True))
        self.ints["write_slots"].fill_(scratch_slot)
        for height in HEIGHTS:
            self.ints[f"{height}_tiles"].fill_(NO_TILE)
        self.ints["merge_rows"].fill_(bucket.num_parts - 1)

    def put(self, arrays: dict[str, Ints32], num_parts: int) -> bool:
        """Copies a step's arrays to the device; False where it does not fit."""
        contents = self.bucket.fill(arrays, num_parts, self._scratch_slot)
        if contents is None:
            return False
        self._packed[: len(contents)].copy_(to_device(contents, self._packed.device))
        num_limited = len(arrays[SEEN[0]])
        if num_limited:
            seen = np.stack([arrays[name] for name in SEEN])
            self._seen[:, :num_limited].copy_(to_device(seen, self._seen.device))
        return True


class Captured:
    """One bucket's graph with its buffers."""

    def __init__(self, buffers: Buffers, body: FusedBody, *, beside: Beside, pool: Any) -> None:
        self.buffers = buffers
        bucket = buffers.bucket
        self.attention = attention = TritonAttention(
            buffers.ints, num_parts=bucket.num_parts, group=bucket.group, beside=beside
        )
        body(attention.input_ids_T, attention.positions_T, attention, None)  # compiles the kernels
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.states_RH = body(attention.input_ids_T, attention.positions_T, attention, None)


class StepGraphs:
    """Graphs by bucket, captured when first needed."""

    def __init__(
        self, body: FusedBody, *, group: int, device: torch.device, scratch_slot: int, with_runs: bool
    ) -> None:
        self._body = body
        self._group = group
        self._device = device
        self._scratch_slot = scratch_slot
        self._with_runs = with_runs
        num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        self._beside = Beside(torch.cuda.Stream(device), num_programs)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, Captured] = {}

    @property
    def max_rows(self) -> int:
        return MAX_ROWS

    def best_rows(self, num_ready: int) -> int:
        """How many of the rows that could decode a step should take, so that each of them costs least.

        A product of M rows is cut into tiles, and these into as many rounds as the device needs; a few rows that open
        another round make all of them dearer (on an H200 one of 1,664 rows costs 5% more a row than one of 1,536). The
        rows left out are in the next step. Of numbers that cost about the same the largest leaves out fewest.
        """
        most = min(num_ready, MAX_ROWS)
        sizes = range(ROW_STEP, rounded_up(most) + 1, ROW_STEP)
        costs = {
            rows: self._seconds[rounded_up(rows)] / rows
            for rows in (min(size, most) for size in sizes)
            if rows >= MIN_SHARE_OF_ROWS * most
        }
        limit = ABOUT_THE_SAME * min(costs.values(), default=0.0)
        return max((rows for rows, cost in costs.items() if cost <= limit), default=num_ready)

    def capture_all(self) -> None:
        """Times the products, then captures every bucket, the largest first so that the others fit into its memory."""
        assert self._seconds
        for num_rows in range(MAX_ROWS, 0, -ROW_STEP):
            self._capture(num_rows)

    def _capture(self, num_rows: int) -> Captured:
        captured = self._captured.get(num_rows)
        if captured is None:
            bucket = Bucket(num_rows, self._group, self._with_runs)
            buffers = Buffers(bucket, self._device, self._scratch_slot)
            captured = Captured(buffers, self._body, beside=self._beside, pool=self._pool)
            self._captured[num_rows] = captured
        return captured

    @cached_property
    def _seconds(self) -> dict[int, float]:
        """What one layer's products cost, by number of rows, measured."""
        return {rows: self._body.products_s(rows) for rows in range(ROW_STEP, MAX_ROWS + 1, ROW_STEP)}

    def run(self, batch: FlatBatch, ids: IdsInFlight | None = None) -> torch.Tensor | None:
        """Final hidden states [T, H], valid until the next run; None where the batch does not fit a graph."""
        num_rows = len(batch.input_ids)
        if num_rows > MAX_ROWS:
            return None
        works = list_works(batch, group=self._group, with_runs=self._with_runs)
        captured = self._capture(rounded_up(num_rows))
        if not captured.buffers.put(batch_arrays(batch, works, range(num_rows)), works.num_parts):
            return None
        if ids is not None:
            ids.put_into(captured.attention.input_ids_T)
        captured.graph.replay()
        return captured.states_RH[:num_rows]
