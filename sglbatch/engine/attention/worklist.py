"""A flat batch's attention as a list of works for the kernels. Pure numpy.

Works are (rows x slots) rectangles or causal trapezoids. They are cut into tiles of three heights: one narrow tile
where a work has few rows; else wide ones, and a middle one where what is left at the end fits it. Every row of a work
gives one *part*, a row of the parts' buffer. Its first T rows are the output itself: a work whose rows have no other
part writes there; the others' parts follow and are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglbatch.engine.batch import FlatBatch

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

LONG_CONTEXT = 1024
"""Slots after which a work of few rows is cut, so that more programs share the reading."""
TILE_FIELDS = ("index", "row", "num_rows", "slot", "num_slots", "causal", "part")
"""What a kernel reads of a tile, side by side: its place in its work, counted in tiles of its height, and of the work
the first row, how many rows, the first listed slot, how many slots, whether it is causal, and the first part."""
TILE_WIDTH = 8
NO_TILE = -1
"""The index of a padding tile, which has nothing to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkList:
    """int32 arrays; S slots, T rows, M rows to merge.

    wide_tiles, middle_tiles, narrow_tiles: [number of tiles, TILE_WIDTH], see TILE_FIELDS.
    merge_rows: [M]; merge_first: [M + 1]; merge_parts: the parts of the i-th row to merge are
        merge_parts[merge_first[i] : merge_first[i + 1]].
    slots, kv_positions: [S]; positions: [T].
    num_parts: rows of the parts' buffer.
    """

    wide_tiles: Ints32
    middle_tiles: Ints32
    narrow_tiles: Ints32
    merge_rows: Ints32
    merge_first: Ints32
    merge_parts: Ints32
    slots: Ints32
    kv_positions: Ints32
    positions: Ints32
    num_parts: int


def make_work_list(
    batch: FlatBatch, *, group: int, wide_pairs: int, middle_pairs: int, narrow_pairs: int, merge_all: bool = False
) -> WorkList:
    """Lists the works of a batch.

    Args:
        group: query heads for each key/value head.
        wide_pairs, middle_pairs, narrow_pairs: (row, query head) pairs of a tile, each a multiple of the next.
        merge_all: every row goes through the merge, which adds attention sinks.
    """
    row, num_rows, slot, num_slots, causal, slots, positions = _works(batch, narrow_pairs // group)
    pairs = num_rows * group
    is_narrow = pairs <= narrow_pairs
    left = np.where(is_narrow, 0, pairs % wide_pairs)
    ends_in_middle = (left > 0) & (left <= middle_pairs)
    num_wide = np.where(is_narrow, 0, -(-pairs // wide_pairs) - ends_in_middle)
    wide_work = np.repeat(np.arange(len(pairs)), num_wide)
    middle_work, narrow_work = np.nonzero(ends_in_middle)[0], np.nonzero(is_narrow)[0]
    part, merge_rows, merge_first, merge_parts, num_parts = _parts(row, num_rows, len(batch.input_ids), merge_all)
    works = np.stack([row, num_rows, slot, num_slots, causal, part], axis=1)
    wide_index = np.arange(len(wide_work)) - np.repeat(np.cumsum(num_wide) - num_wide, num_wide)
    return WorkList(
        wide_tiles=_tiles(works, wide_work, wide_index),
        middle_tiles=_tiles(works, middle_work, num_wide[middle_work] * (wide_pairs // middle_pairs)),
        narrow_tiles=_tiles(works, narrow_work, np.zeros_like(narrow_work)),
        merge_rows=_int32(merge_rows),
        merge_first=_int32(merge_first),
        merge_parts=_int32(merge_parts),
        slots=_int32(slots),
        kv_positions=_int32(positions),
        positions=_int32(batch.positions),
        num_parts=num_parts,
    )


def _tiles(works: Ints, work: Ints, index: Ints) -> Ints32:
    """The tiles of given works at given places, [len(work), TILE_WIDTH]."""
    tiles = np.zeros((len(work), TILE_WIDTH), dtype=np.int32)
    tiles[:, 0] = index
    tiles[:, 1 : len(TILE_FIELDS)] = works[work]
    return tiles


def _int32(array: Ints) -> Ints32:
    return array.astype(np.int32)


def _parts(row: Ints, num_rows: Ints, total_rows: int, merge_all: bool) -> tuple[Ints, Ints, Ints, Ints, int]:
    """Each work's first part, the rows to merge with their parts, and how many parts there are."""
    counts = np.zeros(total_rows + 1, dtype=np.int64)
    np.add.at(counts, row, 1)
    np.subtract.at(counts, row + num_rows, 1)
    counts = np.cumsum(counts)[:-1]  # parts of each row
    needs_merge = (counts > 1) | merge_all
    num_merged_before = np.concatenate([[0], np.cumsum(needs_merge)])
    is_final = num_merged_before[row + num_rows] == num_merged_before[row]
    lens = np.where(is_final, 0, num_rows)
    starts = total_rows + np.cumsum(lens) - lens
    work = np.nonzero(~is_final)[0]
    rows_of_parts = np.repeat(row[work] - starts[work], num_rows[work]) + np.arange(lens.sum()) + total_rows
    order = np.argsort(rows_of_parts, kind="stable")
    merge_rows = np.nonzero(np.bincount(rows_of_parts, minlength=total_rows))[0]
    merge_counts = np.bincount(rows_of_parts, minlength=total_rows)[merge_rows]
    merge_first = np.concatenate([[0], np.cumsum(merge_counts)])
    return np.where(is_final, row, starts), merge_rows, merge_first, order + total_rows, total_rows + int(lens.sum())


def _works(batch: FlatBatch, few_rows: int) -> tuple[Ints, ...]:
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
    return (
        *np.concatenate([table, singles], axis=1),
        np.concatenate([*slots, single.slots]),
        np.concatenate([*positions, single.positions]),
    )
