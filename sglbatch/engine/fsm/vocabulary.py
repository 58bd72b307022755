"""The tokens of a tokenizer as one trie over bytes, walked with numpy a level at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.ranges import concatenated_ranges

_MAX_SPARSE_NODES = 3_000
"""Above so many nodes in a level, walking the whole trie is cheaper than picking out the live part."""


def row_offsets(table: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """An automaton's table [S, 256] in the form in which the trie is walked: int32 [(S + 1) * 256].

    A state is the offset of its row (state * 256). The way on from nowhere, -256, is the last row by numpy's
    negative indexing, and leads to -256 again: a whole level can be looked up without asking which nodes live.
    """
    rows = np.full((len(table) + 1, 256), -256, dtype=np.int32)
    np.multiply(table, 256, out=rows[:-1])
    rows[:-1][table < 0] = -256
    return rows.reshape(-1)


UNMADE = -512
"""Offset of a state behind one whose row is not made yet; see ``GrowingRows``."""


class GrowingRows(Protocol):
    """Rows of an automaton that is made as it is walked, in the form of ``row_offsets`` with one more row.

    The last row but one is ``UNMADE`` everywhere, and so are rows that are not made: a level is looked up as before,
    and shows afterwards which rows it lacked.
    """

    @property
    def offsets(self) -> npt.NDArray[np.int32]: ...

    def make(self, states: npt.NDArray[np.int64]) -> None:
        """Sees that these rows are made; ``offsets`` may be another array afterwards."""


class Vocabulary:
    """Byte trie in breadth-first order; the root is node 0.

    Nodes of a level are in the order of their prefixes, so the children of a node lie together as well:

        node      0 | 1  2  3 | 4  5 | ...
        parent    - | 0  0  0 | 1  3 | ...      the node without the last byte
        byte      - | a  b  c | b  a | ...      the last byte of the node's prefix

    Args:
        token_bytes: the bytes of each token id; empty ones stand for no text.
        left_out: ids to leave out though they stand for text.

    Attributes:
        single_bytes: the bytes that are a token by themselves.
    """

    def __init__(self, token_bytes: Sequence[bytes], left_out: Collection[int] = ()) -> None:
        self.num_tokens = len(token_bytes)
        ids = [i for i, data in enumerate(token_bytes) if data and i not in left_out]
        ids.sort(key=lambda i: token_bytes[i])
        self.single_bytes = frozenset(token_bytes[i][0] for i in ids if len(token_bytes[i]) == 1)
        node_of_text = self._build_trie([token_bytes[i] for i in ids])
        num_nodes = len(self._parent)

        # Tokens without text are at an extra last node, which no walk reaches.
        self._node_of_token = np.full(self.num_tokens, num_nodes, dtype=np.int64)
        self._node_of_token[ids] = node_of_text
        self._token_at_node = np.asarray(ids, dtype=np.int64)[np.argsort(node_of_text, kind="stable")]
        self._num_tokens_at = np.bincount(node_of_text, minlength=num_nodes)
        self._first_token_at = np.cumsum(self._num_tokens_at) - self._num_tokens_at

    def _build_trie(self, texts: list[bytes]) -> npt.NDArray[np.int64]:
        """Number the nodes; returns the node of each text. Sorted texts with a common prefix are neighbours."""
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        offsets = np.cumsum(lengths) - lengths
        joined = np.frombuffer(b"".join(texts), dtype=np.uint8)
        node_of_text = np.zeros(len(texts), dtype=np.int64)
        parents, last_bytes, level_start = [np.zeros(1, dtype=np.int64)], [np.zeros(1, dtype=np.uint8)], [0, 1]
        rows = np.arange(len(texts))
        for depth in range(1, int(lengths.max(initial=0)) + 1):
            rows = rows[lengths[rows] >= depth]
            parent, byte = node_of_text[rows], joined[offsets[rows] + depth - 1]
            is_new = np.ones(len(rows), dtype=np.bool_)
            is_new[1:] = (parent[1:] != parent[:-1]) | (byte[1:] != byte[:-1])
            parents.append(parent[is_new])
            last_bytes.append(byte[is_new])
            node_of_text[rows] = level_start[-1] + np.cumsum(is_new) - 1
            level_start.append(level_start[-1] + len(parents[-1]))
        self._level_start = level_start
        self._parent = np.concatenate(parents)
        self._byte = np.concatenate(last_bytes).astype(np.int64)
        self._num_children = np.bincount(self._parent[1:], minlength=len(self._parent))
        self._first_child = 1 + np.cumsum(self._num_children) - self._num_children
        return node_of_text

    def reachable(self, rows: npt.NDArray[np.int32], state: int) -> npt.NDArray[np.bool_]:
        """bool [num_tokens]: from ``state``, the token's bytes lead somewhere. ``rows`` as of ``row_offsets``."""
        nodes = self._few_reachable_nodes(rows, state)
        if nodes is None:
            return self.destinations(rows, state) >= 0
        allowed = np.zeros(self.num_tokens, dtype=np.bool_)
        tokens = concatenated_ranges(self._first_token_at[nodes], self._num_tokens_at[nodes])
        allowed[self._token_at_node[tokens]] = True
        return allowed

    def destinations(self, rows: npt.NDArray[np.int32], state: int) -> npt.NDArray[np.int32]:
        """int32 [num_tokens]: the state after each token, negative where it leads nowhere or has no text."""
        destinations: npt.NDArray[np.int32] = self._offsets(rows, state).take(self._node_of_token) // 256
        return destinations

    def _offsets(self, rows: npt.NDArray[np.int32], state: int) -> npt.NDArray[np.int32]:
        """int32 [nodes + 1], the offset of the state at each node."""
        offset_at = np.empty(len(self._parent) + 1, dtype=np.int32)
        offset_at[0] = state * 256
        offset_at[-1] = -256
        for start, end in zip(self._level_start[1:], self._level_start[2:], strict=False):
            index = offset_at.take(self._parent[start:end]) + self._byte[start:end]
            offset_at[start:end] = rows[index]
        return offset_at

    def walk(self, rows: GrowingRows, state: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The tokens whose bytes lead somewhere from ``state``, and the state after each; makes the rows it needs."""
        found = self._walk_few(rows, state)
        while found is None:
            offset_at = self._offsets(rows.offsets, state)
            missing = np.flatnonzero(offset_at[:-1] == UNMADE)
            if not len(missing):
                after = offset_at.take(self._node_of_token) // 256
                tokens = np.flatnonzero(after >= 0)
                found = tokens, after[tokens].astype(np.int64)
                break
            before = offset_at[self._parent[missing]]
            rows.make(np.unique(before[before >= 0] // 256))
        return found

    def _walk_few(self, rows: GrowingRows, state: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """The same node by node; None as soon as the nodes are many."""
        nodes, offsets = np.zeros(1, dtype=np.int64), np.full(1, state * 256, dtype=np.int64)
        tokens, after = [nodes[:0]], [offsets[:0]]
        while len(nodes):
            num_children = self._num_children[nodes]
            children = concatenated_ranges(self._first_child[nodes], num_children)
            if len(children) > _MAX_SPARSE_NODES:
                return None
            rows.make(np.unique(offsets[num_children > 0] // 256))
            reached = rows.offsets[np.repeat(offsets, num_children) + self._byte[children]]
            live = reached >= 0
            nodes, offsets = children[live], reached[live].astype(np.int64)
            num_tokens = self._num_tokens_at[nodes]
            tokens.append(self._token_at_node[concatenated_ranges(self._first_token_at[nodes], num_tokens)])
            after.append(np.repeat(offsets // 256, num_tokens))
        return np.concatenate(tokens), np.concatenate(after)

    def _few_reachable_nodes(self, rows: npt.NDArray[np.int32], state: int) -> npt.NDArray[np.int64] | None:
        """The nodes below the root that ``state`` can follow; None as soon as they are many."""
        nodes = np.zeros(1, dtype=np.int64)
        offsets = np.full(1, state * 256, dtype=np.int32)
        levels = []
        while len(nodes):
            num_children = self._num_children[nodes]
            children = concatenated_ranges(self._first_child[nodes], num_children)
            if len(children) > _MAX_SPARSE_NODES:
                return None
            offsets = rows[np.repeat(offsets, num_children) + self._byte[children]]
            live = offsets >= 0
            nodes, offsets = children[live], offsets[live]
            levels.append(nodes)
        return np.concatenate(levels)
