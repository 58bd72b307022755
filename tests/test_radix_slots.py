"""The slot pool against a set of free slots."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglbatch.engine.radix.slots import Extent, SlotPool, slot_ids, split_extents

NUM_SLOTS = 40


class SlotPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(NUM_SLOTS)
        self.free = set(range(NUM_SLOTS))
        self.held: list[list[Extent]] = []

    @rule(num=st.integers(0, NUM_SLOTS + 2))
    def alloc(self, num: int) -> None:
        extents = self.pool.alloc(num)
        assert (extents is None) == (num > len(self.free))
        if extents is not None:
            slots = slot_ids(extents).tolist()
            assert len(slots) == num and set(slots) <= self.free
            self.free -= set(slots)
            self.held.append(extents)

    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        if self.held:
            extents = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            head, rest = split_extents(extents, data.draw(st.integers(0, sum(e.length for e in extents))))
            self.pool.free(head)
            self.held.append(rest)
            self.free |= set(slot_ids(head).tolist())

    @invariant()
    def free_slots_agree(self) -> None:
        extents = self.pool.free_extents()
        assert set(slot_ids(extents).tolist()) == self.free
        assert self.pool.num_free == len(self.free)
        assert all(a.start + a.length < b.start for a, b in pairwise(extents)), "not maximal"


TestSlotPool = SlotPoolMachine.TestCase


@given(st.lists(st.integers(1, 5), max_size=5), st.data())
def test_split_keeps_order(lengths: list[int], data: st.DataObject) -> None:
    extents = [Extent(10 * i, n) for i, n in enumerate(lengths)]
    offset = data.draw(st.integers(0, sum(lengths)))
    head, rest = split_extents(extents, offset)
    assert slot_ids(head).tolist() + slot_ids(rest).tolist() == slot_ids(extents).tolist()
    assert len(slot_ids(head)) == offset


def test_double_free_is_caught() -> None:
    pool = SlotPool(8)
    extents = pool.alloc(4)
    assert extents is not None
    pool.free(extents)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(extents)
