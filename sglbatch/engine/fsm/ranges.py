"""One numpy idiom that the automaton and the vocabulary share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def concatenated_ranges(starts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """``arange(start, start + count)`` of every pair, one after another: int64 [counts.sum()]."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    within: npt.NDArray[np.int64] = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return within
