"""Masks over the vocabulary, packed."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bitmask: TypeAlias = npt.NDArray[np.int32]
"""int32 [ceil(vocab_size / 32)], read-only: bit v % 32 (from the lowest) of word v // 32 stands for token v."""


def allowed_ids(mask: Bitmask) -> npt.NDArray[np.int64]:
    """The ids whose bit is set, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def single_bit(token_id: int, num_words: int) -> Bitmask:
    """The mask that allows one token."""
    mask = np.zeros(num_words, dtype=np.uint32)
    mask[token_id // 32] = 1 << (token_id % 32)
    return mask.view(np.int32)


def pack_ids(token_ids: list[int], num_words: int) -> Bitmask:
    """The mask that allows these tokens."""
    bits = np.zeros(num_words * 32, dtype=np.bool_)
    bits[token_ids] = True
    mask: Bitmask = np.packbits(bits, bitorder="little").view("<i4")
    return mask
