"""The numbers of rows that a GPU's products are prepared for."""

from __future__ import annotations

from typing import Final

ROW_STEP: Final = 128
"""Graphs are captured, products timed and their kernels loaded for multiples of this, the height of products' tiles.

cuBLAS has many kernels for few rows, and the driver, which loads a kernel when it is first needed, waits until the
device has nothing left to do. For these numbers all are loaded before the first step.
"""


def rounded_up(num_rows: int) -> int:
    """The least multiple of ROW_STEP that has room for so many rows."""
    return -(-num_rows // ROW_STEP) * ROW_STEP
