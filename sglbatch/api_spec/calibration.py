"""Estimates held against rows that have been answered: real usage says more than any guess. Pure.

The ratio estimator of survey sampling: what answered rows have really cost, over what their dry run expected, carries
over to the rows that are left; its standard error says how far to trust it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

MIN_ROWS: Final = 8
ERRORS: Final = 3.0
"""Standard errors on each side."""
MARGIN: Final = 0.05
"""Beyond them, for rows that differ from those answered first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """What to multiply an expected cost by."""

    low: float
    middle: float
    high: float


def real_over_expected(real: Sequence[float], expected: Sequence[float]) -> Ratio | None:
    """The ratio of all rows to come from those answered; None where they are too few to say."""
    number, total = len(real), sum(expected)
    if number < MIN_ROWS or total <= 0:
        return None
    middle = sum(real) / total
    squares = sum((r - middle * e) ** 2 for r, e in zip(real, expected, strict=True))
    error = sqrt(squares * number / (number - 1)) / total
    return Ratio(
        low=max(0.0, middle - ERRORS * error) * (1 - MARGIN),
        middle=middle,
        high=(middle + ERRORS * error) * (1 + MARGIN),
    )
