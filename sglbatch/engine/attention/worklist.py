"""A flat batch's attention as a list of works for the kernels. Pure numpy.

Works are (rows x slots) rectangles, causal trapezoids, or trees: a rectangle and branches. They are cut into tiles of
three heights: one narrow tile where a work has few rows; else wide ones, and a middle one where what is left at the end
fits it. Every row of a work gives one *part*, a row of the parts' buffer. Its first T rows are the output itself: a
work whose rows have no other part writes there; the others' parts follow and are merged.

Slots are listed as works have them, but of branches each tile has a list of its own, so that it looks at nothing that
none of its rows see. What all rows see and lies side by side in the pool is listed in runs of whole chunks, which are
loaded without looking at each slot; not where positions count, nor for few rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sglbatch.engine.batch import NO_INTS, FlatBatch, Ints, TreeWork

Ints32 = npt.NDArray[np.int32]
T = TypeVar("T")

LONG_CONTEXT = 1024
"""Slots after which a work of few rows is cut, so that more programs share the reading."""
CHUNK = 64
"""Neighbouring slots that are loaded as one, where all rows of a tile see them."""
TILE_FIELDS = (
    *("index", "row", "num_rows", "slot", "num_whole", "skip", "num_slots", "part"),
    *("run", "num_runs", "own_slot", "num_own_chunks"),
)
"""What a kernel reads of a tile, side by side:

index: its place in its work, counted in tiles of its height.
row, num_rows, slot, part: of the work the first row, how many rows, the first listed slot, and the first part.
num_whole, skip, num_slots: how many listed slots from ``slot`` on all the tile's rows see; how many are passed over
    then (of a tree up to the tile's own list of branches, of a causal work those in chunks); how many there are in all.
run, num_runs: runs of slots that all rows of the work see, which are not listed as slots.
own_slot, num_own_chunks: the first slot of a causal work's own rows, and how many chunks from there on all the tile's
    rows see.
"""
TILE_WIDTH = len(TILE_FIELDS)
NO_TILE = -1
"""The index of a padding tile, which has nothing to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkList:
    """int32 arrays; S slots, the first B of them of trees and causal works, T rows, M rows to merge.

    wide_tiles, middle_tiles, narrow_tiles: [number of tiles, TILE_WIDTH], see TILE_FIELDS.
    merge_rows: [M]; merge_first: [M + 1]; merge_parts: the parts of the i-th row to merge are
        merge_parts[merge_first[i] : merge_first[i + 1]].
    slots, kv_positions: [S]; positions: [T]. kv_positions is None where the batch has none.
    runs: [2 * number of runs], of each its first slot and how many chunks it has; None where slots alone are listed.
    seen_from, seen_until: [B], row i of its work sees a slot where seen_from <= i < seen_until; read where a tile does
        not count the slot among those that all its rows see.
    num_parts: rows of the parts' buffer.
    """

    wide_tiles: Ints32
    middle_tiles: Ints32
    narrow_tiles: Ints32
    merge_rows: Ints32
    merge_first: Ints32
    merge_parts: Ints32
    slots: Ints32
    kv_positions: Ints32 | None
    runs: Ints32 | None
    seen_from: Ints32
    seen_until: Ints32
    positions: Ints32
    num_parts: int


def make_work_list(
    batch: FlatBatch,
    *,
    group: int,
    wide_pairs: int,
    middle_pairs: int,
    narrow_pairs: int,
    merge_all: bool = False,
    with_runs: bool = True,
) -> WorkList:
    """Lists the works of a batch.

    Args:
        group: query heads for each key/value head.
        wide_pairs, middle_pairs, narrow_pairs: (row, query head) pairs of a tile, each a multiple of the next.
        merge_all: every row goes through the merge, which adds attention sinks.
        with_runs: list runs of slots as such, unless positions count.
    """
    with_runs = with_runs and not batch.has_positions
    works = _list_works(batch, narrow_pairs // group, with_runs=with_runs)
    pairs = works.fields.num_rows * group
    is_narrow = pairs <= narrow_pairs
    left = np.where(is_narrow, 0, pairs % wide_pairs)
    ends_in_middle = (left > 0) & (left <= middle_pairs)
    num_wide = np.where(is_narrow, 0, -(-pairs // wide_pairs) - ends_in_middle)
    wide_work = np.repeat(np.arange(len(pairs)), num_wide)
    middle_work, narrow_work = np.nonzero(ends_in_middle)[0], np.nonzero(is_narrow)[0]
    wide_index = np.arange(len(wide_work)) - np.repeat(np.cumsum(num_wide) - num_wide, num_wide)
    part, merge_rows, merge_first, merge_parts, num_parts = _parts(works, len(batch.input_ids), merge_all)
    branches = _Branches(batch.trees, works.num_limited)
    wide, middle, narrow = (
        _tiles(works, part, branches, work=work, index=index, pairs=pairs_of_tile, group=group)
        for pairs_of_tile, work, index in (
            (wide_pairs, wide_work, wide_index),
            (middle_pairs, middle_work, num_wide[middle_work] * (wide_pairs // middle_pairs)),
            (narrow_pairs, narrow_work, np.zeros_like(narrow_work)),
        )
    )
    num_limited_works = len(batch.trees) + len(batch.causal)
    for tiles, work in ((wide, wide_work), (middle, middle_work), (narrow, narrow_work)):
        tiles[work >= num_limited_works, 3] += branches.num_listed  # the branches are listed before theirs
    return WorkList(
        wide_tiles=wide,
        middle_tiles=middle,
        narrow_tiles=narrow,
        merge_rows=_int32(merge_rows),
        merge_first=_int32(merge_first),
        merge_parts=_int32(merge_parts),
        slots=_with_branches(works.slots, branches.slots, works.num_limited),
        kv_positions=None
        if works.positions is None
        else _with_branches(works.positions, branches.positions, works.num_limited),
        runs=_int32(works.runs.ravel()) if with_runs else None,
        seen_from=_joined([works.seen_from, *branches.seen_from]),
        seen_until=_joined([works.seen_until, *branches.seen_until]),
        positions=_int32(batch.positions),
        num_parts=num_parts,
    )


class _Work(NamedTuple, Generic[T]):
    """What is said of a work, or in arrays [works] of all.

    Attributes:
        num_slots: listed; of a tree those that all rows see.
        is_causal: 0 or 1.
        run, num_runs: of slots before all rows.
        own_slot, num_own_chunks: of a causal work the first slot of its rows, and how many chunks begin there.
    """

    row: T
    num_rows: T
    slot: T
    num_slots: T
    is_causal: T
    run: T
    num_runs: T
    own_slot: T
    num_own_chunks: T


@dataclass(frozen=True, kw_only=True, slots=True)
class _Works:
    """Trees, then causal works, then those whose rows see all their slots.

    fields: int64 [works] each.
    runs: int64 [number of runs, 2], the first slot and the number of chunks.
    slots, positions: int32 [S], without branches; positions is None where the batch has none.
    seen_from, seen_until: int64 [num_limited], of the slots of trees and causal works.
    """

    fields: _Work[Ints]
    runs: Ints
    slots: Ints32
    positions: Ints32 | None
    seen_from: Ints
    seen_until: Ints

    @property
    def num_limited(self) -> int:
        """Slots, at the beginning, of works whose rows do not all see the same."""
        return len(self.seen_from)


class _Branches:
    """What the tiles of trees see beside the slots that all rows see, listed for each tile by itself.

    Args:
        begin: where the list will stand among all slots.
    """

    def __init__(self, trees: list[TreeWork], begin: int) -> None:
        self._trees = trees
        self._begin = begin
        self.num_listed = 0
        self.slots: list[Ints] = []
        self.positions: list[Ints] = []
        self.seen_from: list[Ints] = []
        self.seen_until: list[Ints] = []

    def add(self, tree_index: int, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """Lists what each tile of a tree sees, by its first and last row; returns where that begins, and how many."""
        tree = self._trees[tree_index]
        sees = (tree.seen_from <= last[:, None]) & (tree.seen_until > first[:, None])
        tile, at = np.nonzero(sees)
        self.slots.append(tree.slots[tree.trunk_len + at])
        self.positions.append(tree.positions[tree.trunk_len + at])
        self.seen_from.append(tree.seen_from[at])
        self.seen_until.append(tree.seen_until[at])
        counts = np.bincount(tile, minlength=len(first))
        starts = self._begin + self.num_listed + np.cumsum(counts) - counts
        self.num_listed += len(at)
        return starts, counts

    def __len__(self) -> int:
        return len(self._trees)


def _tiles(
    works: _Works, part: Ints, branches: _Branches, *, work: Ints, index: Ints, pairs: int, group: int
) -> Ints32:
    """The tiles of given works at given places, [len(work), TILE_WIDTH]."""
    of = _Work(*(column[work] for column in works.fields))
    first = index * pairs // group
    last = np.minimum((index * pairs + pairs - 1) // group, of.num_rows - 1)
    # A row of a causal work sees what is before all rows, those before it, and itself.
    num_before = of.num_slots - of.is_causal * of.num_rows
    num_own_chunks = np.minimum(of.num_own_chunks, (first + 1) // CHUNK)
    skip = num_own_chunks * CHUNK
    num_whole = num_before + of.is_causal * np.where(skip, 0, first + 1)
    num_seen = num_before + of.is_causal * (last + 1) - skip
    place = [index, of.row, of.num_rows, of.slot, num_whole, skip, num_seen, part[work]]
    runs = [of.run, of.num_runs, of.own_slot, num_own_chunks]
    tiles = np.stack([*place, *runs], axis=1)
    ends = np.searchsorted(work, np.arange(len(branches) + 1))
    for tree, (begin, end) in enumerate(pairwise(ends.tolist())):
        if begin == end:  # its tiles are of another height
            continue
        starts, counts = branches.add(tree, first[begin:end], last[begin:end])
        tiles[begin:end, 5] = starts - of.slot[begin:end] - of.num_slots[begin:end]
        tiles[begin:end, 6] += counts
    return _int32(tiles)


def _int32(array: Ints) -> Ints32:
    return array.astype(np.int32)


def _joined(arrays: Sequence[Ints | Ints32]) -> Ints32:
    return np.concatenate(arrays, dtype=np.int32, casting="same_kind")


def _with_branches(array: Ints32, branches: list[Ints], at: int) -> Ints32:
    return _joined([array[:at], *branches, array[at:]]) if branches else array


def _parts(works: _Works, total_rows: int, merge_all: bool) -> tuple[Ints, Ints, Ints, Ints, int]:
    """Each work's first part, the rows to merge with their parts, and how many parts there are."""
    row, num_rows = works.fields.row, works.fields.num_rows
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


class _Runs:
    """Takes runs of whole chunks out of what works list.

    Args:
        few_rows: works of so many rows or fewer have none.
    """

    def __init__(self, *, few_rows: int) -> None:
        self._few_rows = few_rows
        self.listed = [np.empty((0, 2), dtype=np.int64)]
        self.num_listed = 0

    def take(self, slots: Ints, num_rows: int) -> tuple[Ints, int]:
        """Lists the runs of slots that all of so many rows see; returns the other slots, and how many runs."""
        if num_rows <= self._few_rows or len(slots) < CHUNK:
            return slots, 0
        begins = np.concatenate([[0], np.nonzero(np.diff(slots) != 1)[0] + 1])
        num_chunks = np.diff(begins, append=len(slots)) // CHUNK
        begins, num_chunks = begins[num_chunks > 0], num_chunks[num_chunks > 0]
        changes = np.zeros(len(slots) + 1, dtype=np.int64)
        changes[begins] += 1
        changes[begins + CHUNK * num_chunks] -= 1
        self.listed.append(np.stack([slots[begins], num_chunks], axis=1))
        self.num_listed += len(begins)
        return slots[np.cumsum(changes[:-1]) == 0], len(begins)

    def own_chunks(self, slots: Ints) -> int:
        """How many chunks a causal work's own slots begin with."""
        if len(slots) <= max(self._few_rows, CHUNK):
            return 0
        breaks = np.nonzero(np.diff(slots) != 1)[0]
        return (int(breaks[0]) + 1 if len(breaks) else len(slots)) // CHUNK


def _list_works(batch: FlatBatch, few_rows: int, *, with_runs: bool) -> _Works:
    table: list[_Work[int]] = []
    slots, at = [NO_INTS], 0
    seen_from, seen_until = [NO_INTS], [NO_INTS]
    runs = _Runs(few_rows=few_rows if with_runs else sys.maxsize)
    for tree in batch.trees:
        num_rows, run = tree.q_end - tree.q_start, runs.num_listed
        trunk, num_runs = runs.take(tree.slots[: tree.trunk_len], num_rows)
        table.append(_Work(tree.q_start, num_rows, at, len(trunk), 0, run, num_runs, 0, 0))
        slots.append(trunk)
        seen_from.append(np.zeros_like(trunk))
        seen_until.append(np.full_like(trunk, num_rows))
        at += len(trunk)
    for causal in batch.causal:
        num_rows, run = causal.q_end - causal.q_start, runs.num_listed
        before, own = np.split(causal.slots, [len(causal.slots) - num_rows])
        before, num_runs = runs.take(before, num_rows)
        num_slots = len(before) + num_rows
        own_slot, num_own_chunks = int(own[0]), runs.own_chunks(own)
        table.append(_Work(causal.q_start, num_rows, at, num_slots, 1, run, num_runs, own_slot, num_own_chunks))
        slots += [before, own]
        seen_from.append(np.arange(num_rows - num_slots, num_rows))
        seen_until.append(np.full(num_slots, num_rows))
        at += num_slots
    for shared in batch.shared:
        num_rows, run = shared.q_end - shared.q_start, runs.num_listed
        left, num_runs = runs.take(shared.slots, num_rows)
        step = LONG_CONTEXT if num_rows <= few_rows else max(1, len(left))
        for begin in range(0, max(1, len(left)), step):
            num_slots = min(step, len(left) - begin)
            table.append(_Work(shared.q_start, num_rows, at + begin, num_slots, 0, run, num_runs, 0, 0))
        slots.append(left)
        at += len(left)
    columns = np.array(table, dtype=np.int64).reshape(-1, len(_Work._fields)).T
    single = batch.singles
    ones, starts = np.ones_like(single.rows), at + np.cumsum(single.lens) - single.lens
    singles = np.stack(_Work(single.rows, ones, starts, single.lens, *[np.zeros_like(ones)] * 5))
    return _Works(
        fields=_Work(*np.concatenate([columns, singles], axis=1)),
        runs=np.concatenate(runs.listed),
        slots=_joined([*slots, single.slots]),
        positions=_positions(batch) if batch.has_positions else None,
        seen_from=np.concatenate(seen_from),
        seen_until=np.concatenate(seen_until),
    )


def _positions(batch: FlatBatch) -> Ints32:
    """Of the slots that ``_list_works`` lists, in their order."""
    trees = [tree.positions[: tree.trunk_len] for tree in batch.trees]
    causal = [work.positions for work in batch.causal]
    shared = [np.arange(work.position, work.position + len(work.slots)) for work in batch.shared]
    return _joined([*trees, *causal, *shared, batch.singles.positions])
