"""Minimisation of a deterministic automaton, a whole round of splits at a time in numpy.

Hopcroft's rule (1971) bounds the work: when a block splits, its largest part keeps the block's number, so a
state changes number at most log2(S) times, and only predecessors of states that changed are looked at again.
Blocks start as (shortest, longest) distance to the end, which leaves little to do for finite languages.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.ranges import concatenated_ranges

Table = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_ENDLESS = -1
"""Longest distance of a state that can reach a cycle."""

_ROUND_WORK = 200
"""Operations that one round costs beside the states it looks at: about fifteen numpy calls."""


class _Predecessors(NamedTuple):
    """Distinct predecessors: those of state s are ``sources[offsets[s] : offsets[s + 1]]``."""

    offsets: Ints
    sources: Ints

    def of(self, states: Ints) -> Ints:
        """The distinct predecessors of any of ``states``."""
        starts = self.offsets[states]
        return np.unique(self.sources[concatenated_ranges(starts, self.offsets[states + 1] - starts)])


def minimise(table: Table, accepting: Bools, budget: Budget) -> tuple[Table, Bools] | None:
    """The minimal automaton without dead ends, states numbered breadth-first from the start.

    Args:
        table: int32 [S, C], -1 where there is no way on; start state 0, every state reachable from it.
        accepting: bool [S].

    Returns:
        (int32 [S', C], bool [S']), or None when nothing is accepted.
    """
    shortest = _shortest_distances(_predecessors(table, budget), accepting)
    if shortest[0] < 0:
        return None
    table, accepting, shortest = _without_dead_ends(table, accepting, shortest)
    predecessors = _predecessors(table, budget)
    longest = _longest_distances(predecessors)
    _, block = np.unique(shortest * (len(shortest) + 2) + longest, return_inverse=True)
    return _quotient(table, accepting, _refine(table, block.astype(np.int64), predecessors, budget))


def can_finish(table: Table, accepting: Bools, budget: Budget) -> Bools:
    """[S], whether an accepting state can be reached from each state over the columns of ``table``."""
    return _shortest_distances(_predecessors(table, budget), accepting) >= 0


def _without_dead_ends(table: Table, accepting: Bools, shortest: Ints) -> tuple[Table, Bools, Ints]:
    """Keep the states that can reach an accepting one, in their order."""
    alive = shortest >= 0
    new_number = np.append(np.where(alive, np.cumsum(alive) - 1, -1), -1).astype(np.int32)
    return new_number[table[alive]], accepting[alive], shortest[alive]


def _predecessors(table: Table, budget: Budget) -> _Predecessors:
    num_states, num_classes = table.shape
    budget.spend(table.size // 8)
    sources = np.repeat(np.arange(num_states, dtype=np.int64), num_classes)
    targets = table.reshape(-1).astype(np.int64)
    pairs = np.unique((targets * num_states + sources)[targets >= 0])
    budget.spend(len(pairs))
    edge_targets, edge_sources = np.divmod(pairs, num_states)
    offsets = np.zeros(num_states + 1, dtype=np.int64)
    np.cumsum(np.bincount(edge_targets, minlength=num_states), out=offsets[1:])
    return _Predecessors(offsets, edge_sources)


def _shortest_distances(predecessors: _Predecessors, accepting: Bools) -> Ints:
    """[S], bytes to the nearest accepting state; -1 where none can be reached."""
    offsets, sources = predecessors.offsets.tolist(), predecessors.sources.tolist()
    distance = np.where(accepting, 0, -1).tolist()
    queue = deque(np.flatnonzero(accepting).tolist())
    while queue:
        state = queue.popleft()
        for source in sources[offsets[state] : offsets[state + 1]]:
            if distance[source] < 0:
                distance[source] = distance[state] + 1
                queue.append(source)
    return np.asarray(distance, dtype=np.int64)


def _longest_distances(predecessors: _Predecessors) -> Ints:
    """[S], bytes of the longest walk from a state; ``_ENDLESS`` where a cycle can be reached."""
    offsets, sources = predecessors.offsets.tolist(), predecessors.sources.tolist()
    successors_left = np.bincount(predecessors.sources, minlength=len(offsets) - 1).tolist()
    distance = [_ENDLESS] * len(successors_left)
    walk = [0] * len(successors_left)
    ready = [state for state, left in enumerate(successors_left) if left == 0]
    while ready:
        state = ready.pop()
        distance[state] = walk[state]
        for source in sources[offsets[state] : offsets[state + 1]]:
            walk[source] = max(walk[source], walk[state] + 1)
            successors_left[source] -= 1
            if successors_left[source] == 0:
                ready.append(source)
    return np.asarray(distance, dtype=np.int64)


def _refine(table: Table, block: Ints, predecessors: _Predecessors, budget: Budget) -> Ints:
    """[S], the coarsest partition finer than ``block`` whose blocks agree on every successor's block."""
    num_states, num_classes = table.shape
    weights = np.random.default_rng(0).integers(1, 2**63, size=num_classes + 1, dtype=np.uint64)
    padded = np.full(num_states + 1, num_states, dtype=np.int64)  # padded[-1]: the block of "no way on"
    padded[:-1] = block
    num_blocks = int(block.max()) + 1
    dirty: Ints = np.arange(num_states, dtype=np.int64)
    while len(dirty):
        budget.spend(_ROUND_WORK + num_states // 16 + len(dirty) * (1 + num_classes // 8))
        signature = padded[table[dirty]].astype(np.uint64) @ weights[1:]
        signature += padded[dirty].astype(np.uint64) * weights[0]
        _, first, group, sizes = np.unique(signature, return_index=True, return_inverse=True, return_counts=True)
        changed, num_blocks = _split(
            padded, dirty, group=group, group_block=padded[dirty[first]], group_sizes=sizes, num_blocks=num_blocks
        )
        dirty = predecessors.of(changed)
    return padded[:-1]


def _split(
    padded: Ints, dirty: Ints, *, group: Ints, group_block: Ints, group_sizes: Ints, num_blocks: int
) -> tuple[Ints, int]:
    """Give every part of a block but its largest a new number, in place.

    The parts of a block are its groups of dirty states and the rest, which cannot differ among itself:
    none of its successors changed.

    Args:
        padded: int64 [S + 1], the block of each state.
        dirty: [D] states; ``group`` [D] says to which group each belongs.
        group_block: [G], the block that each group lies in; ``group_sizes`` [G].

    Returns:
        The states whose number changed, and the new number of blocks.
    """
    num_dirty = np.bincount(group_block, weights=group_sizes, minlength=num_blocks).astype(np.int64)
    num_rest = np.bincount(padded[:-1], minlength=num_blocks)[:num_blocks] - num_dirty
    by_size = np.lexsort((-group_sizes, group_block))
    leads = np.ones(len(by_size), dtype=np.bool_)
    leads[1:] = group_block[by_size][1:] != group_block[by_size][:-1]
    largest = by_size[leads]
    keeps = largest[group_sizes[largest] > num_rest[group_block[largest]]]

    new_number = np.full(len(group_sizes), -1, dtype=np.int64)
    renamed = np.ones(len(group_sizes), dtype=np.bool_)
    renamed[keeps] = False
    new_number[renamed] = num_blocks + np.arange(int(renamed.sum()))
    num_blocks += int(renamed.sum())
    moved_rest = group_block[keeps][num_rest[group_block[keeps]] > 0]

    rest: Ints = np.zeros(0, dtype=np.int64)
    if len(moved_rest):
        in_rest = np.isin(padded[:-1], moved_rest)
        in_rest[dirty] = False
        rest = np.flatnonzero(in_rest)
        padded[rest] = num_blocks + np.searchsorted(np.sort(moved_rest), padded[rest])
        num_blocks += len(moved_rest)
    changed = dirty[renamed[group]]
    padded[changed] = new_number[group[renamed[group]]]
    return np.concatenate([changed, rest]), num_blocks


def _quotient(table: Table, accepting: Bools, block: Ints) -> tuple[Table, Bools]:
    """One state a block, numbered breadth-first from the start's block."""
    _, first, block = np.unique(block, return_index=True, return_inverse=True)
    padded = np.append(block, -1).astype(np.int32)
    small: Table = padded[table[first]]
    assert np.array_equal(small[block], padded[table]), "states of a block have successors in the same blocks"
    order = _breadth_first(small, int(block[0]))
    new_number = np.full(len(first) + 1, -1, dtype=np.int32)
    new_number[order] = np.arange(len(order), dtype=np.int32)
    return new_number[small[order]], accepting[first][order]


def _breadth_first(table: Table, start: int) -> Ints:
    """The states in breadth-first order, by first byte class within a state."""
    seen = np.zeros(len(table), dtype=np.bool_)
    seen[start] = True
    order = [start]
    rows = table.tolist()
    for state in order:
        for target in dict.fromkeys(rows[state]):
            if target >= 0 and not seen[target]:
                seen[target] = True
                order.append(target)
    return np.asarray(order, dtype=np.int64)
