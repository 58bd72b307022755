"""Rows that run ahead among all others, in small memories: they answer as an engine that knows every token does."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.engine.decision import Pending, decide
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.passes import Pending as InFlight
from sglbatch.engine.sampler import Sampling
from sglbatch.engine.scheduler import SchedulerConfig
from sglbatch.engine.sequence import Step
from sglbatch.types import Choose, Constraint, Generate, Operation, Request, Result
from tests.engine_stub import StubRunner, StubTokenizer, ids

VOCAB = 8
"""So few tokens that many answers end by themselves, or in a stop string."""


@lru_cache(1 << 16)
def logits_after(prefix: tuple[int, ...]) -> list[float]:
    return [zlib.crc32(repr((prefix, token)).encode()) % 1000 / 150 for token in range(VOCAB)]


class SmallTokenizer(StubTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = VOCAB
        self.token_bytes = self.token_bytes[:VOCAB]

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 64 for character in text]


class DrawingRunner(StubRunner):
    """Draws as a model does; out of memory in steps of more than ``limit`` tokens."""

    def __init__(self, num_slots: int, most_rows: int, limit: int) -> None:
        super().__init__(num_slots)
        self.most_rows = most_rows
        self.limit = limit

    def launch(  # type: ignore[override]
        self, step: Step, samplings: Sequence[Sampling | None], before: InFlight | None
    ) -> Pending:
        if max(step.num_tokens, len(step.actions)) > self.limit:
            raise torch.OutOfMemoryError
        self.take_tokens(step, before)
        if step.pieces:
            self._forward(step)
        pending = Pending(len(step.actions))
        for begin in range(0, len(step.actions), 3):
            actions = step.actions[begin : begin + 3]
            logits_RV = torch.tensor([logits_after(action.row.stored) for action in actions])
            decide(pending, begin, logits_RV, [a.targets for a in actions], samplings[begin : begin + 3])
        return pending


@dataclass
class Chat:
    """Calls that follow one another: what each adds to the text so far, and what it asks."""

    turns: list[tuple[list[int], Operation]]
    text: list[int] = field(default_factory=list)
    num_asked: int = 0

    @property
    def largest(self) -> int:
        """Slots for everything that it can come to."""
        return sum(len(more) + most_tokens(operation) for more, operation in self.turns)

    def ask(self, number: int, *, keep: bool) -> Request:
        more, operation = self.turns[self.num_asked]
        self.text += more
        self.num_asked += 1
        return Request(
            request_id=number,
            program_id=number,
            prompt_ids=ids(self.text),
            operation=operation,
            seed=number,
            priority=(number, self.num_asked),
            keep=keep and self.num_asked < len(self.turns),
            follow_up=self.num_asked > 1,
        )

    def take(self, result: Result) -> None:
        _, operation = self.turns[self.num_asked - 1]
        if isinstance(operation, Choose):
            assert result.choice is not None
            self.text += operation.alternatives[result.choice]
        else:
            self.text += result.output_ids


def most_tokens(operation: Operation) -> int:
    return operation.max_tokens if isinstance(operation, Generate) else sum(map(len, operation.alternatives))


def answers(engine: LocalEngine, chats: Sequence[Chat], *, keep: bool) -> list[tuple[object, ...]]:
    """All results, by chat and turn; slots are checked after every step, and that there are not too many."""
    engine.submit([chat.ask(i, keep=keep) for i, chat in enumerate(chats)])
    steps_left = 1000 + 50 * sum(chat.largest for chat in chats)
    found = []
    while engine.has_unfinished:
        steps_left -= 1
        assert steps_left, "the engine goes round in circles"
        for result in engine.step():
            chat = chats[result.request_id]
            chat.take(result)
            scores = (*result.output_logprobs, *((p, 0) for p in result.choice_logprobs or ()))
            rounded = tuple((None if value is None else round(value, 3), token) for value, token in scores)
            place = (result.request_id, chat.num_asked)
            found.append((place, result.text, result.output_ids, result.finish_reason, result.usage, rounded))
            if chat.num_asked < len(chat.turns):
                engine.submit([chat.ask(result.request_id, keep=keep)])
            else:
                engine.finish_program(result.request_id)
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.config.num_slots or engine.scheduler.config.retain
    return sorted(found, key=lambda one: one[0])


TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=8)
PLAIN = st.builds(
    Generate,
    max_tokens=st.one_of(st.integers(1, 3), st.integers(1, 30)),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    stop=st.sampled_from([(), ("A",), ("BC", "D")]),
    stop_token_ids=st.sampled_from([(), (5,)]),
    ignore_eos=st.booleans(),
)
WAITING = st.builds(
    Generate,
    max_tokens=st.integers(1, 8),
    temperature=st.just(0.0),
    num_top_logprobs=st.sampled_from([None, 0, 2]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
)
CONSTRAINED = st.builds(
    Generate,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
    constraint=st.sampled_from(["[A-C]{2,5}", "(AB|AC|B)(D|EF)", "A|AB"]).map(
        lambda source: Constraint(kind="regex", source=source)
    ),
    exact_choices=st.booleans(),
)
CHOOSE = st.just(Choose(alternatives=((1, 2), (1, 3, 3), (4,))))
TURN = st.tuples(TOKENS, st.one_of(PLAIN, PLAIN, WAITING, CONSTRAINED, CHOOSE))


@contextmanager
def small_numbers() -> Iterator[pytest.MonkeyPatch]:
    """Limits that few short rows reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglbatch.engine.engine.MIN_RESULTS", 1)
        patch.setattr("sglbatch.engine.expected_use.MIN_FINISHED", 0)
        patch.setattr("sglbatch.engine.passes.MIN_PASS_TOKENS", 2)
        yield patch


def small_engine(runner: DrawingRunner, config: SchedulerConfig, *, overlap: bool) -> LocalEngine:
    return LocalEngine(
        runner,
        SmallTokenizer(),  # type: ignore[arg-type]
        identity="stub",
        context_len=10_000,
        scheduler_config=config,
        overlap=overlap,
    )


@pytest.fixture(scope="module")
def small_numbers_count() -> Iterator[None]:
    with small_numbers() as patch:
        patch.setattr("sglbatch.engine.scheduler.TAIL_RUN", 2)
        patch.setattr("sglbatch.engine.sequence.TAIL_RUN", 2)
        yield


@settings(max_examples=80, deadline=None)
@given(
    turns=st.lists(st.lists(TURN, min_size=1, max_size=3), min_size=1, max_size=8),
    extra=st.sampled_from([0, 3, 40, 1000]),
    most_rows=st.sampled_from([1, 3, 100]),
    min_overlap=st.sampled_from([1, 3, 256]),
    limit=st.sampled_from([3, 8, 1000, 1000]),
    keep=st.booleans(),
    retain=st.booleans(),
    max_batch_tokens=st.sampled_from([3, 16, 64]),
)
@pytest.mark.usefixtures("small_numbers_count")
def test_answers_are_the_same(  # noqa: PLR0917
    turns: list[list[tuple[list[int], Operation]]],
    extra: int,
    most_rows: int,
    min_overlap: int,
    limit: int,
    keep: bool,
    retain: bool,
    max_batch_tokens: int,
) -> None:
    def ask(num_slots: int, limit: int, overlap: bool, config: SchedulerConfig) -> list[tuple[object, ...]]:
        engine = small_engine(DrawingRunner(num_slots, most_rows, limit), config, overlap=overlap)
        return answers(engine, [Chat(turns=chat) for chat in turns], keep=keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglbatch.engine.engine.MIN_OVERLAP_TOKENS", min_overlap)
        many = SchedulerConfig(num_slots=5000, max_batch_tokens=1000, max_rows=100)
        num_slots = extra + max(Chat(turns=chat).largest for chat in turns)
        few = SchedulerConfig(num_slots=num_slots, max_batch_tokens=max_batch_tokens, max_rows=30, retain=retain)
        assert ask(num_slots, limit, True, few) == ask(5000, 10_000, False, many)
