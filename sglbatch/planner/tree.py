"""The top of the radix tree: which beginnings of prompts are shared most, read off the plan's arrays.

A node of the tree that several requests pass through is a run of neighbours in the order whose common prefix is longer
than that with the neighbours outside (an interval of the LCP array), so one sweep with a stack finds them all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglbatch.types import TokenIds


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeNode:
    """A beginning that requests share, from where the node it is shown under ends.

    Args:
        level: how many shown nodes it lies under.
        start: token of the prompt at which its text begins.
        end: token before which it ends.
        text: those tokens as text, whole and unescaped.
        num_requests: requests whose prompts have all of it.
    """

    level: int
    start: int
    end: int
    text: str
    num_requests: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def saved_tokens(self) -> int:
        """Tokens that need not be computed because these requests share this text."""
        return self.num_tokens * (self.num_requests - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """The nodes worth showing, depth-first.

    Args:
        nodes: parents before children, in plan order.
        num_requests: requests in the whole tree.
        saved_tokens: tokens saved by sharing in the whole tree, those below and beside the nodes included.
        num_hidden: shared nodes that are not among ``nodes``.
    """

    nodes: tuple[TreeNode, ...]
    num_requests: int
    saved_tokens: int
    num_hidden: int

    @property
    def hidden_saved_tokens(self) -> int:
        """Tokens saved by sharing that the shown nodes do not account for."""
        return self.saved_tokens - sum(node.saved_tokens for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        nodes = [
            asdict(node) | {"num_tokens": node.num_tokens, "saved_tokens": node.saved_tokens} for node in self.nodes
        ]
        return {
            "nodes": nodes,
            "num_requests": self.num_requests,
            "saved_tokens": self.saved_tokens,
            "num_hidden": self.num_hidden,
            "hidden_saved_tokens": self.hidden_saved_tokens,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A node of the radix tree with at least two requests: order places [left, right), tokens (parent_end, end]."""

    left: int
    right: int
    parent_end: int
    end: int

    @property
    def saved_tokens(self) -> int:
        return (self.end - self.parent_end) * (self.right - self.left - 1)


def top_of_tree(
    order: npt.NDArray[np.int64],
    lcp: npt.NDArray[np.int32],
    prompts: Sequence[TokenIds],
    decode: Callable[[TokenIds], str],
    *,
    max_nodes: int = 12,
    min_requests: int = 2,
) -> Tree:
    """The ``max_nodes`` nodes whose sharing saves most, among those with ``min_requests`` requests or more.

    Where a node's parent is not shown, the node's text begins where the nearest shown node above it ends.

    Args:
        order: int64 [N], input index of the i-th request.
        lcp: int32 [N], common prefix with the request before.
        prompts: N arrays of token ids, in input order.
        decode: token ids to text.
    """
    assert min_requests >= 2, "a node of one request shares nothing"
    num_nodes = saved_tokens = 0
    best: list[tuple[int, int, int, Interval]] = []  # a heap; ties go to the earlier, then the shallower node
    for interval in shared_intervals(lcp):
        num_nodes += 1
        saved_tokens += interval.saved_tokens
        if interval.right - interval.left >= min_requests:
            heapq.heappush(best, (interval.saved_tokens, -interval.left, -interval.end, interval))
            if len(best) > max_nodes:
                heapq.heappop(best)
    chosen = sorted((entry[-1] for entry in best), key=lambda interval: (interval.left, interval.end))
    return Tree(
        nodes=tuple(_nest(chosen, order, prompts, decode)),
        num_requests=len(order),
        saved_tokens=saved_tokens,
        num_hidden=num_nodes - len(chosen),
    )


def shared_intervals(lcp: npt.NDArray[np.int32]) -> Iterator[Interval]:
    """Every node of the radix tree with at least two requests, children before parents; the empty root is left out."""
    open_nodes: list[tuple[int, int]] = [(0, 0)]  # (end, left) from the root down
    # A last common prefix of 0 closes what is still open.
    for place, common in enumerate([*lcp[1:].tolist(), 0], start=1):
        left = place - 1
        while open_nodes[-1][0] > common:
            end, left = open_nodes.pop()
            yield Interval(left=left, right=place, parent_end=max(common, open_nodes[-1][0]), end=end)
        if open_nodes[-1][0] < common:
            open_nodes.append((common, left))


def _nest(
    chosen: Sequence[Interval],
    order: npt.NDArray[np.int64],
    prompts: Sequence[TokenIds],
    decode: Callable[[TokenIds], str],
) -> Iterator[TreeNode]:
    """Nodes for intervals sorted parents first."""
    path: list[Interval] = []
    for interval in chosen:
        while path and path[-1].right <= interval.left:
            path.pop()
        start = path[-1].end if path else 0
        prompt = prompts[int(order[interval.left])]
        yield TreeNode(
            level=len(path),
            start=start,
            end=interval.end,
            text=decode(prompt[start : interval.end]),
            num_requests=interval.right - interval.left,
        )
        path.append(interval)
