"""The radix tree against a dictionary of token prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglbatch.engine.radix.slots import SlotPool, slot_ids
from sglbatch.engine.radix.tree import RadixNode, RadixTree, common_prefix_len

RUNS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


class RadixTreeMachine(RuleBasedStateMachine):
    """``slot_of`` says which slot must hold each prefix's last token, as far as it is still cached."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(48)
        self.tree = RadixTree(self.pool)
        self.slot_of: dict[tuple[int, ...], int] = {}
        self.locked: list[tuple[tuple[int, ...], RadixNode]] = []

    @rule(run=RUNS, lock=st.booleans())
    def insert(self, run: list[int], lock: bool) -> None:
        ids = np.array(run, dtype=np.int32)
        node, matched = self.tree.match_prefix(ids)
        assert matched == max(n for n in range(len(run) + 1) if n == 0 or tuple(run[:n]) in self.slot_of)
        node = self.tree.cut(node, matched)
        assert node.end == matched
        if matched < len(run):
            extents = self.pool.alloc(len(run) - matched)
            if extents is None:
                return
            for i, slot in enumerate(slot_ids(extents).tolist()):
                self.slot_of[tuple(run[: matched + i + 1])] = slot
            node = self.tree.insert(node, ids[matched:], extents, len(run) - matched)
        assert [i for n in node.path() for i in n.ids.tolist()] == run
        if lock:
            self.tree.lock(node)
            self.locked.append((tuple(run), node))

    @rule(data=st.data(), prune=st.booleans())
    def unlock(self, data: st.DataObject, prune: bool) -> None:
        if self.locked:
            _, node = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
            self.tree.unlock(node)
            if prune:
                self.tree.prune(node)
                self.forget_removed()

    @rule(num=st.integers(1, 20), keep=st.booleans())
    def evict(self, num: int, keep: bool) -> None:
        cached, free = self.tree.num_cached, self.pool.num_free
        freed = self.tree.evict(num)
        assert freed == self.pool.num_free - free
        assert freed >= min(num, cached), "what is unlocked can always be evicted"
        self.forget_removed()

    def forget_removed(self) -> None:
        for run in list(self.slot_of):
            if self.tree.match_prefix(np.array(run, dtype=np.int32))[1] < len(run):
                del self.slot_of[run]

    @invariant()
    def consistent(self) -> None:
        self.tree.check_integrity(0)
        assert self.pool.num_free + len(self.slot_of) == self.pool.num_slots
        for run, node in self.locked:
            slots = [s for n in node.path() for s in n.slots.tolist()]
            assert slots == [self.slot_of[run[: i + 1]] for i in range(len(run))], "a locked path moved"


TestRadixTree = RadixTreeMachine.TestCase
TestRadixTree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_common_prefix_len() -> None:
    def ids(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    assert common_prefix_len(ids(), ids(1)) == 0
    assert common_prefix_len(ids(1, 2, 3), ids(1, 2, 4, 5)) == 2
    assert common_prefix_len(ids(1, 2), ids(1, 2, 3)) == 2


def add(tree: RadixTree, ids: list[int]) -> RadixNode:
    run = np.array(ids, dtype=np.int32)
    node, matched = tree.match_prefix(run)
    node = tree.cut(node, matched)
    extents = tree.pool.alloc(len(ids) - matched)
    assert extents is not None
    return tree.insert(node, run[matched:], extents, len(ids) - matched)


def test_eviction_order() -> None:
    """Paths that nobody extends go first, then kept ones, the shallow before the deep."""
    tree = RadixTree(SlotPool(64))
    dead = add(tree, [9, 9, 9])
    deep = add(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    fork = add(tree, [1, 2, 3, 4, 0])
    shallow = add(tree, [5, 5, 5])
    for node in (deep, fork, shallow):
        tree.keep(node)
    gone = []
    for _ in range(4):
        tree.evict(1)
        gone += [n for n in (dead, deep, fork, shallow) if n.parent is None and n not in gone]
    assert gone[0] is dead and gone[1] is shallow and set(map(id, gone[2:])) == {id(deep), id(fork)}


def test_what_is_left_of_a_kept_path_stays_kept() -> None:
    tree = RadixTree(SlotPool(16))
    upper = add(tree, [1, 2, 3])
    lower = add(tree, [1, 2, 3, 4, 5])
    other = add(tree, [7, 7])
    tree.keep(lower)
    tree.evict(3)
    assert other.parent is None and lower.parent is None, "kept paths go last"
    assert upper.parent is tree.root and upper.num_keeps == 1
    assert tree.unkeep(lower) is upper
    tree.prune(upper)
    assert tree.pool.num_free == 16
    tree.check_integrity(0)
