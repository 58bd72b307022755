"""Triton kernels of attention over a work list.

A *tile* is up to BLOCK_M (row, query head of one key/value head's group) pairs of one work, over what of the work's
slots its rows see: flash attention (Dao et al. 2022) with the keys and values gathered by slot, or of runs of slots
loaded as blocks. It writes a *part* for each of its rows: a normalised output and the base-2 log-sum-exp of its scores.
The first T parts are the output rows themselves; where a row has several parts, ``merge_parts_kernel`` puts them
together there.

Shape suffixes: T flat tokens, Q query heads, K key/value heads, G = Q / K, D head size of keys, E of values, N slots,
P parts, S listed slots of all works, B the first of them, of works whose rows do not all see the same, R listed runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NO_END = tl.constexpr((1 << 31) - 1)
"""Behind every row."""
HIDDEN = tl.constexpr(-1e30)
"""The score of a slot that a row does not see, where it surely sees another of the work: beside that one it weighs
nothing. Finite, so that a block of which the row sees nothing needs no case of its own."""


@triton.jit
def read_fields(fields):
    """Four of a tile's fields."""
    return tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)


@triton.jit
def sees(row, seen_from, seen_until, is_rest):
    """Whether rows see slots; all see those that are not of the rest."""
    begin, end = tl.load(seen_from, mask=is_rest, other=0), tl.load(seen_until, mask=is_rest, other=NO_END)
    return (row[:, None] >= begin[None, :]) & (row[:, None] < end[None, :])


@triton.jit
def cap(scores, scale, softcap):
    """Scaled and softly capped."""
    return softcap * (2.0 / (1.0 + tl.exp2(scores * (scale / softcap) * (-2.0 * LOG2E))) - 1.0)


@triton.jit
def weigh(scores, unit, top, total, HAS_WINDOW: tl.constexpr):
    """Takes a block's scores: its slots' weights, what the sums so far shrink by, and the new maxima and totals."""
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    # in a window, a row may see nothing of a work
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if HAS_WINDOW else new_top
    shrink = tl.exp2(top - base)
    p = tl.exp2(scores * unit - base[:, None])
    return p, shrink, new_top, total * shrink + tl.sum(p, 1)


@triton.jit
def normalise(top, total, acc):
    """Base-2 log-sum-exp and output, of rows that saw nothing -inf and 0."""
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    return tl.where(some, top + tl.log2(total), float("-inf")), acc / total[:, None]


@triton.jit
def attend_tiles(  # noqa: PLR0915
    q_TQD,
    k_NKD,
    v_NKD,
    k_blocks,
    v_blocks,
    parts_PQE,
    lse_PQ,
    tiles,
    num_tiles,
    slots_S,
    kv_positions_S,
    runs_2R,
    seen_from_B,
    seen_until_B,
    q_positions_T,
    scale,
    softcap,
    window,
    q_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN_BLOCK: tl.constexpr,
    RUN_STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_RUNS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    IN_TURN: tl.constexpr,
):
    """Tiles, each of one key/value head. ``tiles`` holds ``worklist.TILE_FIELDS`` of each.

    ``k_blocks`` and ``v_blocks`` describe the pools as [N, K * D] and [N, K * E], in blocks of RUN_BLOCK slots of one
    head (of what follows it too, where its size is no power of two; queries have zeros there).

    A tile's heads, which lie side by side in memory, are worked on at the same time. Grid (K * number of tiles), where
    tiles of index NO_TILE have nothing to do; with IN_TURN any number of programs, which take what is next of K *
    ``num_tiles`` (one int) in turn.
    """
    first = tl.program_id(0)
    last, step = first + 1, 1
    if IN_TURN:
        last, step = tl.load(num_tiles) * K, tl.num_programs(0)
    elif tl.load(tiles + first // K * TILE_WIDTH) < 0:  # the padding of a captured step
        return
    for place in range(first, last, step):
        head = place % K
        fields = tiles + place // K * TILE_WIDTH
        index, first_row, num_rows, first_slot = read_fields(fields)
        num_whole, skip, num_slots, part = read_fields(fields + 4)

        pair = index * BLOCK_M + tl.arange(0, BLOCK_M)
        row, q_head = pair // G, head * G + pair % G
        is_row = row < num_rows
        d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
        q_at = (first_row + row)[:, None].to(tl.int64) * q_stride + q_head[:, None] * D + d[None, :]
        q = tl.load(q_TQD + q_at, mask=is_row[:, None] & (d < D)[None, :], other=0.0)
        if HAS_WINDOW:
            q_position = tl.load(q_positions_T + first_row + row, mask=is_row, other=0)
        # of scores, to exponents of 2; it goes with the subtraction below, as one multiply-add
        unit = LOG2E if HAS_SOFTCAP else scale * LOG2E

        top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, E_PAD], tl.float32)
        if HAS_RUNS:
            run, num_runs, own_slot, num_own_chunks = read_fields(fields + 8)
            for i in range(num_runs + 1):
                is_run, at = i < num_runs, runs_2R + 2 * (run + i)
                first_slot_of_run = tl.load(at, mask=is_run, other=own_slot)
                num_blocks = tl.load(at + 1, mask=is_run, other=num_own_chunks) * (CHUNK // RUN_BLOCK)
                for block in tl.range(num_blocks, num_stages=RUN_STAGES):
                    slot = first_slot_of_run + block * RUN_BLOCK
                    scores = tl.dot(q, tl.trans(k_blocks.load([slot, head * D])), input_precision="ieee")
                    if HAS_SOFTCAP:
                        scores = cap(scores, scale, softcap)
                    p, shrink, top, total = weigh(scores, unit, top, total, HAS_WINDOW)
                    v = v_blocks.load([slot, head * E])
                    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        for begin in range(0, num_slots, BLOCK_N):
            n = begin + tl.arange(0, BLOCK_N)
            at = tl.minimum(n, num_slots - 1)
            at += first_slot + tl.where(at < num_whole, 0, skip)
            slot = tl.load(slots_S + at).to(tl.int64) * K + head
            k = tl.load(k_NKD + slot[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if HAS_SOFTCAP:
                scores = cap(scores, scale, softcap)
            if HAS_WINDOW or begin + BLOCK_N > num_whole:
                is_rest = (n >= num_whole) & (n < num_slots)
                seen = sees(row, seen_from_B + at, seen_until_B + at, is_rest) & (n < num_slots)[None, :]
                if HAS_WINDOW:
                    kv_position = tl.load(kv_positions_S + at)
                    seen = seen & (kv_position[None, :] > q_position[:, None] - window)
                scores = tl.where(seen, scores, float("-inf") if HAS_WINDOW else HIDDEN)
            p, shrink, top, total = weigh(scores, unit, top, total, HAS_WINDOW)
            v = tl.load(v_NKD + slot[:, None] * E + e[None, :], mask=(e < E)[None, :], other=0.0)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")

        out_at = (part + row).to(tl.int64) * (K * G) + q_head
        lse, out = normalise(top, total, acc)
        tl.store(parts_PQE + out_at[:, None] * E + e[None, :], out, mask=is_row[:, None] & (e < E)[None, :])
        tl.store(lse_PQ + out_at, lse, mask=is_row)


@triton.jit
def merge_parts_kernel(
    parts_PQE,
    lse_PQ,
    merge_rows,
    merge_first,
    merge_parts,
    sinks_Q,
    Q: tl.constexpr,
    E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    E_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merges one row's parts into its output, Q_BLOCK query heads: grid (rows to merge, ceil(Q / Q_BLOCK))."""
    place = tl.program_id(0)
    row = tl.load(merge_rows + place)
    q = tl.program_id(1) * Q_BLOCK + tl.arange(0, Q_BLOCK)
    e = tl.arange(0, E_PAD)
    is_q = q < Q
    both = is_q[:, None] & (e < E)[None, :]
    top = tl.full([Q_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([Q_BLOCK], tl.float32)
    acc = tl.zeros([Q_BLOCK, E_PAD], tl.float32)
    for i in range(tl.load(merge_first + place), tl.load(merge_first + place + 1)):
        at = tl.load(merge_parts + i).to(tl.int64) * Q + q
        lse = tl.load(lse_PQ + at, mask=is_q, other=float("-inf"))
        out = tl.load(parts_PQE + at[:, None] * E + e[None, :], mask=both, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, weight = tl.exp2(top - base), tl.exp2(lse - base)
        acc = acc * shrink[:, None] + out * weight[:, None]
        total = total * shrink + weight
        top = new_top
    if HAS_SINKS:
        base = tl.where(top == float("-inf"), 0.0, top)
        total += tl.exp2(tl.load(sinks_Q + q, mask=is_q, other=0.0).to(tl.float32) * LOG2E - base)
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(parts_PQE + (row.to(tl.int64) * Q + q)[:, None] * E + e[None, :], out, mask=both)
