"""The tree's paths to what comes next in the plan, locked so that neither pruning nor eviction takes them."""

from __future__ import annotations

from collections.abc import Sequence

from sglbatch.engine.radix.tree import RadixNode, RadixTree
from sglbatch.types import TokenIds


class PlannedPath:
    """What the next rows will find.

    Args:
        retain: what is let go stays in the tree until its slots are needed.
    """

    def __init__(self, tree: RadixTree, *, retain: bool) -> None:
        self._tree = tree
        self._retain = retain
        self._pinned: list[RadixNode] = []

    def pin(self, heads: Sequence[TokenIds]) -> None:
        """Locks what rows of these ids will find, and lets go of what was locked before."""
        nodes = [self._found(ids) for ids in heads]
        if nodes != self._pinned:
            for node in nodes:
                self._tree.lock(node)
            self.unpin()
            self._pinned = nodes

    def unpin(self) -> bool:
        """Lets go of everything; False if that was nothing."""
        pinned, self._pinned = self._pinned, []
        for node in pinned:
            self._tree.unlock(node)
            if not self._retain:
                self._tree.prune(node)
        return any(node is not self._tree.root for node in pinned)

    def _found(self, ids: TokenIds) -> RadixNode:
        node, _ = self._tree.match_prefix(ids)
        if node.num_computed < len(node.ids) and node.parent is not None:
            node = node.parent  # a cut row's own node: if that row pauses, its uncomputed part must be removable
        return node
