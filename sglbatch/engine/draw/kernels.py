"""The kernel that draws tokens: no row is sorted, nothing of a row's length is written.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

STRIDE = tl.constexpr(0x9E3779B9)
MIX_1 = tl.constexpr(0x7FEB352D)
MIX_2 = tl.constexpr(0x846CA68B)
RANK_SHIFT = tl.constexpr(3)
RANK_BITS = tl.constexpr(28)
SEARCH_BITS = tl.constexpr(4)
SEARCH_WAYS = tl.constexpr(16)


@triton.jit
def _distances(row_V, begin, V, top, temperature, BLOCK: tl.constexpr):
    """Distances of the tokens begin, begin + 1, ...; infinite behind the vocabulary."""
    v = begin + tl.arange(0, BLOCK)
    logits = tl.load(row_V + v, mask=v < V, other=float("-inf"))
    return (top - logits) / temperature


@triton.jit
def _ranks(distances):
    return distances.to(tl.int32, bitcast=True) >> RANK_SHIFT


@triton.jit
def _exponentials(v, key_1, key_2):
    """As ``race.exponentials``, the same bits up to the logarithm."""
    x = v.to(tl.uint32) * STRIDE + key_1.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * MIX_1
    x ^= key_2.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * MIX_2
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    uniform = (x.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    uniform = tl.minimum(uniform, 1.0 - 1.0 / 16777216.0)
    # 1 - uniform would round small numbers away, and those decide for rare tokens
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    return tl.where(uniform < 0.03, series, -tl.log(1.0 - uniform))


@triton.jit
def _edge(row_V, V, top, temperature, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The first rank up to which the tokens' mass (relative to the likeliest), or number, is ``wanted`` or more; and
    the mass and number before it.
    """
    ways = tl.arange(0, SEARCH_WAYS)
    low = tl.full([], 0, tl.int32)
    for digit in range(RANK_BITS // SEARCH_BITS):
        step = tl.full([], 1, tl.int32) << (RANK_BITS - SEARCH_BITS * (digit + 1))
        ends = low + (ways + 1) * step
        found = tl.zeros([BLOCK, SEARCH_WAYS], tl.float32)
        for begin in range(0, V, BLOCK):
            distance = _distances(row_V, begin, V, top, temperature, BLOCK)
            weight = tl.exp(-distance) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
            found += tl.where(_ranks(distance)[:, None] < ends[None, :], weight[:, None], 0.0)
        num_short = tl.sum((tl.sum(found, 0) < wanted).to(tl.int32), 0)
        low += tl.minimum(num_short, SEARCH_WAYS - 1) * step
    mass = tl.zeros([BLOCK], tl.float32)
    num = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, V, BLOCK):
        distance = _distances(row_V, begin, V, top, temperature, BLOCK)
        is_before = _ranks(distance) < low
        mass += tl.where(is_before, tl.exp(-distance), 0.0)
        num += is_before.to(tl.int32)
    return low, tl.sum(mass, 0), tl.sum(num, 0)


@triton.jit
def _last_kept(row_V, V, top, temperature, top_k, top_p, BLOCK: tl.constexpr, SEARCH_BLOCK: tl.constexpr):
    """The last rank that top-k and top-p leave, and how many tokens of it."""
    last = tl.full([], 0x7FFFFFFF, tl.int32)
    num_last = tl.full([], 0, tl.int32)
    total = tl.full([], 0.0, tl.float32)
    if top_k < V:
        last, before, num_before = _edge(row_V, V, top, temperature, top_k.to(tl.float32), False, SEARCH_BLOCK)
        num_last = top_k - num_before
        total = before + num_last * tl.exp(-(last << RANK_SHIFT).to(tl.float32, bitcast=True))
    elif top_p < 1.0:
        masses = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, V, BLOCK):
            masses += tl.exp(-_distances(row_V, begin, V, top, temperature, BLOCK))
        total = tl.sum(masses, 0)
    if top_p < 1.0:
        wanted = top_p * total
        edge, before, num_before = _edge(row_V, V, top, temperature, wanted, True, SEARCH_BLOCK)
        edge_weight = tl.exp(-(edge << RANK_SHIFT).to(tl.float32, bitcast=True))
        num_edge = tl.maximum(tl.ceil((wanted - before) / edge_weight), 1.0).to(tl.int32)
        num_last = tl.where(edge < last, num_edge, tl.where(edge == last, tl.minimum(num_edge, num_last), num_last))
        last = tl.minimum(edge, last)
    return last, num_last


@triton.jit
def draw_kernel(
    logits_RV,
    row_stride,
    V,
    rows_R,
    keys_R2,
    temperature_R,
    top_k_R,
    top_p_R,
    min_p_R,
    tokens_R,
    HAS_FILTERS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    """One row's token; grid (R)."""
    i = tl.program_id(0)
    row_V = logits_RV + tl.load(rows_R + i).to(tl.int64) * row_stride
    key_1, key_2 = tl.load(keys_R2 + 2 * i), tl.load(keys_R2 + 2 * i + 1)
    temperature = tl.load(temperature_R + i)

    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, V, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        tops = tl.maximum(tops, tl.load(row_V + v, mask=v < V, other=float("-inf")))
    top = tl.max(tops, 0)

    min_weight = 0.0
    last = tl.full([], 0x7FFFFFFF, tl.int32)
    num_last = tl.full([], 0, tl.int32)
    if HAS_FILTERS:
        min_weight = tl.load(min_p_R + i)
        top_k, top_p = tl.load(top_k_R + i), tl.load(top_p_R + i)
        last, num_last = _last_kept(row_V, V, top, temperature, top_k, top_p, BLOCK, SEARCH_BLOCK)

    best = tl.full([BLOCK], -1.0, tl.float32)
    best_v = tl.zeros([BLOCK], tl.int32)
    num_seen = tl.full([], 0, tl.int32)
    for begin in range(0, V, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        distance = _distances(row_V, begin, V, top, temperature, BLOCK)
        weight = tl.exp(-distance)
        if HAS_FILTERS:
            rank = _ranks(distance)
            is_last = (rank == last).to(tl.int32)
            place = num_seen + tl.cumsum(is_last, 0)
            num_seen += tl.sum(is_last, 0)
            keep = ((rank < last) | ((is_last > 0) & (place <= num_last))) & (weight >= min_weight)
            weight = tl.where(keep, weight, 0.0)
        speed = weight / _exponentials(v, key_1, key_2)
        is_better = (speed > best) & (v < V)
        best = tl.where(is_better, speed, best)
        best_v = tl.where(is_better, v, best_v)
    token = tl.min(tl.where(best == tl.max(best, 0), best_v, V - 1), 0)
    tl.store(tokens_R + i, token.to(tl.int64))
