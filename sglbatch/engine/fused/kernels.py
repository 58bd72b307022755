"""Triton kernels of a decoder layer, except attention; most matrix products are cuBLAS's.

They round where transformers' modules round, so that fused and unfused layers differ only by the order of sums.

Shape suffixes: T flat tokens, H hidden, I intermediate, Q query heads, K key/value heads, D head size, N slots.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rms_norm_kernel(x_TH, residual_TH, weight_H, out_TH, eps, H, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """residual += x (where there is one), out = rms_norm(residual) * weight. One row a program."""
    row = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BLOCK)
    mask = h < H
    x = tl.load(x_TH + row + h, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x = (x.to(tl.float32) + tl.load(residual_TH + row + h, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual_TH + row + h, x, mask=mask)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / H + eps)
    weight = tl.load(weight_H + h, mask=mask, other=0.0)
    tl.store(out_TH + row + h, weight * (wide * scale).to(x.dtype), mask=mask)


@triton.jit
def silu_and_mul(gate, up):
    """silu(gate) * up, in their type."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up


@triton.jit
def silu_and_mul_kernel(gate_up_T2I, out_TI, I, BLOCK: tl.constexpr):  # noqa: E741
    """out = silu(gate) * up; gate_up holds gate, up, gate, up, ... Grid (T, ceil(I / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    both = first * 2 + tl.arange(0, 2 * BLOCK)
    pairs = tl.load(gate_up_T2I + row * 2 * I + both, mask=both < 2 * I, other=0.0)
    gate, up = tl.split(tl.reshape(pairs, [BLOCK, 2]))
    i = first + tl.arange(0, BLOCK)
    tl.store(out_TI + row * I + i, silu_and_mul(gate, up), mask=i < I)


@triton.jit
def rope_and_write_kernel(
    qkv_TC,
    cos_TD,
    sin_TD,
    k_NKD,
    v_NKD,
    write_slots_T,
    Q: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    QK_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Rotates queries in place; puts rotated keys and the values into the pool. One row a program."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(write_slots_T + row).to(tl.int64)
    base = qkv_TC + row * ((Q + 2 * K) * D)
    head = tl.arange(0, QK_PAD)[:, None]
    d = tl.arange(0, HALF)[None, :]
    mask = (head < Q + K) & (d < D // 2)
    first = tl.load(base + head * D + d, mask=mask, other=0.0)
    second = tl.load(base + head * D + D // 2 + d, mask=mask, other=0.0)
    is_d = d < D // 2
    cos_1 = tl.load(cos_TD + row * D + d, mask=is_d, other=0.0)
    sin_1 = tl.load(sin_TD + row * D + d, mask=is_d, other=0.0)
    cos_2 = tl.load(cos_TD + row * D + D // 2 + d, mask=is_d, other=0.0)
    sin_2 = tl.load(sin_TD + row * D + D // 2 + d, mask=is_d, other=0.0)
    new_1 = first * cos_1 - second * sin_1
    new_2 = second * cos_2 + first * sin_2
    is_q = mask & (head < Q)
    tl.store(base + head * D + d, new_1, mask=is_q)
    tl.store(base + head * D + D // 2 + d, new_2, mask=is_q)
    is_k = mask & (head >= Q)
    k_at = k_NKD + (slot * K + head - Q) * D + d
    tl.store(k_at, new_1, mask=is_k)
    tl.store(k_at + D // 2, new_2, mask=is_k)
    kv_head = tl.arange(0, K_PAD)[:, None]
    full = tl.arange(0, D_PAD)[None, :]
    is_v = (kv_head < K) & (full < D)
    v = tl.load(base + (Q + K + kv_head) * D + full, mask=is_v, other=0.0)
    tl.store(v_NKD + (slot * K + kv_head) * D + full, v, mask=is_v)


@triton.jit
def gated_product_kernel(
    x_TH,
    gate_up_2IH,
    out_TI,
    T,
    I2,
    H,
    BLOCK_T: tl.constexpr,
    BLOCK_2I: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Descriptors of the arrays; each program works on every PROGRAMS-th tile. It rounds where the modules round."""
    tiles_t, tiles_i = tl.cdiv(T, BLOCK_T), tl.cdiv(I2, BLOCK_2I)
    for tile in tl.range(tl.program_id(0), tiles_t * tiles_i, PROGRAMS, flatten=True):
        group = tile // (GROUP * tiles_i)
        place = tile % (GROUP * tiles_i)
        height = min(tiles_t - group * GROUP, GROUP)
        t = (group * GROUP + place % height) * BLOCK_T
        i = place // height
        acc = tl.zeros([BLOCK_T, BLOCK_2I], tl.float32)
        for h in range(0, H, BLOCK_H):
            acc = tl.dot(x_TH.load([t, h]), gate_up_2IH.load([i * BLOCK_2I, h]).T, acc)
        gate, up = tl.split(tl.reshape(acc, [BLOCK_T, BLOCK_2I // 2, 2]))
        active = silu_and_mul(gate.to(out_TI.dtype), up.to(out_TI.dtype))
        out_TI.store([t, i * (BLOCK_2I // 2)], active)
