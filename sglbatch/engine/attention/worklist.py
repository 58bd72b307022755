"""A flat batch's attention as a list of works for the kernels. Pure numpy.

Works are (rows x slots) rectangles or causal trapezoids. Wide ones (many rows) and narrow ones (few rows) are cut into
tiles of different heights. Every row of a work gives one part; ``row_parts`` lists each row's parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglbatch.engine.batch import FlatBatch

Ints32 = npt.NDArray[np.int32]

LONG_CONTEXT = 1024
"""Slots after which a work of few rows is cut, so that more programs share the reading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkList:
    """int32 arrays; W works, P parts, S slots, T rows, tiles of two heights.

    row, num_rows, slot, num_slots, causal, part: [W], see ``kernels.attend_tiles``.
    wide_work, wide_index, narrow_work, narrow_index: the tiles, as work and place within it.
    row_first: [T + 1]; row_parts: [P].
    slots, kv_positions: [S]; positions: [T].
    """

    row: Ints32
    num_rows: Ints32
    slot: Ints32
    num_slots: Ints32
    causal: Ints32
    part: Ints32
    wide_work: Ints32
    wide_index: Ints32
    narrow_work: Ints32
    narrow_index: Ints32
    row_first: Ints32
    row_parts: Ints32
    slots: Ints32
    kv_positions: Ints32
    positions: Ints32
    num_parts: int


def make_work_list(batch: FlatBatch, *, group: int, wide_pairs: int, narrow_pairs: int) -> WorkList:
    """Lists the works of a batch.

    Args:
        group: query heads for each key/value head.
        wide_pairs, narrow_pairs: (row, query head) pairs of a tile.
    """
    row, num_rows, slot, num_slots, causal, slots, positions = _works(batch, narrow_pairs // group)
    part = np.concatenate([[0], np.cumsum(num_rows)])
    pairs = num_rows * group
    is_wide = pairs > narrow_pairs
    wide_work, wide_index = _tiles(np.nonzero(is_wide)[0], pairs, wide_pairs)
    narrow_work, narrow_index = _tiles(np.nonzero(~is_wide)[0], pairs, narrow_pairs)
    row_of_part = np.repeat(row - part[:-1], num_rows) + np.arange(part[-1])
    counts = np.bincount(row_of_part, minlength=len(batch.input_ids))
    return WorkList(
        row=_int32(row),
        num_rows=_int32(num_rows),
        slot=_int32(slot),
        num_slots=_int32(num_slots),
        causal=_int32(causal),
        part=_int32(part[:-1]),
        wide_work=wide_work,
        wide_index=wide_index,
        narrow_work=narrow_work,
        narrow_index=narrow_index,
        row_first=_int32(np.concatenate([[0], np.cumsum(counts)])),
        row_parts=_int32(np.argsort(row_of_part, kind="stable")),
        slots=_int32(slots),
        kv_positions=_int32(positions),
        positions=_int32(batch.positions),
        num_parts=int(part[-1]),
    )


def _int32(array: npt.NDArray[np.int64]) -> Ints32:
    return array.astype(np.int32)


def _works(batch: FlatBatch, few_rows: int) -> tuple[npt.NDArray[np.int64], ...]:
    """row, num_rows, slot, num_slots, causal of each work, and the slots and positions they refer to."""
    rows: list[tuple[int, int, int, int, int]] = []
    slots, positions, at = [], [], 0
    for shared in batch.shared:
        num_rows, num_slots = shared.q_end - shared.q_start, len(shared.slots)
        step = LONG_CONTEXT if num_rows <= few_rows else num_slots
        for begin in range(0, num_slots, step):
            rows.append((shared.q_start, num_rows, at + begin, min(step, num_slots - begin), 0))
        slots.append(shared.slots)
        positions.append(np.arange(shared.position, shared.position + num_slots))
        at += num_slots
    for causal in batch.causal:
        rows.append((causal.q_start, causal.q_end - causal.q_start, at, len(causal.slots), 1))
        slots.append(causal.slots)
        positions.append(causal.positions)
        at += len(causal.slots)
    table = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    single = batch.singles
    ones, starts = np.ones_like(single.rows), at + np.cumsum(single.lens) - single.lens
    singles = np.stack([single.rows, ones, starts, single.lens, np.zeros_like(single.rows)])
    row, num_rows_W, slot, num_slots_W, causal_W = np.concatenate([table, singles], axis=1)
    return (
        row,
        num_rows_W,
        slot,
        num_slots_W,
        causal_W,
        np.concatenate([*slots, single.slots]),
        np.concatenate([*positions, single.positions]),
    )


def _tiles(works: npt.NDArray[np.int64], pairs: npt.NDArray[np.int64], height: int) -> tuple[Ints32, Ints32]:
    """The tiles of the given works: (work, place within the work) each."""
    num_tiles = -(-pairs[works] // height)
    work = np.repeat(works, num_tiles)
    first = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    return _int32(work), _int32(np.arange(len(work)) - first)
