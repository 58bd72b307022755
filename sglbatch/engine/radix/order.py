"""Depth-first order of a set of prompts, without building their radix tree.

Sorting prompts by their token ids, a prompt before its extensions, visits the leaves of their radix tree
depth-first, and the longest common prefix of neighbours is the depth of the node at which the walk turns. So two
integers a prompt stand for the whole tree: the walk adds ``len_i - lcp_i`` tokens at prompt i, and the sum of those is
the number of tokens in the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from sglbatch.engine.radix.tree import common_prefix_len
from sglbatch.types import TokenIds

Order: TypeAlias = npt.NDArray[np.int64]
Lengths: TypeAlias = npt.NDArray[np.int32]

KEY_TOKENS: Final = 1 << 23
"""Tokens held as sort keys at one time: 32 MiB of key bytes."""

MIN_CHUNK_LEN: Final = 16
"""Tokens a prompt contributes to one round of sorting when there are very many prompts."""


def depth_first_order(prompts: Sequence[TokenIds], *, key_tokens: int = KEY_TOKENS) -> tuple[Order, Lengths]:
    """Order ``prompts`` depth-first over their radix tree.

    Args:
        prompts: N arrays of non-negative token ids, int32 [prompt_len]; lengths may differ and may be zero.
        key_tokens: how many tokens may be held as sort keys at one time, which bounds the extra memory.

    Returns:
        order int64 [N], the input index of the i-th prompt, equal prompts in input order; and lcp int32 [N], how many
        tokens prompt ``order[i]`` has in common with ``order[i - 1]``, with ``lcp[0] == 0``.
    """
    order = np.fromiter(_sorted_indices(prompts, key_tokens), dtype=np.int64, count=len(prompts))
    return order, neighbour_lcp(prompts, order)


def neighbour_lcp(prompts: Sequence[TokenIds], order: Order) -> Lengths:
    """The longest common prefix of each prompt with the one before it in ``order``: int32 [N], the first is 0."""
    lcp = np.zeros(len(order), dtype=np.int32)
    previous: TokenIds = np.empty(0, dtype=np.int32)
    for place, index in enumerate(order.tolist()):
        current = prompts[index]
        lcp[place] = common_prefix_len(previous, current)
        previous = current
    return lcp


def _sorted_indices(prompts: Sequence[TokenIds], key_tokens: int) -> Iterator[int]:
    """Input indices in order: sort by a chunk of tokens, then split what is still tied by the next chunk.

    The chunk is as long as the memory for keys allows, so an ordinary job is one call of ``sorted``; ties that remain
    after a chunk are sorted again further right, with longer chunks the fewer they are.
    """
    pending: list[tuple[list[int], int, bool]] = [(list(range(len(prompts))), 0, False)]
    while pending:
        tied, depth, closed = pending.pop()
        if closed or len(tied) <= 1:
            yield from tied
            continue
        chunk_len = max(MIN_CHUNK_LEN, key_tokens // len(tied))
        groups = [(group, depth + chunk_len, ended) for group, ended in _split(prompts, tied, depth, chunk_len)]
        pending.extend(reversed(groups))  # a stack: the first group has to come off first


def _split(
    prompts: Sequence[TokenIds], tied: list[int], depth: int, chunk_len: int
) -> Iterator[tuple[list[int], bool]]:
    """Sort ``tied`` by tokens [depth, depth + chunk_len) and cut the result into runs of equal keys.

    Gives (indices, ended); ended means that these equal prompts end inside the chunk, so nothing is left to compare.
    """
    end = depth + chunk_len
    # Unsigned big-endian words compare as bytes the way token ids compare as numbers, and a prefix comes first.
    keys = [prompts[index][depth:end].astype(">u4").tobytes() for index in tied]
    ranked = sorted(range(len(tied)), key=keys.__getitem__)  # stable: equal prompts stay in input order
    start = 0
    for stop in range(1, len(ranked) + 1):
        if stop == len(ranked) or keys[ranked[stop]] != keys[ranked[start]]:
            yield [tied[rank] for rank in ranked[start:stop]], len(keys[ranked[start]]) < 4 * chunk_len
            start = stop
