"""A step as flat arrays: what the model and its attention need. Pure numpy.

The pieces of a step lie one after another, decoding rows first, both kinds in depth-first order. So the rows that have
a tree node in their context are neighbours, and a node's keys and values are read once for all of them:

    flat tokens    | piece 0 | piece 1 | piece 2 |p3|p4|p5|
    node A         <---------------------------------------   one SharedWork
    node B                   <------------------>             one SharedWork
    own tokens     <-------> <-------> <------->  . . .       a CausalWork each; one-token pieces in SingleWork

Where prefill does not share nodes, its pieces have a work each over their whole paths, and neighbours that begin alike
one TreeWork together. A piece of branches is a TreeWork too:

    piece 0        A A A A b b                                A, before all rows, is the trunk
    piece 1        A A A A b b c c                            b and c are branches: pieces 0 and 1 see b,
    piece 2        A A A A d                                  piece 1 c, piece 2 d; each listed once

Shapes: T flat tokens, S context slots of a work, R one-token rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sglbatch.engine.radix.tree import RadixNode, common_prefix_len
from sglbatch.engine.sequence import Branches, OwnNodes, Piece, Step

Ints = npt.NDArray[np.int64]

NO_INTS = np.empty(0, dtype=np.int64)

MIN_SHARED_TOKENS = 32
MIN_SHARED_ROWS = 4
"""A node is attended for its rows together when it has at least so many tokens and rows, two rows at least."""
MAX_TREE_ROWS = 1024
"""Most rows of a tree of several pieces: each of its tiles is held against every slot of its branches."""
MIN_TRUNK = 0.75
"""Of what comes before each of a tree's pieces, the share that all have in common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedWork:
    """Every row of [q_start, q_end) attends to all of ``slots`` (int64 [S]); positions begin at ``position``."""

    q_start: int
    q_end: int
    slots: Ints
    position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalWork:
    """Row i of [q_start, q_end) attends to the first S - (q_end - q_start) + i + 1 of ``slots``.

    positions: int64 [S], the position of each slot's token.
    """

    q_start: int
    q_end: int
    slots: Ints
    positions: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeWork:
    """Neighbouring pieces that begin alike, or one piece of branches: a trunk, which all rows see, and branches.

    Row q_start + i attends to the first ``trunk_len`` of ``slots``, and of the others to those with
    seen_from <= i < seen_until.

    slots, positions: int64 [S]; seen_from, seen_until: int64 [S - trunk_len]. Behind shared nodes the trunk may be
    empty.
    """

    q_start: int
    q_end: int
    slots: Ints
    positions: Ints
    seen_from: Ints
    seen_until: Ints

    @property
    def trunk_len(self) -> int:
        return len(self.slots) - len(self.seen_from)


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleWork:
    """Each of ``rows`` (int64 [R]) attends to its own run of ``slots``, the i-th being ``lens[i]`` long.

    slots, positions: int64 [sum of lens].
    """

    rows: Ints
    slots: Ints
    positions: Ints
    lens: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatBatch:
    """One forward pass.

    input_ids, positions, write_slots: int64 [T].
    has_positions: works' positions are given; else they mean nothing.
    """

    input_ids: Ints
    positions: Ints
    write_slots: Ints
    shared: list[SharedWork]
    causal: list[CausalWork]
    singles: SingleWork
    trees: list[TreeWork] = field(default_factory=list)
    has_positions: bool = True


def flatten(step: Step, *, with_positions: bool, share_prefill: bool) -> tuple[FlatBatch, dict[int, int]]:
    """The step's arrays, and the flat index of each piece's first token by ``id(piece)``.

    Args:
        with_positions: some layer looks at positions (a sliding window); else works' positions mean nothing.
        share_prefill: attend to shared nodes apart in prefill too. It saves copies where keys and values are
            gathered; a kernel that reads them in place is quicker without parts to merge, with works over whole paths,
            which are put together to trees.
    """
    if step.is_single:
        return _flatten_single(step.pieces, with_positions=with_positions)
    pieces = step.pieces
    lens = np.array([len(p.token_ids) for p in pieces], dtype=np.int64)
    ends = np.cumsum(lens)
    offsets = (ends - lens).tolist()
    shared, own = _share_context(pieces, [*offsets, int(ends[-1])], share_prefill)
    starts = np.array([p.start for p in pieces], dtype=np.int64)
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lens), lens)
    input_ids, write_slots = np.empty((2, int(ends[-1])), dtype=np.int64)
    causal: list[CausalWork] = []
    trees: list[TreeWork] = []
    branches = [p.branches is not None for p in pieces]
    for i in np.nonzero((lens > 1) | branches)[0].tolist():
        piece, rows = pieces[i], slice(offsets[i], offsets[i] + len(pieces[i].token_ids))
        slots, kv_positions = _own_slots(piece, own[i], with_positions=with_positions)
        if piece.branches is None:
            causal.append(CausalWork(q_start=rows.start, q_end=rows.stop, slots=slots, positions=kv_positions))
        else:
            trees.append(_branched(piece.branches, rows, slots, kv_positions))
            positions[rows] = piece.start + piece.branches.depths[piece.branches.skip :]
        input_ids[rows] = piece.token_ids
        write_slots[rows] = slots[-len(piece.token_ids) :] if piece.write_slots is None else piece.write_slots
    single = np.nonzero((lens == 1) & np.logical_not(branches))[0].tolist()
    singles = _single_work([pieces[i] for i in single], [own[i] for i in single], with_positions=with_positions)
    rows_R = np.array([offsets[i] for i in single], dtype=np.int64)
    input_ids[rows_R] = [pieces[i].token_ids[0] for i in single]
    write_slots[rows_R] = singles.slots[np.cumsum(singles.lens) - 1]
    for i in single:
        given = pieces[i].write_slots
        if given is not None:
            write_slots[offsets[i]] = given[0]
    singles = replace(singles, rows=rows_R)
    if share_prefill:
        singles, trees = _singly(singles, trees), []
    else:
        planted, causal = plant(causal)
        trees += planted
    batch = FlatBatch(
        input_ids=input_ids,
        positions=positions,
        write_slots=write_slots,
        shared=shared,
        causal=causal,
        singles=singles,
        trees=trees,
        has_positions=with_positions,
    )
    return batch, {id(p): offset for p, offset in zip(pieces, offsets, strict=True)}


def _flatten_single(pieces: list[Piece], *, with_positions: bool) -> tuple[FlatBatch, dict[int, int]]:
    """``flatten`` of decoding rows with a token each."""
    shared, own = _share_single(pieces)
    singles = _single_work(pieces, own, with_positions=with_positions)
    batch = FlatBatch(
        input_ids=np.array([piece.token_ids[0] for piece in pieces], dtype=np.int64),
        positions=np.array([piece.start for piece in pieces], dtype=np.int64),
        write_slots=singles.slots[np.cumsum(singles.lens) - 1],
        shared=shared,
        causal=[],
        singles=replace(singles, rows=np.arange(len(pieces))),
        has_positions=with_positions,
    )
    return batch, {id(piece): i for i, piece in enumerate(pieces)}


def single_sequence(
    ids: Ints, *, slots: Ints | None = None, positions: Ints | None = None, has_positions: bool = True
) -> FlatBatch:
    """A batch of one sequence from its beginning; by default in the first slots of the pool."""
    places = np.arange(len(ids), dtype=np.int64)
    slots, positions = places if slots is None else slots, places if positions is None else positions
    return FlatBatch(
        input_ids=ids,
        positions=positions,
        write_slots=slots,
        shared=[],
        causal=[CausalWork(q_start=0, q_end=len(ids), slots=slots, positions=positions)],
        singles=SingleWork(rows=NO_INTS, slots=NO_INTS, positions=NO_INTS, lens=NO_INTS),
        has_positions=has_positions,
    )


def plant(works: list[CausalWork]) -> tuple[list[TreeWork], list[CausalWork]]:
    """Puts neighbours together that have most of what comes before them in common; returns trees, and what is left.

    Tiles of a tree are filled by the rows of several pieces, and read what those share once.
    """
    trees, alone = [], []
    group: list[CausalWork] = []
    begins: list[int] = []
    trunk_len = longest = 0

    def close() -> None:
        if len(group) > 1:
            trees.append(_tree(group, begins, trunk_len))
        else:
            alone.extend(group)

    for work in works:
        context_len = len(work.slots) - (work.q_end - work.q_start)
        if group and group[-1].q_end == work.q_start and work.q_end - group[0].q_start <= MAX_TREE_ROWS:
            alike = min(context_len, common_prefix_len(group[-1].slots, work.slots))
            shared = min(trunk_len, alike)
            if shared >= max(1, MIN_TRUNK * max(longest, context_len)):
                group.append(work)
                begins.append(alike)
                trunk_len, longest = shared, max(longest, context_len)
                continue
        close()
        group, begins, trunk_len, longest = [work], [0], context_len, context_len
    close()
    return trees, alone


def _tree(works: list[CausalWork], begins: list[int], trunk_len: int) -> TreeWork:
    """The works as one: each leaves the one before it after ``begins`` of its slots."""
    slots, positions = [works[0].slots[:trunk_len]], [works[0].positions[:trunk_len]]
    seen_from: list[Ints] = []
    ends: list[tuple[Ints, int]] = []
    path, num_listed = NO_INTS, 0  # where the slots of the branch that grows are listed
    for work, alike in zip(works, begins, strict=True):
        row, num_rows = work.q_start - works[0].q_start, work.q_end - work.q_start
        begin = max(trunk_len, alike)
        num_new = len(work.slots) - begin
        slots.append(work.slots[begin:])
        positions.append(work.positions[begin:])
        seen_from.append(row + np.maximum(0, np.arange(num_rows - num_new, num_rows)))
        ends.append((path[begin - trunk_len :], row))
        path = np.concatenate([path[: begin - trunk_len], np.arange(num_listed, num_listed + num_new)])
        num_listed += num_new
    seen_until = np.full(num_listed, works[-1].q_end - works[0].q_start)
    for listed, row in ends:
        seen_until[listed] = row
    return TreeWork(
        q_start=works[0].q_start,
        q_end=works[-1].q_end,
        slots=np.concatenate(slots),
        positions=np.concatenate(positions),
        seen_from=np.concatenate(seen_from),
        seen_until=seen_until,
    )


@dataclass(slots=True)
class _Open:
    node: RadixNode
    length: int
    first_piece: int


class _Sweep:
    """Goes over the pieces with the stack of nodes on the current path.

    Attributes:
        shared: works of nodes that several pieces have.
        own: for each piece the (node, number of its tokens) that it attends to by itself.
    """

    def __init__(self, offsets: Seq[int]) -> None:
        self.shared: list[SharedWork] = []
        self.own: list[OwnNodes] = [[] for _ in offsets[1:]]
        self._offsets = offsets
        self._stack: list[_Open] = []
        self._depths: dict[RadixNode, int] = {}
        self._is_decoding = False
        """The path is a decoding row's: all of its nodes lie whole before the row."""

    def decode(self, i: int, node: RadixNode) -> None:
        """The i-th piece decodes behind ``node``."""
        stack, depths = self._stack, self._depths
        if not self._is_decoding:
            self.close(0, i)
            self._is_decoding = True
        new = []
        while node not in depths and node.parent is not None:
            new.append(node)
            node = node.parent
        depth = depths.get(node, -1) + 1
        if depth < len(stack):
            self.close(depth, i)
        for node in reversed(new):
            self._push(node, len(node.ids), i)

    def prefill(self, i: int, context: OwnNodes) -> None:
        """The i-th piece is prefilled behind its context."""
        self._is_decoding = False
        stack, depth = self._stack, 0
        while depth < min(len(stack), len(context)) and (stack[depth].node, stack[depth].length) == context[depth]:
            depth += 1
        self.close(depth, i)
        for node, length in context[depth:]:
            self._push(node, length, i)

    def close(self, depth: int, piece: int) -> None:
        """Ends the works of the nodes from a depth on, which are not on the piece's path."""
        stack, offsets = self._stack, self._offsets
        while len(stack) > depth:
            top = stack.pop()
            del self._depths[top.node]
            first = top.first_piece
            if top.length >= MIN_SHARED_TOKENS and offsets[piece] - offsets[first] >= MIN_SHARED_ROWS:
                rows = {"q_start": offsets[first], "q_end": offsets[piece]}
                slots = top.node.slots[: top.length]
                self.shared.append(SharedWork(**rows, slots=slots, position=top.node.start))
            else:
                for i in range(first, piece):
                    self.own[i].append((top.node, top.length))

    def _push(self, node: RadixNode, length: int, piece: int) -> None:
        self._depths[node] = len(self._stack)
        self._stack.append(_Open(node, length, piece))


def _share_context(
    pieces: Seq[Piece], offsets: Seq[int], share_prefill: bool
) -> tuple[list[SharedWork], list[OwnNodes]]:
    """The shared works, and for each piece the (node, number of its tokens) that it attends to by itself."""
    sweep = _Sweep(offsets)
    for i, piece in enumerate(pieces):
        if piece.tail_len:
            sweep.decode(i, _node(piece))
        elif share_prefill:
            sweep.prefill(i, _context(piece))
        else:
            sweep.prefill(i, [])
            sweep.own[i] = _context(piece)
    sweep.close(0, len(pieces))
    return sweep.shared, sweep.own


def _share_single(pieces: Seq[Piece]) -> tuple[list[SharedWork], list[OwnNodes]]:
    """``_share_context`` of decoding rows with a token each.

    Most have a node of their own, whose nearest large ancestor they share; so the sweep goes over these ancestors.
    Where rows may share nodes below those, since one goes on from where another ends or from the same node, it goes
    over all.
    """
    nodes = [_node(piece) for piece in pieces]
    if any(node.children for node in nodes) or len({*nodes}) < len(nodes):
        return _share_context(pieces, range(len(pieces) + 1), share_prefill=False)
    paths = [piece.sequence.below_large(MIN_SHARED_TOKENS) for piece in pieces]
    own, ancestors = [below for below, _ in paths], [ancestor for _, ancestor in paths]
    changes = [i for i, (node, after) in enumerate(pairwise(ancestors), start=1) if node is not after]
    offsets = [0, *changes, len(pieces)]
    sweep = _Sweep(offsets)
    for i, begin in enumerate(offsets[:-1]):
        sweep.decode(i, ancestors[begin])
    sweep.close(0, len(offsets) - 1)
    for above, (begin, end) in zip(sweep.own, pairwise(offsets), strict=True):
        if above:  # what few rows or few tokens are not worth a work of its own
            own[begin:end] = [[*below, *above] for below in own[begin:end]]
    return sweep.shared, own


def _node(piece: Piece) -> RadixNode:
    assert piece.sequence.node is not None
    return piece.sequence.node


def _context(piece: Piece) -> OwnNodes:
    """The nodes before the piece's first token, each with how many of its tokens lie before it."""
    return [(node, min(len(node.ids), piece.start - node.start)) for node in piece.path if node.start < piece.start]


def _own_slots(piece: Piece, context: OwnNodes, *, with_positions: bool) -> tuple[Ints, Ints]:
    """Slots and positions of what the piece attends to by itself; its own new tokens come last."""
    slots = _own_run(piece, context)
    if not with_positions:
        return slots, np.zeros_like(slots)
    positions = np.concatenate([np.arange(first, first + len(run)) for run, first in _runs(piece, context)])
    if piece.branches is not None:
        depths = piece.branches.depths
        positions[len(positions) - len(depths) :] = piece.start + depths
    return slots, positions


def _branched(branches: Branches, rows: slice, slots: Ints, positions: Ints) -> TreeWork:
    """The work of a piece of branches; those that another piece had lie before its own."""
    return TreeWork(
        q_start=rows.start,
        q_end=rows.stop,
        slots=slots,
        positions=positions,
        seen_from=np.maximum(0, np.arange(len(branches.ends)) - branches.skip),
        seen_until=branches.ends - branches.skip,
    )


def _singly(singles: SingleWork, trees: list[TreeWork]) -> SingleWork:
    """The trees' rows each with a run of its own, behind the rows that have one."""
    rows, slots, positions, lens = [singles.rows], [singles.slots], [singles.positions], singles.lens.tolist()
    for tree in trees:
        num_rows, trunk_len = tree.q_end - tree.q_start, tree.trunk_len
        rows.append(np.arange(tree.q_start, tree.q_end))
        for i in range(num_rows):
            seen = np.nonzero((tree.seen_from <= i) & (i < tree.seen_until))[0]
            run = np.concatenate([np.arange(trunk_len), trunk_len + seen])
            slots.append(tree.slots[run])
            positions.append(tree.positions[run])
            lens.append(len(run))
    return SingleWork(
        rows=np.concatenate(rows),
        slots=np.concatenate(slots),
        positions=np.concatenate(positions),
        lens=np.array(lens, dtype=np.int64),
    )


def _single_work(pieces: list[Piece], own: list[OwnNodes], *, with_positions: bool) -> SingleWork:
    """The works of one-token pieces; ``rows`` is left empty."""
    if with_positions:
        pairs = [_own_slots(piece, nodes, with_positions=True) for piece, nodes in zip(pieces, own, strict=True)]
        runs, positions = [slots for slots, _ in pairs], [positions for _, positions in pairs]
    else:
        runs, positions = list(map(_own_run, pieces, own)), []
    slots = np.concatenate([NO_INTS, *runs])
    return SingleWork(
        rows=NO_INTS,
        slots=slots,
        positions=np.concatenate([NO_INTS, *positions]) if with_positions else np.zeros_like(slots),
        lens=np.array([len(run) for run in runs], dtype=np.int64),
    )


def _own_run(piece: Piece, nodes: OwnNodes) -> Ints:
    """The slots of ``_own_slots``, for decoding rows from what the sequence remembers."""
    if piece.tail_len:
        return piece.sequence.own_run(nodes, piece.tail_len)
    return np.concatenate([run for run, _ in _runs(piece, nodes)])


def _runs(piece: Piece, context: OwnNodes) -> list[tuple[Ints, int]]:
    """Runs of neighbouring tokens that the piece attends to by itself: their slots, and the first one's position."""
    runs = [(node.slots[:length], node.start) for node, length in context]
    if piece.tail_len:
        runs.append((piece.sequence.tail_slots[: piece.tail_len], len(piece.sequence.ids)))
        return runs
    piece_end = piece.start + len(piece.token_ids)
    for node in piece.path:
        begin, end = max(piece.start, node.start), min(piece_end, node.end)
        if begin < end:
            runs.append((node.slots[begin - node.start : end - node.start], begin))
    return runs
