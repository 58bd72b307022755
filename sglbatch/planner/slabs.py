"""A job's first calls in slabs, so that the first can run while the others are still tokenised.

The order of texts is the depth-first order of the tree of their characters, and that of their tokens but for places
where a token spans a branch. So texts are ordered globally and cut into slabs, and the tokens of a slab order it
anew. A node of the token tree that lies across a cut is computed once if its requests still stand side by side: a slab
begins with what shares most with the slab before, and ends with what shares most with the one behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from itertools import chain, repeat
from math import ceil

import numpy as np
import numpy.typing as npt

from sglbatch.engine.radix.order import depth_first_order
from sglbatch.shared_text import common_len
from sglbatch.types import TokenIds


def cut_slabs(
    texts: Sequence[str], *, min_len: int, max_len: int, first_shares: Sequence[float] = ()
) -> Iterator[tuple[list[int], int | None]]:
    """The indices of ``texts`` in their order, in slabs, each with the first index of the next one.

    A slab has ``min_len`` to ``max_len`` texts, and ends where neighbours have least in common. Equal texts stay
    together, whatever their number. The first slabs have that many divided by ``first_shares``, the last one what is
    left, at most ``max_len``. The first is there before all texts have been ordered.
    """
    assert 1 <= min_len <= max_len and all(share >= 1 for share in first_shares)
    sizes = ((ceil(min_len / share), ceil(max_len / share)) for share in chain(first_shares, repeat(1)))
    (low, high), begin = next(sizes), 0
    if len(texts) > max_len:
        head = nsmallest(high + 1, range(len(texts)), key=texts.__getitem__)
        end = _best_cut(texts, head, low, high)
        if end < len(head):
            yield head[:end], head[end]
            (low, high), begin = next(sizes), end
    order = sorted(range(len(texts)), key=texts.__getitem__)
    while begin < len(order):
        end = len(order)
        if end - begin > max_len:
            end = _best_cut(texts, order, begin + low, begin + high)
        yield order[begin:end], order[end] if end < len(order) else None
        (low, high), begin = next(sizes), end


def _best_cut(texts: Sequence[str], order: Sequence[int], low: int, high: int) -> int:
    """The first of the places ``low`` to ``high`` whose neighbours share least; behind ``high`` if all are equal."""
    best, least = 0, -1
    for place in range(low, len(order)):
        left, right = texts[order[place - 1]], texts[order[place]]
        if left != right:
            shared = common_len(left, right)
            if least < 0 or shared < least:
                best, least = place, shared
        if place >= high and least >= 0:
            return best
    return best if least >= 0 else len(order)


def slab_order(
    prompts: Sequence[TokenIds], *, before: TokenIds | None, after: TokenIds | None, last: int | None = None
) -> npt.NDArray[np.int64]:
    """A depth-first order of a slab that goes on from the slab before it and leads over to the next.

    Below where the paths to ``before`` and ``after`` part: at each node of the first the branch of that path comes
    first, at each node of the second its branch comes last. Elsewhere branches are in the order of token ids.

    Args:
        prompts: int32 [prompt_len] each.
        before: the last prompt of the slab before; None begins anew.
        after: the first prompt by text of the next slab; None is the end.
        last: index of the last prompt by text; its branch comes last where ``after`` does not say.

    Returns:
        int64 [N], indices of ``prompts``; equal ones in input order.
    """
    marks = [ids for ids in (before, after) if ids is not None]
    order, lcp = depth_first_order([*prompts, *marks])
    if not marks and last is None:
        return order
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    zeros = np.zeros(len(order), dtype=np.int64)
    after_at = len(prompts) + (before is not None)
    shared_before = zeros if before is None else _shared_with(int(places[len(prompts)]), lcp)
    shared_after = zeros if after is None else _shared_with(int(places[after_at]), lcp)
    shared_last = zeros if last is None else _shared_with(int(places[last]), lcp)
    parting = 0 if before is None or after is None else int(shared_before[places[after_at]])
    outside = np.minimum(shared_before, parting)  # of the path that both have; the order of texts has none there
    keys = (shared_last, np.maximum(shared_after, parting), -np.maximum(shared_before, parting), outside)
    ranked = order[np.lexsort((np.arange(len(order)), *keys))]
    return ranked[ranked < len(prompts)]


def _shared_with(place: int, lcp: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """int64 [N]: how many tokens each prompt of an order has in common with the one at ``place``.

    Args:
        lcp: int32 [N], of each prompt with the one before it.
    """
    shared = np.empty(len(lcp), dtype=np.int64)
    shared[place] = np.iinfo(np.int32).max  # with itself all of it
    shared[place + 1 :] = np.minimum.accumulate(lcp[place + 1 :])
    shared[:place] = np.minimum.accumulate(lcp[place:0:-1])[::-1]
    return shared
