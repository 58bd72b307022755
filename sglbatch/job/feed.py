"""A job's first calls in the plan's order, tokenised slab by slab as they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

from sglbatch.lang.calls import PendingCall
from sglbatch.lang.driver import Driver, Question
from sglbatch.planner import cut_slabs, slab_order
from sglbatch.types import TokenIds

MIN_SLAB: Final = 192
MAX_SLAB: Final = 320
"""Calls of a slab: tokenising one takes a fraction of a step in which a GPU computes what is new in a hundred."""

FIRST_SHARES: Final = (3, 1.5)
"""The first slabs are so many times smaller: nothing is computed beside the first, and only a short step beside the
second, which has to wait for all texts to be ordered."""

SLAB_CHARS: Final = 2_000_000
"""Of long prompts so many characters make a slab, on average."""


class Feed:
    """What the programs of a driver have asked for, a slab at a time.

    Args:
        in_slabs: else everything is one slab.

    Attributes:
        is_done: nothing is left.
    """

    def __init__(self, driver: Driver, *, in_slabs: bool) -> None:
        self._driver = driver
        self._in_slabs = in_slabs
        self._slabs = self._resolved()
        self._calls: list[PendingCall] = []
        self.is_done = False

    def next_slab(self) -> list[PendingCall]:
        """The calls of the next slab that have to be made, in their order; none where all of it is answered already."""
        slab = next(self._slabs, None)
        driver = self._driver
        # Seen with the last slab already: a backend that answers all of it at once is not asked for another step.
        self.is_done = slab is None or not (driver.num_held or driver.asked or driver.num_waiting_outside)
        self._calls += slab or []
        return slab or []

    @cached_property
    def all_calls(self) -> list[PendingCall]:
        """The calls of all slabs, in the order of the input."""
        assert self.is_done
        return sorted(self._calls, key=lambda call: (call.program_ids[0], call.path))

    def _resolved(self) -> Iterator[list[PendingCall]]:
        before: TokenIds | None = None
        while questions := self._driver.hold():
            for slab, following in self._cut(questions):
                self._driver.release(slab)
                new = self._driver.collect()
                if new:
                    after = None if following is None else self._driver.prompt_ids(following)
                    new = _ordered(new, before, after)
                    before = new[-1].prompt_ids
                yield new
            if not self._driver.num_submitted:
                self._driver.settle_outside()  # answers of an earlier run may have led to them

    def _cut(self, questions: Sequence[Question]) -> Iterator[tuple[list[Question], Question | None]]:
        """Slabs of questions, each with the first of the next one."""
        if not self._in_slabs:
            yield list(questions), None
            return
        texts = [question.call.order_text for question in questions]
        most = SLAB_CHARS * len(texts) // max(1, sum(map(len, texts)))
        max_len = max(1, min(MAX_SLAB, most))
        min_len = max(1, max_len * MIN_SLAB // MAX_SLAB)
        for slab, following in cut_slabs(texts, min_len=min_len, max_len=max_len, first_shares=FIRST_SHARES):
            yield [questions[i] for i in slab], None if following is None else questions[following]


def _ordered(calls: Sequence[PendingCall], before: TokenIds | None, after: TokenIds | None) -> list[PendingCall]:
    order = slab_order([call.prompt_ids for call in calls], before=before, after=after, last=len(calls) - 1)
    return [calls[i] for i in order.tolist()]
