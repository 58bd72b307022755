"""One row of the engine: a token run that is prefilled, then decoded or scored."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.bitmask import Bitmask
from sglbatch.engine.radix.slots import Extent, slot_ids, split_extents
from sglbatch.engine.radix.tree import RadixNode, TokenLogprobs
from sglbatch.types import Generate, Priority, Request, TokenIds

if TYPE_CHECKING:
    from sglbatch.engine.probe import Probe

Target: TypeAlias = "int | Bitmask"
"""What is scored behind a token: a token, or any one of those that a mask allows."""

OwnNodes: TypeAlias = "list[tuple[RadixNode, int]]"
"""Nodes that a row attends to by itself, each with how many of its tokens."""

TAIL_RUN = 16
"""Slots a decoding row takes at a time, at most."""


class StateRow:
    """A final hidden state: of a token in the current step until the step has run, kept afterwards.

    Attributes:
        piece, offset: the token in the current step; piece is None once ``stored`` is filled.
        stored: the state itself, owned by the engine's device ([hidden]).
    """

    __slots__ = ("offset", "piece", "stored")

    def __init__(self, piece: Piece, offset: int) -> None:
        self.piece: Piece | None = piece
        self.offset = offset
        self.stored: Any = None


class Sequence:
    """A request's row.

    Attributes:
        shared_len: tokens that an earlier row of the same choice has computed.
        ids: tokens to prefill: the prompt, and after a pause what had been generated too.
        targets: for scoring rows, token ids to score after each position; empty for generating rows.
        action_positions: positions whose final hidden states are needed, ascending.
        state_positions: positions whose states the tree shall keep for other rows, when this one computes them.
        own_successors: its targets are its own next tokens. Their log-probabilities stay with the tree's tokens.
        logprobs: of those tokens of ``ids``, as (index of the first, values) of each tree node that they lie in.
        alone: it stands without its request's prompt.
        kept: a scored row's node, kept until its choice is decided.
        number: in which order rows came to the scheduler; breaks ties.
        node: the tree node where ``ids`` end, locked while the row runs; None while it waits.
        num_cached: positions of ``ids`` whose keys and values were there when the row was admitted.
        num_computed: positions of ``ids`` that are dealt with; less than num_cached where states are computed again.
        output_ids: every token sampled so far; the first ``num_folded`` are part of ``ids`` since a pause.
        num_in_flight: its actions in steps whose outputs have not come back.
        place: of its latest action in its step.
        may_run_ahead: how its next token is drawn does not depend on the tokens before it.
        tail: slots of generated tokens, the first ``tail_len`` in use.
        reserved: slots promised to this row beyond those it holds.
        lent: slots at the tail's end that it has for one step only, and how many of them had been promised to it.
        probe: the finite choice that it scores instead of drawing a token.
        last_state: of its last token, while a probe is or was scored behind it.
        high_water: positions that were computed once already, for counting what is computed again.

    What a row attends to by itself is remembered: ``_own_slots`` are the slots of ``_own_nodes``, then the tail's, and
    ``tail_slots`` is what of it comes behind the first ``_own_base_len``; ``_below`` are the nodes that ``_climb``
    passes, which goes from ``node`` to its nearest large ancestor. These lists are not changed in place.
    """

    def __init__(
        self,
        request: Request,
        ids: TokenIds,
        *,
        priority: Priority,
        targets: Mapping[int, tuple[int, ...]] | None = None,
        shared_len: int = 0,
        own_successors: bool = False,
        alone: bool = False,
    ) -> None:
        self.request = request
        self.ids = ids
        self.priority = priority
        self.targets = targets or {}
        self.action_positions = sorted(self.targets) or [len(ids) - 1]
        self.state_positions: set[int] = set()
        self.shared_len = shared_len
        self.own_successors = own_successors
        self.alone = alone
        self.logprobs: list[tuple[int, TokenLogprobs]] = []
        self.kept: RadixNode | None = None
        self.number = 0
        operation = request.operation
        self.max_tail = operation.max_tokens - 1 if isinstance(operation, Generate) and not self.targets else 0
        self.num_in_flight = 0
        self.place = 0
        self.may_run_ahead = False
        self.resumed = False
        self.num_folded = 0
        self.node: RadixNode | None = None
        self.num_cached = 0
        self.num_computed = 0
        self.output_ids: list[int] = []
        self.tail: list[Extent] = []
        self.tail_slots: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.tail_len = 0
        self.reserved = 0
        self.lent = (0, 0)
        self.probe: Probe | None = None
        self.last_state: StateRow | None = None
        self.high_water = 0
        self._own_nodes: OwnNodes = []
        self._own_base_len = 0
        self._climb: list[RadixNode] = []
        self._below: OwnNodes = []
        self._own_slots: npt.NDArray[np.int64] = self.tail_slots

    def __lt__(self, other: Sequence) -> bool:
        return (self.priority, self.number) < (other.priority, other.number)

    @property
    def needed_from(self) -> int:
        return self.action_positions[0]

    def actions_in(self, start: int, end: int) -> list[int]:
        """The action positions from ``start`` to before ``end``."""
        positions = self.action_positions
        return positions[bisect_left(positions, start) : bisect_left(positions, end)]

    def acts_at(self, position: int) -> bool:
        return bool(self.actions_in(position, position + 1))

    def keeps_state(self, position: int) -> bool:
        """Whether the tree keeps the state of an action position: others may need all but a scored prompt's."""
        if not self.own_successors:
            return True
        return position == len(self.ids) - 1 or position in self.state_positions

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed == len(self.ids)

    @property
    def num_fed(self) -> int:
        """How many of ``output_ids`` have entered the model since the row was last admitted, or before."""
        return self.num_folded + self.tail_len

    @property
    def num_to_feed(self) -> int:
        """Tokens that wait to enter the model, those in flight included."""
        return len(self.output_ids) + self.num_in_flight - self.num_folded - self.tail_len

    @property
    def tail_left(self) -> int:
        """Most slots that this row can still need."""
        return self.max_tail - self.tail_len - self.num_folded

    def open_logprobs(self) -> None:
        """Finds the tree's places for the log-probabilities of its own next tokens; called with its node set."""
        assert self.node is not None and self.own_successors
        self.logprobs = []
        first = self.needed_from + 1
        for node in self.node.path():
            if node.end > first:
                if node.logprobs is None:
                    node.logprobs = np.full(len(node.ids), np.nan, dtype=np.float32)
                begin = max(node.start, first)
                self.logprobs.append((begin, node.logprobs[begin - node.start :]))

    def note_logprob(self, index: int, logprob: float) -> None:
        """The log-probability of ``ids[index]``, given what comes before it."""
        start, values = self._logprobs_at(index)
        values[index - start] = logprob

    def expect_logprob(self, index: int) -> None:
        """It is about to be computed; where that is again, another row may still have to read what is there."""
        start, values = self._logprobs_at(index)
        if np.isnan(values[index - start]):
            values[index - start] = np.inf

    def _logprobs_at(self, index: int) -> tuple[int, TokenLogprobs]:
        return self.logprobs[bisect_right(self.logprobs, index, key=itemgetter(0)) - 1]

    @property
    def first_unscored(self) -> int:
        """The first position whose next token's log-probability nobody has computed or is about to."""
        for start, values in self.logprobs:
            unknown = np.isnan(values)
            if unknown.any():
                return start + int(unknown.argmax()) - 1
        return len(self.ids) - 1

    def grow_tail(self, extents: list[Extent]) -> None:
        self.tail = self.tail + extents
        self._remember(np.concatenate([self._own_slots, slot_ids(extents)]))

    def shrink_tail(self, num: int) -> list[Extent]:
        """Takes the last ``num`` slots away, which are unused."""
        assert self.tail_len <= len(self.tail_slots) - num
        self.tail, taken = split_extents(self.tail, len(self.tail_slots) - num)
        self._remember(self._own_slots[: len(self._own_slots) - num])
        return taken

    def drop_tail(self) -> list[Extent]:
        """Takes all of the tail away, used or not."""
        taken, self.tail, self.tail_len = self.tail, [], 0
        self._remember(self._own_slots[: self._own_base_len])
        return taken

    def _remember(self, own_slots: npt.NDArray[np.int64]) -> None:
        self._own_slots = own_slots
        self.tail_slots = own_slots[self._own_base_len :]

    @property
    def next_run(self) -> int:
        """Slots that its tail grows by. The first run is shorter, so that not all rows grow in the same step."""
        return TAIL_RUN - (len(self.tail_slots) + self.number) % TAIL_RUN

    @property
    def num_unused(self) -> int:
        """Slots of the tail that hold nothing yet."""
        return len(self.tail_slots) - self.tail_len

    @property
    def num_missing(self) -> int:
        """Slots that its tail lacks for ``num_to_feed`` tokens, and for the fewest that its probe can do with."""
        least = 0 if self.probe is None else self.probe.min_len
        return self.num_to_feed + least - self.num_unused

    def below_large(self, min_tokens: int) -> tuple[OwnNodes, RadixNode]:
        """The nodes of its path below the nearest ancestor of at least ``min_tokens``, whole, and that ancestor.

        Remembered, so ``min_tokens`` is the same in every call: a node that is split gets another parent. The ancestor
        may have become smaller; it is the root where there is none so large.
        """
        climb = self._climb
        if climb and climb[0] is self.node:
            for i in range(1, len(climb)):
                if climb[i - 1].parent is not climb[i]:
                    break
            else:
                return self._below, climb[-1]
        assert self.node is not None and self.node.parent is not None
        climb = [self.node, self.node.parent]
        while climb[-1].parent is not None and len(climb[-1].ids) < min_tokens:
            climb.append(climb[-1].parent)
        self._climb = climb
        self._below = [(node, len(node.ids)) for node in climb[:-1]]
        return self._below, climb[-1]

    def own_run(self, nodes: OwnNodes, tail_len: int) -> npt.NDArray[np.int64]:
        """The slots of ``nodes`` and then of the first ``tail_len`` generated tokens; do not change them.

        Remembered: a decoding row asks for the same nodes in every step, and for one more token.
        """
        if nodes is not self._own_nodes:  # the same list has the same nodes
            if nodes != self._own_nodes:
                self._own_base_len = sum(length for _, length in nodes)
                self._remember(np.concatenate([*(node.slots[:length] for node, length in nodes), self.tail_slots]))
            self._own_nodes = nodes
        return self._own_slots[: self._own_base_len + tail_len]


@dataclass(frozen=True, slots=True)
class Branches:
    """Tokens of a piece that form a trie, in depth-first order.

    Attributes:
        depths: of each, how many tokens of the trie lie before it on its path. int64 [skip + num_tokens].
        ends: of each, the index behind the last one that follows it on some path: those up to there see it. int64
            [skip + num_tokens].
        skip: how many of the first tokens entered the model as another piece; the piece has the rest.
    """

    depths: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    skip: int = 0

    def part(self, begin: int, end: int) -> Branches:
        """Of the piece's tokens those from ``begin`` to before ``end``."""
        return Branches(self.depths[: self.skip + end], self.ends[: self.skip + end], self.skip + begin)


class Piece:
    """Tokens of one sequence that enter the model in a step: neighbours, or branches behind what it has.

    Attributes:
        start: position of the first token, or of the branches' first tokens.
        write_slots: in prefill, where each token's keys and values go; the scratch slot for tokens computed again
            only for their hidden state. int64 [num_tokens]. None in decode: they go where the tail ends.
        tail_len: in decode, how many generated tokens have slots, the new ones included; 0 in prefill.
        source: the place of the action in the step before that draws this piece's one token; ``token_ids`` has 0 then.
        branches: in decode, how the tokens follow one another; None: each the one before it.
    """

    __slots__ = ("branches", "sequence", "source", "start", "tail_len", "token_ids", "write_slots")

    def __init__(
        self,
        sequence: Sequence,
        token_ids: TokenIds | list[int],
        start: int,
        *,
        write_slots: npt.NDArray[np.int64] | None = None,
        tail_len: int = 0,
        source: int | None = None,
        branches: Branches | None = None,
    ) -> None:
        self.sequence = sequence
        self.source = source
        self.token_ids = token_ids
        self.start = start
        self.write_slots = write_slots
        self.tail_len = tail_len
        self.branches = branches

    @property
    def path(self) -> list[RadixNode]:
        """Tree nodes of the row, first below the root first. Rows admitted later in a step may still split them."""
        assert self.sequence.node is not None
        return self.sequence.node.path()

    def part(self, begin: int, end: int) -> Piece:
        """The tokens from ``begin`` to before ``end``, the ones before them having entered the model."""
        return Piece(
            self.sequence,
            self.token_ids[begin:end],
            self.start + (begin if self.branches is None else 0),
            write_slots=None if self.write_slots is None else self.write_slots[begin:end],
            tail_len=self.tail_len - (len(self.token_ids) - end) if self.tail_len else 0,
            branches=None if self.branches is None else self.branches.part(begin, end),
        )


class Action:
    """What to do with one hidden state: sample a token (no targets), or score the targets.

    Args:
        row: the state, or a piece of one token whose state it is.

    Attributes:
        node: in a probe, the tokens behind the generated ones after which the targets are scored.
    """

    __slots__ = ("_row", "node", "position", "sequence", "targets")

    def __init__(
        self,
        sequence: Sequence,
        row: StateRow | Piece,
        position: int,
        targets: tuple[Target, ...] = (),
        node: tuple[int, ...] = (),
    ) -> None:
        self.sequence = sequence
        self._row = row
        self.position = position
        self.targets = targets
        self.node = node

    @property
    def row(self) -> StateRow:
        """The state, always the same object; made here where nobody has asked for it."""
        if isinstance(self._row, Piece):
            self._row = StateRow(self._row, 0)
        return self._row


class Step:
    """One forward pass: ragged pieces, decoding rows first, and the actions on their states.

    Attributes:
        num_tokens: of all pieces.
        new_states: states of this step that the tree keeps: the runner fills ``stored``.
        num_single: of pieces and actions that are a decoding row's one token and the draw of the next.
    """

    __slots__ = ("actions", "new_states", "num_single", "num_tokens", "pieces")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.num_tokens = 0
        self.actions: list[Action] = []
        self.new_states: list[StateRow] = []
        self.num_single = 0

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.num_tokens += len(piece.token_ids)

    def add_single(self, piece: Piece, action: Action) -> None:
        """A decoding row's one token and the draw of the next."""
        self.num_single += 1
        self.pieces.append(piece)
        self.num_tokens += 1
        self.actions.append(action)

    @property
    def is_single(self) -> bool:
        """It has nothing else."""
        return self.num_single == len(self.pieces) == len(self.actions) > 0
