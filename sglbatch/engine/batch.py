"""A step as flat arrays: what the model and its attention need. Pure numpy.

The pieces of a step lie one after another in depth-first order. So the rows that have a tree node in their context
are neighbours, and a node's keys and values are read once for all of them:

    flat tokens    | piece 0 | piece 1 | piece 2 |p3|p4|p5|
    node A         <---------------------------------------   one SharedWork
    node B                   <------------------>             one SharedWork
    own tokens     <-------> <-------> <------->  . . .       a CausalWork each; one-token pieces in SingleWork

Shapes: T flat tokens, S context slots of a work, R one-token rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglbatch.engine.radix.tree import RadixNode
from sglbatch.engine.sequence import Piece, Step

Ints = npt.NDArray[np.int64]

NO_INTS = np.empty(0, dtype=np.int64)

MIN_SHARED_TOKENS = 32
MIN_SHARED_ROWS = 4
"""A node is attended for its rows together when it has at least so many tokens and rows."""


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
    """

    input_ids: Ints
    positions: Ints
    write_slots: Ints
    shared: list[SharedWork]
    causal: list[CausalWork]
    singles: SingleWork


def flatten(step: Step) -> tuple[FlatBatch, dict[int, int]]:
    """The step's arrays, and the flat index of each piece's first token by ``id(piece)``."""
    pieces = step.pieces
    lens = [len(p.token_ids) for p in pieces]
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    shared, own_context = _share_context(pieces, offsets)
    causal = [
        _causal_work(piece, own, int(offsets[i]))
        for i, (piece, own) in enumerate(zip(pieces, own_context, strict=True))
        if lens[i] > 1
    ]
    single = [i for i, n in enumerate(lens) if n == 1]
    batch = FlatBatch(
        input_ids=np.concatenate([p.token_ids for p in pieces]).astype(np.int64),
        positions=np.concatenate([np.arange(p.start, p.end, dtype=np.int64) for p in pieces]),
        write_slots=np.concatenate([p.write_slots for p in pieces]),
        shared=shared,
        causal=causal,
        singles=_single_work(
            [int(offsets[i]) for i in single], [_own_slots(pieces[i], own_context[i]) for i in single]
        ),
    )
    return batch, {id(p): int(offset) for p, offset in zip(pieces, offsets, strict=False)}


def single_sequence(ids: Ints) -> FlatBatch:
    """A batch of one sequence from its beginning, in the first slots of the pool."""
    places = np.arange(len(ids), dtype=np.int64)
    own = CausalWork(q_start=0, q_end=len(ids), slots=places, positions=places)
    return FlatBatch(
        input_ids=ids, positions=places, write_slots=places, shared=[], causal=[own], singles=_single_work([], [])
    )


@dataclass(slots=True)
class _Open:
    node: RadixNode
    length: int
    first_piece: int


def _share_context(pieces: Seq[Piece], offsets: Ints) -> tuple[list[SharedWork], list[list[tuple[Ints, int]]]]:
    """Sweeps over the pieces with the stack of nodes on the current path.

    Returns the shared works, and for each piece the (slots, first position) that it attends to by itself.
    """
    shared: list[SharedWork] = []
    own: list[list[tuple[Ints, int]]] = [[] for _ in pieces]
    stack: list[_Open] = []

    def close(depth: int, piece: int) -> None:
        while len(stack) > depth:
            top = stack.pop()
            slots, q_start, q_end = top.node.slots[: top.length], offsets[top.first_piece], offsets[piece]
            if top.length >= MIN_SHARED_TOKENS and q_end - q_start >= MIN_SHARED_ROWS:
                work = SharedWork(q_start=int(q_start), q_end=int(q_end), slots=slots, position=top.node.start)
                shared.append(work)
            else:
                for i in range(top.first_piece, piece):
                    own[i].append((slots, top.node.start))

    for i, piece in enumerate(pieces):
        context = _context(piece)
        depth = 0
        while depth < min(len(stack), len(context)) and (stack[depth].node, stack[depth].length) == context[depth]:
            depth += 1
        close(depth, i)
        stack.extend(_Open(node, length, i) for node, length in context[depth:])
    close(0, len(pieces))
    return shared, own


def _context(piece: Piece) -> list[tuple[RadixNode, int]]:
    """The nodes before the piece's first token, each with how many of its tokens lie before it."""
    return [(node, min(len(node.ids), piece.start - node.start)) for node in piece.path if node.start < piece.start]


def _own_slots(piece: Piece, context: list[tuple[Ints, int]]) -> tuple[Ints, Ints]:
    """Slots and positions of what the piece attends to by itself; its own new tokens come last."""
    parts = list(context)
    if len(piece.tail_slots):
        parts.append((piece.tail_slots, piece.end - len(piece.tail_slots)))
    else:
        for node in piece.path:
            begin, end = max(piece.start, node.start), min(piece.end, node.end)
            if begin < end:
                parts.append((node.slots[begin - node.start : end - node.start], begin))
    slots = np.concatenate([slots for slots, _ in parts])
    positions = np.concatenate([np.arange(first, first + len(slots)) for slots, first in parts])
    return slots, positions


def _causal_work(piece: Piece, context: list[tuple[Ints, int]], q_start: int) -> CausalWork:
    slots, positions = _own_slots(piece, context)
    return CausalWork(q_start=q_start, q_end=q_start + len(piece.token_ids), slots=slots, positions=positions)


def _single_work(rows: list[int], own: list[tuple[Ints, Ints]]) -> SingleWork:
    return SingleWork(
        rows=np.array(rows, dtype=np.int64),
        slots=np.concatenate([slots for slots, _ in own]) if own else NO_INTS,
        positions=np.concatenate([positions for _, positions in own]) if own else NO_INTS,
        lens=np.array([len(slots) for slots, _ in own], dtype=np.int64),
    )
