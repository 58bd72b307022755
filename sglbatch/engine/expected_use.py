"""How much of its most generated tokens a row is expected to use, by what rows like it have used."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

MIN_FINISHED = 64
"""Rows that must have finished before less than all is expected."""
MARGIN = 1.15
"""So much more than rows have used on average is expected."""


@dataclass(slots=True)
class _Finished:
    """Rows that have finished, and how many generated tokens they had in memory."""

    num_rows: int = 0
    tail: int = 0


class ExpectedUse:
    """Kept by most generated tokens: other limits mean other calls, which use other shares of them."""

    def __init__(self) -> None:
        self._finished: dict[int, _Finished] = defaultdict(_Finished)

    def note(self, max_tail: int, tail: int) -> None:
        """A row that could have had ``max_tail`` generated tokens in memory has finished with ``tail``."""
        like = self._finished[max_tail]
        like.num_rows += 1
        like.tail += tail

    def share(self, max_tail: int) -> float:
        """Of ``max_tail``, 0 to 1; 1 as long as few like it have finished."""
        like = self._finished[max_tail]
        if like.num_rows < MIN_FINISHED:
            return 1.0
        return min(1.0, MARGIN * like.tail / max(1, max_tail * like.num_rows))
