"""Sets of Unicode characters, and the UTF-8 byte sequences that stand for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points as sorted, disjoint, non-adjacent inclusive ranges."""

ByteRanges: TypeAlias = tuple[tuple[int, int], ...]
"""One inclusive range for each byte of a UTF-8 sequence."""

MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)

_LENGTH_BLOCKS = ((0x0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, MAX_CODE_POINT))
"""Blocks in which every character has a UTF-8 form, and all of one length."""

_FIRST_TAIL, _LAST_TAIL = 0x80, 0xBF


def normalise(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort and merge ranges that touch or overlap."""
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Every code point that is not in ``ranges`` (which must be normalised)."""
    gaps: list[tuple[int, int]] = []
    start = 0
    for lo, hi in ranges:
        if start < lo:
            gaps.append((start, lo - 1))
        start = hi + 1
    if start <= MAX_CODE_POINT:
        gaps.append((start, MAX_CODE_POINT))
    return tuple(gaps)


def utf8_sequences(ranges: Ranges) -> tuple[ByteRanges, ...]:
    """Disjoint sequences of byte ranges that match exactly the UTF-8 forms of ``ranges``.

    Surrogates have no UTF-8 form and are left out (RFC 3629).
    """
    sequences: list[ByteRanges] = []
    for lo, hi in ranges:
        for block_lo, block_hi in _LENGTH_BLOCKS:
            first, last = max(lo, block_lo), min(hi, block_hi)
            if first <= last:
                sequences += _split(chr(first).encode(), chr(last).encode())
    return tuple(sequences)


def _split(lo: bytes, hi: bytes) -> list[ByteRanges]:
    """Sequences for all byte strings from ``lo`` to ``hi``: equal lengths, tails within 80..BF."""
    if len(lo) == 1:
        return [((lo[0], hi[0]),)]
    if lo[0] == hi[0]:
        return [((lo[0], lo[0]), *tail) for tail in _split(lo[1:], hi[1:])]
    tail_len = len(lo) - 1
    first_tail, last_tail = bytes([_FIRST_TAIL]) * tail_len, bytes([_LAST_TAIL]) * tail_len
    sequences: list[ByteRanges] = []
    start, end = lo[0], hi[0]
    if lo[1:] != first_tail:
        sequences += [((start, start), *tail) for tail in _split(lo[1:], last_tail)]
        start += 1
    if hi[1:] != last_tail:
        sequences += [((end, end), *tail) for tail in _split(first_tail, hi[1:])]
        end -= 1
    if start <= end:
        sequences.append(((start, end), *(((_FIRST_TAIL, _LAST_TAIL),) * tail_len)))
    return sequences
