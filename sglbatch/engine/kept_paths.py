"""What programs may extend with their next calls: kept in the tree until a program ends."""

from __future__ import annotations

from collections import defaultdict

from sglbatch.engine.radix.tree import RadixNode, RadixTree
from sglbatch.types import TokenIds


class KeptPaths:
    """Each program's kept nodes, and the tokens of its latest call and answer.

    Args:
        retain: what nobody needs any more stays in the tree until its slots are needed.
    """

    def __init__(self, tree: RadixTree, *, retain: bool) -> None:
        self._tree = tree
        self._retain = retain
        self._nodes: dict[int, list[RadixNode]] = defaultdict(list)
        self._ids: dict[int, TokenIds] = {}

    def keep(self, program_id: int, node: RadixNode, ids: TokenIds) -> None:
        """Keeps the path of ``ids``, which ends at the node."""
        self._tree.keep(node)
        self.take_over(program_id, node, ids)

    def take_over(self, program_id: int, node: RadixNode, ids: TokenIds) -> None:
        """As ``keep``, for a node that the tree keeps already."""
        self._nodes[program_id].append(node)
        self._ids[program_id] = ids

    def ids_of(self, program_id: int) -> TokenIds | None:
        """What a follow-up call of the program finds in memory, if nothing has been evicted."""
        return self._ids.get(program_id)

    def finish_program(self, program_id: int) -> None:
        """The program makes no further call."""
        self._ids.pop(program_id, None)
        for node in self._nodes.pop(program_id, ()):
            self.drop(node)

    def drop(self, node: RadixNode) -> None:
        """Keeps a node no longer."""
        left = self._tree.unkeep(node)
        if not self._retain:
            self._tree.prune(left)
