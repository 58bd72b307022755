"""Decides what enters the model in each step, and who holds which KV slots. Pure: no clock, no device.

Rows run in priority order (the plan's depth-first order). A step is every running row's next token, then as many
prefill tokens as the budget allows; the last admitted row may be cut, and then goes first in the next step.
A row that finds its prefix in the tree, even one that enters the model in this same step, only adds its suffix.

Who gives way: the *head* is the least unfinished row. It is never paused and may evict everything else, so it always
advances. Other rows pause youngest first when slots run out, drop their own slots and come back only with all
they can need reserved.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sglbatch.engine.expected_use import ExpectedUse
from sglbatch.engine.kept_paths import KeptPaths
from sglbatch.engine.planned_path import PlannedPath
from sglbatch.engine.probe import add_heads
from sglbatch.engine.radix.slots import SlotPool, split_extents
from sglbatch.engine.radix.tree import RadixNode, RadixTree, common_prefix_len
from sglbatch.engine.sequence import TAIL_RUN, Action, Piece, Sequence, StateRow, Step, Target
from sglbatch.types import TokenIds

NO_SLOTS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of memory.

    Args:
        num_slots: KV slots (tokens) in the pool.
        max_batch_tokens: tokens a step may put through the model.
        max_rows: rows that decode at once.
        reserve: "full" admits a row only with room for all its tokens, so nobody ever pauses; "soft" with room
            for as many as rows have used so far, on average and a little more.
        retain: keep finished paths until their slots are needed (interactive use), instead of freeing what no
            planned request and no running program can use.
    """

    num_slots: int
    max_batch_tokens: int
    max_rows: int
    reserve: Literal["soft", "full"] = "soft"
    retain: bool = False


@dataclass(kw_only=True)
class Counters:
    """Running totals; see BackendStats for what they mean."""

    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """Rows that could decode in the next step.

    Attributes:
        rows: by priority.
        num_going_on: all rows that decode, but for those whose last token is being drawn.
        runs_ahead: rows in flight are among them, with a token that only the device will know: all rows may go on so,
            and are few enough.
    """

    rows: list[Sequence]
    num_going_on: int
    runs_ahead: bool

    @property
    def leaves_nobody(self) -> bool:
        """A step of all of them has every row that goes on."""
        return 0 < self.num_going_on == len(self.rows)


def _least_ahead(rows: list[Sequence], most: int | None) -> list[Sequence]:
    """Of too many rows those without the ones that are furthest ahead, but for the first, so that all get on alike."""
    if most is None or len(rows) <= most:
        return rows
    ahead = set(heapq.nlargest(len(rows) - most, rows[1:], key=lambda s: s.num_fed))
    return [s for s in rows if s not in ahead]


class Scheduler:
    """Rows in, steps out; every KV slot is free, cached in the tree, or in use by a row."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = SlotPool(config.num_slots)
        self.tree = RadixTree(self.pool)
        self.counters = Counters()
        self.running: list[Sequence] = []
        """Prefilled rows that decode, by priority."""
        self.cut: Sequence | None = None
        """The row whose prefill the last step's budget cut."""
        self.scoring: set[Sequence] = set()
        """Scored rows whose last outputs have not come back."""
        self.max_batch_tokens = config.max_batch_tokens
        """Less than the config's once a step has not fit the device's memory."""
        self.num_in_flight = 0
        """Actions whose outputs have not come back."""
        self.expects_more = False
        """More of the plan will come: what it may share with its last row so far is kept."""
        self._planned: list[Sequence] = []
        self._follow_ups: list[Sequence] = []
        self._prefill_fills = True
        """The latest step was at least half full of prefill."""
        self._num_promised = 0
        self._num_added = 0
        self._expected_use = ExpectedUse()
        self._next_path = PlannedPath(self.tree, retain=config.retain)
        self._kept = KeptPaths(self.tree, retain=config.retain)
        self._last_planned_ids: TokenIds = np.empty(0, dtype=np.int32)

    # --- what comes in ---

    def add(self, sequence: Sequence) -> None:
        """Queues a row that fits: len(ids) + max_tail <= num_slots is the caller's check."""
        sequence.number = self._num_added
        self._num_added += 1
        heapq.heappush(self._queue_of(sequence), sequence)
        self.counters.prompt_tokens += len(sequence.ids)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.cut or self._planned or self._follow_ups)

    @property
    def num_waiting(self) -> int:
        """Rows of the plan that have not been begun."""
        return len(self._planned)

    def _queue_of(self, sequence: Sequence) -> list[Sequence]:
        return self._follow_ups if sequence.request.follow_up or sequence.resumed else self._planned

    def _next_waiting(self) -> Sequence | None:
        heads = [queue[0] for queue in (self._planned, self._follow_ups) if queue]
        return min(heads, default=None)

    # --- one step ---

    def ready(self, most_ahead: int = 0) -> Ready:
        """Which rows could decode in the next step.

        Args:
            most_ahead: as many rows or fewer may run ahead of what is known here, where none has to wait for it.
        """
        idle: list[Sequence] = []
        rows: list[Sequence] = []
        num_going_on, all_may = 0, True
        for sequence in self.running:
            all_may = all_may and sequence.may_run_ahead
            if not sequence.num_in_flight:
                idle.append(sequence)
                rows.append(sequence)
            elif sequence.tail_len + sequence.num_folded >= sequence.max_tail:
                continue  # its last token is being drawn
            elif sequence.may_run_ahead and sequence.num_in_flight == 1:
                rows.append(sequence)
            num_going_on += 1
        runs_ahead = all_may and num_going_on <= most_ahead
        return Ready(rows if runs_ahead else idle, num_going_on, runs_ahead)

    def schedule(self, ready: Ready | None = None, max_decode_rows: int | None = None) -> Step:
        """The next step, without the rows that are in flight, but for those that run ahead. Empty when all are.

        As long as prefill fills steps, only the head decodes beside it: the others decode together later, in larger
        steps and with the rows that were admitted in between. Every token of a step is counted as computed by its
        end: steps run in the order of their scheduling.

        Args:
            ready: as ``ready`` has just found.
            max_decode_rows: leave further decoding rows to the next step, which can be prepared while this one runs.
        """
        step = Step()
        rows = _least_ahead((ready or self.ready()).rows, max_decode_rows)
        waits = self.cut is not None or self._next_waiting() is not None
        later = rows[1:] if waits and self._prefill_fills else []
        self._decode_rows(rows[: len(rows) - len(later)], step)
        num_decoding, num_pieces, num_actions = step.num_tokens, len(step.pieces), len(step.actions)
        budget = max(0, self.max_batch_tokens - num_decoding)
        if self.cut is not None:
            sequence, self.cut = self.cut, None
            budget = self._prefill(sequence, budget, step)
        while budget > 0 and len(self.running) < self.config.max_rows and self.cut is None:
            waiting = self._next_waiting()
            if waiting is None or not self._admit(waiting, step):
                break
            heapq.heappop(self._queue_of(waiting))
            budget = self._prefill(waiting, budget, step)
        self._prefill_fills = 2 * (step.num_tokens - num_decoding) >= self.max_batch_tokens
        if (len(step.pieces), len(step.actions)) == (num_pieces, num_actions):
            self._decode_rows(later, step)
        self._pin_next()
        for place, action in enumerate(step.actions):
            action.sequence.num_in_flight += 1
            action.sequence.place = place
        self.num_in_flight += len(step.actions)
        self.counters.steps += bool(step.actions or step.pieces)
        assert step.actions or step.pieces or self.num_in_flight or not self.has_unfinished, "somebody must advance"
        return step

    def land(self, step: Step) -> None:
        """The step's outputs are here; before they are acted on."""
        for action in step.actions:
            action.sequence.num_in_flight -= 1
            if action.sequence.lent[0]:
                self._take_back(action.sequence)
        self.num_in_flight -= len(step.actions)

    def num_tokens(self, ready: Ready) -> int:
        """Tokens that a step scheduled now could have, roughly; not more than a budget."""
        budget = self.max_batch_tokens
        if self.cut is not None or (self._next_waiting() is not None and len(self.running) < self.config.max_rows):
            return budget
        return min(budget, len(ready.rows))

    # --- decode ---

    def _decode_rows(self, rows: list[Sequence], step: Step) -> None:
        """As many of the rows as a step's budget has room for, and one at least; their forced runs may be long."""
        max_tokens = self.max_batch_tokens
        for num_left, sequence in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
            if step.num_tokens < max_tokens and self._decode_one(sequence, step):
                continue
            if step.num_tokens and step.num_tokens + sequence.num_to_feed > max_tokens:
                return
            is_here = sequence.node is not None and self._grow(sequence)  # else an earlier row made it pause
            if is_here and not self._decode_one(sequence, step):
                self._decode(sequence, step)
                self._probe(sequence, step, max_tokens - step.num_tokens - num_left)

    @staticmethod
    def _decode_one(sequence: Sequence, step: Step) -> bool:
        """The case of most rows, and of all in flight: one token is fed, and there is a slot for it. Else False."""
        tail_len = sequence.tail_len
        if tail_len >= len(sequence.tail_slots) or sequence.probe is not None or sequence.node is None:
            return False
        if sequence.num_in_flight:
            num_known = len(sequence.output_ids) - sequence.num_folded - tail_len
            assert num_known + sequence.num_in_flight == 1, "what is known is fed before what is not"
            tokens, source = [0], sequence.place
        else:
            tokens, source = sequence.output_ids[sequence.num_folded + tail_len :], None
            if len(tokens) != 1:
                return False
        position = len(sequence.ids) + tail_len
        sequence.tail_len = tail_len = tail_len + 1
        piece = Piece(sequence, tokens, position, tail_len=tail_len, source=source)
        step.add_single(piece, Action(sequence, piece, position))
        return True

    def _decode(self, sequence: Sequence, step: Step) -> None:
        """Feeds what was sampled, or forced by a constraint, and not fed yet."""
        tokens = sequence.output_ids[sequence.num_fed :]
        position = len(sequence.ids) + sequence.tail_len
        if not tokens:
            if sequence.probe is None:  # its choice is made, and its tokens are drawn one a step
                assert sequence.last_state is not None
                self._act(sequence, sequence.last_state, position - 1, step)
            return
        sequence.tail_len += len(tokens)
        piece = Piece(sequence, tokens, position, tail_len=sequence.tail_len)
        step.add(piece)
        row = StateRow(piece, len(tokens) - 1)
        if sequence.probe is not None:
            step.new_states.append(row)
        self._act(sequence, row, position + len(tokens) - 1, step)

    def _probe(self, sequence: Sequence, step: Step, budget: int) -> None:
        """Scores alternatives of the row's finite choice, as many as there is room for."""
        probe = sequence.probe
        if probe is None or not probe.min_len or (budget < probe.min_len and step.pieces):
            return
        budget = max(budget, probe.min_len)
        self._lend(sequence, min(budget, probe.num_waiting) - sequence.num_unused)
        add_heads(step, sequence, probe.heads(min(budget, sequence.num_unused)))

    def _lend(self, sequence: Sequence, num: int) -> None:
        """Gives the row up to ``num`` more slots until the step has landed, of those that are free for anybody."""
        num = min(num, self.pool.num_free, sequence.reserved + self._available())
        if num <= 0:
            return
        extents = self.pool.alloc(num)
        assert extents is not None
        sequence.grow_tail(extents)
        sequence.lent = (num, min(num, sequence.reserved))
        self._promise(sequence, sequence.reserved - sequence.lent[1])

    def _take_back(self, sequence: Sequence) -> None:
        num, num_promised = sequence.lent
        self.pool.free(sequence.shrink_tail(num))
        self._promise(sequence, sequence.reserved + num_promised)
        sequence.lent = (0, 0)

    def _grow(self, sequence: Sequence) -> bool:
        """Sees that the row has slots for the tokens it will feed; False when it had to pause instead."""
        missing = sequence.num_missing
        if missing <= 0:
            return True
        wanted = max(missing, min(sequence.next_run, sequence.tail_left - sequence.num_unused))
        while True:
            for num in (wanted, missing):
                if self._free_up(num):
                    extents = self.pool.alloc(num)
                    assert extents is not None
                    sequence.grow_tail(extents)
                    self._promise(sequence, max(0, sequence.reserved - num))
                    return True
            if not self._give_way(sequence):
                if not self.num_in_flight:
                    self._pause(sequence)
                return False

    def _free_up(self, num: int) -> bool:
        """Evicts until ``num`` slots are free; False if the cached ones do not suffice."""
        if self.pool.num_free < num:
            self.tree.evict(num - self.pool.num_free)
        return self.pool.num_free >= num

    def _give_way(self, sequence: Sequence) -> bool:
        """Takes slots from somebody for this row: the youngest after it, or for the head, from the plan's next path."""
        others = (*self.running, *([self.cut] if self.cut else []))
        younger = [s for s in others if s > sequence and not s.num_in_flight]
        if younger:
            self._pause(max(younger))
            return True
        return self._is_head(sequence) and self._next_path.unpin()

    def _is_head(self, sequence: Sequence) -> bool:
        others = (*self.running, *([self.cut] if self.cut else []), self._next_waiting())
        return all(other is None or other is sequence or sequence < other for other in others)

    def _pause(self, sequence: Sequence) -> None:
        """Drops the row's own slots and queues it again, with what it generated as part of its prompt."""
        if sequence is self.cut:
            self.cut = None
        else:
            self._stop_running(sequence)
        known = max(sequence.num_cached, sequence.num_computed) + sequence.tail_len
        sequence.high_water = max(sequence.high_water, known)
        self._drop_tail(sequence)
        self._unlock(sequence)
        prompt = sequence.request.prompt_ids
        if sequence.output_ids:
            sequence.ids = np.concatenate([prompt, np.array(sequence.output_ids, dtype=np.int32)])
            sequence.action_positions = [len(sequence.ids) - 1]
            sequence.num_folded = len(sequence.output_ids)
        sequence.num_computed = 0
        sequence.resumed = True
        heapq.heappush(self._follow_ups, sequence)

    # --- prefill ---

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        """Finds the row's prefix and gives it slots for the rest; False when there is no room yet."""
        node, matched = self.tree.match_prefix(sequence.ids)
        node = self.tree.cut(node, matched)
        assert node.num_computed == len(node.ids)
        suffix_len = len(sequence.ids) - matched
        full = self.config.reserve == "full" or sequence.resumed
        tail_left = sequence.tail_left
        expected = tail_left if full else int(self._expected_use.share(sequence.max_tail) * tail_left)
        promised = min(tail_left, max(TAIL_RUN, expected))
        self.tree.lock(node)
        while suffix_len + promised > self._available():
            alone = not step.pieces and not step.actions and not self.num_in_flight
            if not (alone and self._next_path.unpin()):
                assert not alone, "a row that was accepted must fit alone"
                self.tree.unlock(node)
                return False
        self._promise(sequence, promised)
        self._count_recomputed(sequence, matched)
        if suffix_len:
            assert self._free_up(suffix_len)
            extents = self.pool.alloc(suffix_len)
            assert extents is not None
            node = self.tree.extend_locked(node, sequence.ids[matched:], extents)
        sequence.node = node
        self._begin(sequence, matched, step)
        return True

    def _available(self) -> int:
        """Slots that are free or can be evicted, less those promised to running rows."""
        return self.pool.num_free + self.tree.num_cached - self._num_promised

    def _promise(self, sequence: Sequence, num: int) -> None:
        """From now on so many slots are kept for the row."""
        self._num_promised += num - sequence.reserved
        sequence.reserved = num

    def _begin(self, sequence: Sequence, matched: int, step: Step) -> None:
        """Acts on the states that the tree has kept; prefill starts after the match, or at the first state it lacks."""
        assert sequence.node is not None
        sequence.num_cached = sequence.num_computed = matched
        first = sequence.needed_from
        if sequence.own_successors:
            sequence.open_logprobs()
            first = sequence.first_unscored
        if matched <= first:
            return
        states = {node.end: node.end_state for node in sequence.node.path()}
        for position in sequence.actions_in(first, matched):
            state = states.get(position + 1)
            if state is None:
                sequence.num_computed = position
                return
            self._act(sequence, state, position, step)

    def _prefill(self, sequence: Sequence, budget: int, step: Step) -> int:
        """Puts the row's next tokens into the step; returns what is left of the budget."""
        start = sequence.num_computed
        end = min(len(sequence.ids), start + budget)
        if end > start:
            self._add_prefill_piece(sequence, start, end, step)
        sequence.num_computed = end
        if not sequence.is_prefilled:
            self.cut = sequence
        elif sequence.targets:
            self.scoring.add(sequence)
        else:
            insort(self.running, sequence)
        return budget - (end - start)

    def _add_prefill_piece(self, sequence: Sequence, start: int, end: int, step: Step) -> None:
        node, matched = sequence.node, sequence.num_cached
        assert node is not None
        num_again = max(0, min(end, matched) - start)
        scratch = np.full(num_again, self.config.num_slots, dtype=np.int64)
        new = node.slots[max(start, matched) - node.start : end - node.start] if end > matched else NO_SLOTS
        slots = np.concatenate([scratch, new])
        piece = Piece(sequence, sequence.ids[start:end], start, write_slots=slots)
        step.add(piece)
        if end > matched:
            node.num_computed = end - node.start
        for position in sequence.actions_in(start, end):
            if sequence.keeps_state(position):
                row = self._keep_state(sequence, piece, position, step)
            else:
                row = StateRow(piece, position - start)
            self._act(sequence, row, position, step)
        for position in sequence.state_positions:
            if start <= position < end and not sequence.acts_at(position):
                self._keep_state(sequence, piece, position, step)
        prompt_len = len(sequence.request.prompt_ids) if not sequence.targets else len(sequence.ids)
        self.counters.computed_prompt_tokens += max(0, min(end, prompt_len) - start)
        self.counters.recomputed_tokens += num_again

    def _keep_state(self, sequence: Sequence, piece: Piece, position: int, step: Step) -> StateRow:
        """A node ends at the position from now on and keeps its state: whoever needs it again computes nothing."""
        assert sequence.node is not None
        node = self.tree.cut(sequence.node, position + 1)
        node.end_state = row = StateRow(piece, position - piece.start)
        step.new_states.append(row)
        return row

    @staticmethod
    def _act(sequence: Sequence, row: StateRow, position: int, step: Step) -> None:
        targets: tuple[Target, ...] = sequence.targets.get(position, ())
        if sequence.probe is not None:
            targets, sequence.last_state = sequence.probe.root_targets, row
        step.actions.append(Action(sequence, row, position, targets))
        if sequence.own_successors and position + 1 < len(sequence.ids):
            sequence.expect_logprob(position + 1)

    def _count_recomputed(self, sequence: Sequence, matched: int) -> None:
        """Tokens that were in memory once and will be computed again."""
        known = sequence.high_water
        if sequence.request.follow_up:
            kept = self._kept.ids_of(sequence.request.program_id)
            known = max(known, 0 if kept is None else common_prefix_len(kept, sequence.ids))
        elif not sequence.resumed:
            known = max(sequence.shared_len, common_prefix_len(self._last_planned_ids, sequence.ids))
            self._last_planned_ids = sequence.ids
        self.counters.recomputed_tokens += max(0, known - matched)

    # --- the planned path ---

    def _pin_next(self) -> None:
        """Locks what the next rows will find, the planned one and the one that follows an earlier call, so that neither
        pruning nor eviction takes it."""
        queues = (self._planned, self._follow_ups)
        heads = [queue[0].ids for queue in queues if queue and not queue[0].resumed]
        if self.expects_more and not self._planned:
            heads.append(self._last_planned_ids)
        self._next_path.pin(heads)

    # --- what goes out ---

    def _stop_running(self, sequence: Sequence) -> None:
        place = bisect_left(self.running, sequence)
        assert self.running[place] is sequence, "running rows are sorted, and no two are equal"
        del self.running[place]

    def finish(self, sequence: Sequence) -> None:
        """A generating row is done: its slots stay for its program's next call, or go."""
        self._stop_running(sequence)
        # it may have run ahead with a token that turned out to be the end
        sequence.tail_len = min(sequence.tail_len, len(sequence.output_ids) - sequence.num_folded)
        self._expected_use.note(sequence.max_tail, sequence.num_fed)
        if sequence.request.keep or self.config.retain:
            self._keep(sequence)
        self._drop_tail(sequence)
        self._unlock(sequence)

    def finish_scored(self, sequence: Sequence) -> None:
        """A scored row's last outputs are here; what its program may extend is kept until the choice is decided."""
        self.scoring.remove(sequence)
        if sequence.request.keep and not sequence.alone and not sequence.own_successors:
            assert sequence.node is not None
            sequence.kept = sequence.node
            self.tree.keep(sequence.kept)
        self._unlock(sequence)

    def finish_choice(self, sequences: list[Sequence], chosen: Sequence) -> None:
        """All rows of one choice are scored, and it is decided."""
        for sequence in sequences:
            node, sequence.kept = sequence.kept, None
            if node is None:
                continue
            if sequence is chosen:
                self._kept.take_over(sequence.request.program_id, node, sequence.ids)
            else:
                self._kept.drop(node)

    def _keep(self, sequence: Sequence) -> None:
        """Moves the tail's slots into the tree below the prompt."""
        known = np.concatenate([sequence.request.prompt_ids, np.array(sequence.output_ids, dtype=np.int32)])
        ids = known[: len(sequence.ids) + sequence.tail_len]
        node, matched = self.tree.match_prefix(ids)
        if matched > node.start + node.num_computed:  # the rest is the cut row's to compute, and stays its own
            ids = ids[: node.start + node.num_computed]
            matched = len(ids)
        node = self.tree.cut(node, matched)
        if matched < len(ids):
            mine, unused = split_extents(sequence.tail, sequence.tail_len)
            duplicate, new = split_extents(mine, matched - len(sequence.ids))
            sequence.tail = duplicate + unused
            node = self.tree.insert(node, ids[matched:], new, len(ids) - matched)
        if sequence.request.keep:
            self._kept.keep(sequence.request.program_id, node, ids)

    def finish_program(self, program_id: int) -> None:
        """The program makes no further call: what was kept for it may go."""
        self._kept.finish_program(program_id)

    def _drop_tail(self, sequence: Sequence) -> None:
        self.pool.free(sequence.drop_tail())
        self._promise(sequence, 0)

    def _unlock(self, sequence: Sequence) -> None:
        node, sequence.node = sequence.node, None
        assert node is not None
        self.tree.unlock(node)
        if node.num_computed < len(node.ids):
            node = self._drop_uncomputed(node)
        if not self.config.retain:
            self.tree.prune(node)

    def _drop_uncomputed(self, node: RadixNode) -> RadixNode:
        """A paused row's half-prefilled node: only the computed half may stay for others to find."""
        computed = self.tree.cut(node, node.start + node.num_computed)
        self.tree.remove_leaf(node)
        return computed

    # --- checking ---

    def check_integrity(self) -> None:
        """Every slot is free, cached or in use, exactly one of them."""
        rows = [*self.running, *self.scoring, *([self.cut] if self.cut else [])]
        assert self._num_promised == sum(s.reserved for s in rows)
        self.tree.check_integrity(sum(e.length for s in rows for e in s.tail))
