"""The radix tree of what the KV pool holds: every node owns the slots of its own tokens.

The idea is RadixAttention's (SGLang, Zheng et al. 2023); here the order of all requests is known, so what is used
next is known too: the scheduler locks the path of the next planned request, and everything unlocked may go.

A node's slots are *in use* while ``lock_ref > 0`` (a running request, or the planned path, goes through it), else
*cached*. Locks count for the whole path, so a locked node's ancestors are locked as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sglbatch.engine.radix.slots import Extent, SlotPool, slot_ids, split_extents
from sglbatch.types import TokenIds

TokenLogprobs: TypeAlias = npt.NDArray[np.float32]
"""NaN where nobody has asked, infinite in a step whose outputs have not come back. Parts of a node that was split are
views of the same memory, so whoever writes them need not know."""


class RadixNode:
    """Tokens ``ids`` at positions [start, end) below ``parent``.

    Attributes:
        num_computed: how many of the tokens have keys and values by the end of the current step.
        end_state: the final hidden state at the last token when a prompt ended here, else None. Owned by the
            engine, opaque to the tree; dropped with the node.
        logprobs: of each token given everything before it, where prompts are scored; see ``TokenLogprobs``.
        num_keeps: programs that may still extend a path ending here.
        heir: once it is evicted, its parent, which has its keeps.
    """

    __slots__ = (
        "_slots",
        "children",
        "end_state",
        "extents",
        "heir",
        "ids",
        "last_use",
        "lock_ref",
        "logprobs",
        "num_computed",
        "num_keeps",
        "parent",
        "start",
    )

    def __init__(self, ids: TokenIds, extents: list[Extent], parent: RadixNode | None, start: int) -> None:
        self.ids = ids
        self.extents = extents
        self.parent = parent
        self.start = start
        self.children: dict[int, RadixNode] = {}
        self.lock_ref = 0
        self.num_keeps = 0
        self.heir: RadixNode | None = None
        self.num_computed = 0
        self.last_use = 0
        self.end_state: Any = None
        self.logprobs: TokenLogprobs | None = None
        self._slots: npt.NDArray[np.int64] | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """Slot of each token, int64 [len(ids)]."""
        if self._slots is None:
            self._slots = slot_ids(self.extents)
        return self._slots

    def path(self) -> list[RadixNode]:
        """The nodes from the first below the root to this one."""
        nodes = []
        node: RadixNode = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


def common_prefix_len(a: npt.NDArray[np.signedinteger[Any]], b: npt.NDArray[np.signedinteger[Any]]) -> int:
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n


class RadixTree:
    """All cached and in-use prefixes, over one slot pool."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.root = RadixNode(np.empty(0, dtype=np.int32), [], None, 0)
        self.root.lock_ref = 1
        self.num_cached = 0
        """Slots of unlocked nodes: what eviction could free."""
        self.num_nodes = 0
        self._clock = 0
        self._num_offers = 0
        self._candidates: list[tuple[tuple[bool, int, int], int, RadixNode]] = []

    # --- finding and growing ---

    def match_prefix(self, ids: TokenIds) -> tuple[RadixNode, int]:
        """The deepest node that ``ids`` reaches and how many of ids are matched.

        The match may end inside that node (matched < node.end).
        """
        self._clock += 1
        node, matched = self.root, 0
        while matched < len(ids):
            child = node.children.get(int(ids[matched]))
            if child is None:
                break
            child.last_use = self._clock
            step = common_prefix_len(child.ids, ids[matched:])
            node, matched = child, matched + step
            if step < len(child.ids):
                break
        return node, matched

    def cut(self, node: RadixNode, position: int) -> RadixNode:
        """The node that ends at ``position`` on the path of ``node``, splitting one where needed."""
        while node.start >= position and node.parent is not None:
            node = node.parent
        return node if node.end == position else self._split(node, position - node.start)

    def _split(self, node: RadixNode, offset: int) -> RadixNode:
        """Puts the first ``offset`` tokens of a node into a new parent; the node itself keeps the rest."""
        assert node.parent is not None and 0 < offset < len(node.ids)
        head, rest = split_extents(node.extents, offset)
        upper = RadixNode(node.ids[:offset], head, node.parent, node.start)
        upper.lock_ref, upper.last_use = node.lock_ref, node.last_use
        upper.num_computed = min(node.num_computed, offset)
        upper.children[int(node.ids[offset])] = node
        node.parent.children[int(node.ids[0])] = upper
        node.parent, node.start = upper, node.start + offset
        node.ids, node.extents, node._slots = node.ids[offset:], rest, None
        node.num_computed -= upper.num_computed
        if node.logprobs is not None:
            upper.logprobs, node.logprobs = node.logprobs[:offset], node.logprobs[offset:]
        self.num_nodes += 1
        return upper

    def insert(self, parent: RadixNode, ids: TokenIds, extents: list[Extent], num_computed: int) -> RadixNode:
        """A new child; its slots pass from the caller to the tree. It starts unlocked."""
        assert len(ids) > 0 and int(ids[0]) not in parent.children
        node = RadixNode(ids, extents, parent, parent.end)
        node.num_computed = num_computed
        self._clock += 1
        node.last_use = self._clock
        parent.children[int(ids[0])] = node
        self.num_cached += len(ids)
        self.num_nodes += 1
        self._offer(node)
        return node

    def extend_locked(self, parent: RadixNode, ids: TokenIds, extents: list[Extent]) -> RadixNode:
        """A new, not yet computed child for a row that holds a lock on ``parent``; the lock now ends at the child."""
        node = self.insert(parent, ids, extents, 0)
        node.lock_ref = 1
        self.num_cached -= len(ids)
        return node

    # --- holding ---

    def lock(self, node: RadixNode) -> None:
        """Puts the whole path in use."""
        while node.parent is not None:
            if node.lock_ref == 0:
                self.num_cached -= len(node.ids)
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        while node.parent is not None:
            assert node.lock_ref > 0
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.num_cached += len(node.ids)
                self._offer(node)
            node = node.parent

    def keep(self, node: RadixNode) -> None:
        """A program may extend this path: evicted only after paths that nobody will extend."""
        node.num_keeps += 1

    def unkeep(self, node: RadixNode) -> RadixNode:
        """The program is done with it; returns the node, or what is left of its path after evictions."""
        while node.heir is not None:
            node = node.heir
        assert node.num_keeps > 0
        node.num_keeps -= 1
        self._offer(node)
        return node

    # --- letting go ---

    def evict(self, num: int) -> int:
        """Frees at least ``num`` slots from unlocked leaves if it can; returns how many it freed.

        Order: paths nobody will extend, then those kept for programs, cheapest recompute per slot first (a
        token costs more the deeper it stands), then least recently used. A partly needed node goes whole.
        """
        freed = 0
        while freed < num and self._candidates:
            rank, _, node = heapq.heappop(self._candidates)
            if not self._is_evictable(node):
                continue
            if rank != self._evict_rank(node):
                self._offer(node)
                continue
            freed += self.remove_leaf(node)
        return freed

    def _offer(self, node: RadixNode) -> None:
        """Makes an unlocked leaf a candidate; outdated entries are recognised when they come up."""
        if not self._is_evictable(node):
            return
        self._num_offers += 1
        heapq.heappush(self._candidates, (self._evict_rank(node), self._num_offers, node))
        if len(self._candidates) > 4 * self.num_nodes + 1024:
            live = {id(n): (self._evict_rank(n), i, n) for _, i, n in self._candidates if self._is_evictable(n)}
            self._candidates = list(live.values())
            heapq.heapify(self._candidates)

    @staticmethod
    def _is_evictable(node: RadixNode) -> bool:
        return node.parent is not None and not node.children and node.lock_ref == 0

    @staticmethod
    def _evict_rank(node: RadixNode) -> tuple[bool, int, int]:
        return node.num_keeps > 0, node.start if node.num_keeps else 0, node.last_use

    def remove_leaf(self, node: RadixNode) -> int:
        """Takes an unlocked leaf out and frees its slots; returns how many."""
        assert self._is_evictable(node)
        parent = node.parent
        assert parent is not None
        del parent.children[int(node.ids[0])]
        node.parent, node.heir = None, parent
        parent.num_keeps += node.num_keeps
        node.end_state = None
        self.pool.free(node.extents)
        self.num_cached -= len(node.ids)
        self.num_nodes -= 1
        self._offer(parent)
        return len(node.ids)

    def prune(self, node: RadixNode) -> None:
        """Removes this node and then its ancestors while they are unlocked, childless and kept by nobody."""
        while self._is_evictable(node) and node.num_keeps == 0:
            parent = node.parent
            assert parent is not None
            self.remove_leaf(node)
            node = parent

    # --- checking ---

    def _nodes(self) -> Iterator[RadixNode]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self, tail_slots: int) -> None:
        """Asserts that every slot is free, in the tree or in a running row's tail, exactly once.

        Args:
            tail_slots: slots held outside the tree by running rows.
        """
        owned = np.zeros(self.pool.num_slots, dtype=np.int64)
        cached = num_nodes = 0
        for node in self._nodes():
            num_nodes += 1
            assert len(node.ids) == len(node.slots) > 0
            assert node.parent is not None and node.parent.end == node.start
            assert node.parent.children[int(node.ids[0])] is node
            assert node.lock_ref >= sum(c.lock_ref for c in node.children.values()) >= 0
            assert 0 <= node.num_computed <= len(node.ids)
            owned[node.slots] += 1
            cached += len(node.ids) if node.lock_ref == 0 else 0
        for start, length in self.pool.free_extents():
            owned[start : start + length] += 1
        assert owned.max(initial=0) <= 1, "a slot has two owners"
        assert cached == self.num_cached
        assert num_nodes == self.num_nodes
        assert self.pool.num_free == sum(e.length for e in self.pool.free_extents())
        assert int((owned == 0).sum()) == tail_slots, "slots leaked"
