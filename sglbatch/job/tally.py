"""Counting finished rows, and noticing when all of them fail."""

from __future__ import annotations

from collections import Counter
from typing import Final

from sglbatch.errors import EXIT_RESUMABLE
from sglbatch.job.report import ErrorGroup
from sglbatch.job.rows import FinishedRow
from sglbatch.job.signals import Stopped
from sglbatch.lang.schemas import INVALID_VALUE
from sglbatch.types import ErrorInfo

BREAKER_ROWS: Final = 200


class Tally:
    """Counts of one run."""

    def __init__(self) -> None:
        self.num_kept = 0
        self.num_ended = 0
        self.num_failed = 0
        self.num_hit_max_tokens = 0
        self._codes: Counter[str] = Counter()
        self._first: dict[str, tuple[int, str]] = {}

    @property
    def num_done(self) -> int:
        return self.num_kept + self.num_ended

    @property
    def num_invalid(self) -> int:
        """Rows whose error is that a finished value failed its validation."""
        return self._codes[INVALID_VALUE]

    def keep(self, row: FinishedRow) -> None:
        """Counts a sound row of an earlier run."""
        assert row.error is None
        self.num_kept += 1
        self.num_hit_max_tokens += row.cut

    def count(self, row: FinishedRow) -> None:
        """Counts a row of this run."""
        self.num_ended += 1
        self.num_hit_max_tokens += row.cut
        if row.error is not None:
            self.num_failed += 1
            self._codes[row.error.code] += 1
            first = self._first.get(row.error.code)
            if first is None or row.index + 1 < first[0]:  # rows end in any order
                self._first[row.error.code] = (row.index + 1, row.error.message)

    def check(self) -> None:
        """The breaker: raises Stopped when the first 200 rows have all failed."""
        if self.num_failed == self.num_ended == BREAKER_ROWS:
            top = self.errors[0]
            raise Stopped(
                EXIT_RESUMABLE,
                f"the first {BREAKER_ROWS} rows all failed, {top.count} of them with {top.code}: {top.sample}",
            )

    @property
    def errors(self) -> tuple[ErrorGroup, ...]:
        """Most frequent first."""
        return tuple(
            ErrorGroup(code=code, count=count, first_row=self._first[code][0], sample=self._first[code][1])
            for code, count in self._codes.most_common()
        )

    @property
    def error_infos(self) -> list[ErrorInfo]:
        """One for each failed row, as the planner counts them."""
        return [ErrorInfo(code=group.code, message=group.sample) for group in self.errors for _ in range(group.count)]
