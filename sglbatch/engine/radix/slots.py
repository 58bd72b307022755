"""The bookkeeping of KV slots: which are free, as maximal runs of neighbouring slots."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Extent(NamedTuple):
    """Slots [start, start + length)."""

    start: int
    length: int


class SlotPool:
    """Allocates slots 0 .. num_slots - 1.

    Free slots are kept as a sorted list of disjoint, never touching extents. ``alloc`` prefers one extent that
    is long enough (first fit), so that a node's keys and values usually lie in one piece; otherwise it gathers.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self.num_free = num_slots
        self._starts = [0]
        self._lengths = [num_slots]

    def alloc(self, num: int) -> list[Extent] | None:
        """``num`` slots, or None (and nothing taken) when fewer are free."""
        if num > self.num_free:
            return None
        if num == 0:
            return []
        self.num_free -= num
        for i, length in enumerate(self._lengths):
            if length >= num:
                return [self._take(i, num)]
        taken: list[Extent] = []
        while num:
            piece = self._take(len(self._starts) - 1, min(num, self._lengths[-1]))
            taken.append(piece)
            num -= piece.length
        return taken

    def _take(self, i: int, num: int) -> Extent:
        start = self._starts[i]
        if self._lengths[i] == num:
            del self._starts[i], self._lengths[i]
        else:
            self._starts[i] += num
            self._lengths[i] -= num
        return Extent(start, num)

    def free(self, extents: Iterable[Extent]) -> None:
        """Gives slots back; giving one back twice is our bug and asserts."""
        for start, length in extents:
            if length:
                self._give(start, length)
                self.num_free += length

    def _give(self, start: int, length: int) -> None:
        i = bisect_left(self._starts, start)
        after = i < len(self._starts)
        assert start >= 0 and start + length <= (self._starts[i] if after else self.num_slots), "slot freed twice"
        joins_after = after and self._starts[i] == start + length
        joins_before = i > 0 and self._starts[i - 1] + self._lengths[i - 1] == start
        assert i == 0 or self._starts[i - 1] + self._lengths[i - 1] <= start, "slot freed twice"
        if joins_before and joins_after:
            self._lengths[i - 1] += length + self._lengths[i]
            del self._starts[i], self._lengths[i]
        elif joins_before:
            self._lengths[i - 1] += length
        elif joins_after:
            self._starts[i], self._lengths[i] = start, length + self._lengths[i]
        else:
            self._starts.insert(i, start)
            self._lengths.insert(i, length)

    def free_extents(self) -> list[Extent]:
        return [Extent(s, n) for s, n in zip(self._starts, self._lengths, strict=True)]


def split_extents(extents: Sequence[Extent], offset: int) -> tuple[list[Extent], list[Extent]]:
    """The first ``offset`` slots and the rest."""
    head: list[Extent] = []
    for i, (start, length) in enumerate(extents):
        if offset <= length:
            if offset:
                head.append(Extent(start, offset))
            rest = [Extent(start + offset, length - offset)] if offset < length else []
            return head, rest + list(extents[i + 1 :])
        head.append(Extent(start, length))
        offset -= length
    assert offset == 0, "split beyond the end"
    return head, []


def slot_ids(extents: Sequence[Extent]) -> npt.NDArray[np.int64]:
    """The slots one by one, int64 [sum of lengths]."""
    if not extents:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(start, start + length, dtype=np.int64) for start, length in extents])
