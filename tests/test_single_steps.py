"""Steps of one token a row, which are flattened from what rows remember: each sees its tree path and its own tail.

Rows pause and come back, nodes are split and evicted, slots are lent to probes, and mixed steps lie between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.engine.batch import FlatBatch, flatten
from sglbatch.engine.radix.slots import slot_ids
from sglbatch.engine.scheduler import SchedulerConfig
from sglbatch.engine.sequence import Piece, Step
from sglbatch.types import Generate, Operation
from tests.test_run_ahead_mixed import (
    CHOOSE,
    CONSTRAINED,
    PLAIN,
    WAITING,
    Chat,
    DrawingRunner,
    answers,
    small_engine,
    small_numbers,
)

Seen: TypeAlias = "list[list[tuple[int, int]]]"
"""Of each row the (slot, position) pairs that it attends to, in order."""


def seen_by_path(pieces: list[Piece]) -> Seen:
    """From the tree and the tails alone."""
    seen = []
    for piece in pieces:
        slots = [slot for node in piece.path for slot in slot_ids(node.extents).tolist()]
        slots += slot_ids(piece.sequence.tail).tolist()[: piece.tail_len]
        seen.append(sorted(zip(slots, range(piece.start + 1), strict=True)))
    return seen


def seen_in(batch: FlatBatch) -> Seen:
    assert not batch.causal and not batch.trees
    seen: Seen = [[] for _ in batch.input_ids]
    for work in batch.shared:
        for row in range(work.q_start, work.q_end):
            seen[row] += [(slot, work.position + i) for i, slot in enumerate(work.slots.tolist())]
    singles = batch.singles
    listed = iter(zip(singles.slots.tolist(), singles.positions.tolist(), strict=True))
    for row, num in zip(singles.rows.tolist(), singles.lens.tolist(), strict=True):
        seen[row] += [next(listed) for _ in range(num)]
    return [sorted(pairs) for pairs in seen]


def slots_in(seen: Seen) -> list[list[int]]:
    return [[slot for slot, _ in pairs] for pairs in seen]


def works_in(batch: FlatBatch) -> list[tuple[int, int, int, list[int]]]:
    return sorted((work.q_start, work.q_end, work.position, work.slots.tolist()) for work in batch.shared)


class CheckingRunner(DrawingRunner):
    """Flattens each step of single tokens by what rows remember, and at times as any other step too."""

    num_checked = 0
    num_sharing = 0

    def _forward(self, step: Step) -> None:
        if step.is_single:
            with_positions = self.num_tokens % 2 == 0
            for positions_count in (with_positions, not with_positions):
                self._check(step.pieces, positions_count)
        super()._forward(step)

    def _check(self, pieces: list[Piece], with_positions: bool) -> None:
        step, other = Step(), Step()
        other.pieces = step.pieces = pieces
        other.num_tokens = step.num_tokens = step.num_single = len(pieces)
        step.actions = [None] * len(pieces)  # type: ignore[list-item]
        assert step.is_single and not other.is_single
        batches = [flatten(step, with_positions=with_positions, share_prefill=False)]
        if self.num_tokens % 3 == 0:  # what rows remember is replaced by this, so not always
            batches.append(flatten(other, with_positions=with_positions, share_prefill=False))
            assert works_in(batches[0][0]) == works_in(batches[1][0])
        expected = seen_by_path(pieces)
        for batch, offsets in batches:
            seen = seen_in(batch)
            assert seen == expected if with_positions else slots_in(seen) == slots_in(expected)
            assert batch.positions.tolist() == [piece.start for piece in pieces]
            assert batch.write_slots.tolist() == [int(slot_ids(p.sequence.tail)[p.tail_len - 1]) for p in pieces]
            assert offsets == {id(piece): i for i, piece in enumerate(pieces)}
        CheckingRunner.num_checked += len(pieces) > 1
        CheckingRunner.num_sharing += bool(batches[0][0].shared)


PROMPT = st.builds(
    lambda common, own: [*common, *own],
    st.sampled_from([[], [1] * 6, [1] * 6 + [2] * 4, [1] * 12]),
    st.lists(st.integers(1, 3), min_size=1, max_size=12),
)
LONG = st.builds(Generate, max_tokens=st.integers(2, 40), temperature=st.just(0.0), ignore_eos=st.just(True))
TURN = st.tuples(PROMPT, st.one_of(LONG, LONG, LONG, PLAIN, WAITING, CONSTRAINED, CHOOSE))


@pytest.fixture(scope="module")
def small_numbers_count() -> Iterator[None]:
    with small_numbers() as patch:
        patch.setattr("sglbatch.engine.batch.MIN_SHARED_ROWS", 2)
        yield
    assert CheckingRunner.num_checked > 20 and CheckingRunner.num_sharing > 5


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(st.lists(TURN, min_size=1, max_size=2), min_size=3, max_size=12),
    extra=st.sampled_from([0, 10, 40, 1000, 1000]),
    most_rows=st.sampled_from([1, 3, 100]),
    limit=st.sampled_from([3, 1000, 1000]),
    keep=st.booleans(),
    retain=st.booleans(),
    max_batch_tokens=st.sampled_from([3, 16, 200]),
    max_rows=st.sampled_from([2, 3, 30]),
    min_shared=st.sampled_from([1, 2, 5]),
    tail_run=st.sampled_from([1, 2, 16]),
)
@pytest.mark.usefixtures("small_numbers_count")
def test_each_row_sees_its_path_and_its_tail(  # noqa: PLR0917
    turns: list[list[tuple[list[int], Operation]]],
    extra: int,
    most_rows: int,
    limit: int,
    keep: bool,
    retain: bool,
    max_batch_tokens: int,
    max_rows: int,
    min_shared: int,
    tail_run: int,
) -> None:
    num_slots = extra + max(Chat(turns=chat).largest for chat in turns)
    config = SchedulerConfig(num_slots=num_slots, max_batch_tokens=max_batch_tokens, max_rows=max_rows, retain=retain)
    engine = small_engine(CheckingRunner(num_slots, most_rows, limit), config, overlap=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglbatch.engine.engine.MIN_OVERLAP_TOKENS", 3)
        patch.setattr("sglbatch.engine.batch.MIN_SHARED_TOKENS", min_shared)
        patch.setattr("sglbatch.engine.scheduler.TAIL_RUN", tail_run)
        patch.setattr("sglbatch.engine.sequence.TAIL_RUN", tail_run)
        answers(engine, [Chat(turns=chat) for chat in turns], keep=keep)
