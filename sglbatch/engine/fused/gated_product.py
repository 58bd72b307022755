"""A gated MLP's first half as one kernel: silu(x @ gate.T) * (x @ up.T).

The product's tiles are turned into activations before they leave the chip, so what a separate activation would read
(twice the MLP's width a token) never reaches memory. It is for Hopper GPUs, whose tensor copy engine loads the tiles.

Shape suffixes: T flat tokens, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from sglbatch.engine.fused.kernels import gated_product_kernel

# Measured on an H200: see benchmarks/results.
BLOCK_T: Final = 128
BLOCK_2I: Final = 256
BLOCK_H: Final = 64
GROUP: Final = 22
"""Tiles of BLOCK_T rows that are worked on together, so that what they load of x and the weights meets in the cache."""
LAUNCH: Final = {"num_warps": 8, "num_stages": 3}

COPY_ENGINE_BYTES: Final = 16
"""What addresses of tiles are a multiple of."""


def is_supported(gate_up_2IH: torch.Tensor) -> bool:
    """Whether the kernel is made for this device, type and shape."""
    num_bytes = gate_up_2IH.element_size()
    return (
        gate_up_2IH.is_cuda
        and torch.cuda.get_device_capability(gate_up_2IH.device)[0] == 9
        and gate_up_2IH.dtype in (torch.bfloat16, torch.float16)
        and gate_up_2IH.shape[1] * num_bytes % COPY_ENGINE_BYTES == 0
        and gate_up_2IH.shape[0] // 2 * num_bytes % COPY_ENGINE_BYTES == 0
    )


def gated_product(x_TH: torch.Tensor, gate_up_2IH: torch.Tensor, *, num_programs: int) -> torch.Tensor:
    """[T, I] in x's type; the weights' rows are gate, up, gate, up, ...

    Args:
        num_programs: that run at the same time: the device's multiprocessors.
    """
    (T, H), I2 = x_TH.shape, gate_up_2IH.shape[0]
    out_TI = x_TH.new_empty(T, I2 // 2)
    tiles = triton.cdiv(T, BLOCK_T) * triton.cdiv(I2, BLOCK_2I)
    gated_product_kernel[(min(num_programs, tiles),)](
        TensorDescriptor(x_TH, [T, H], [H, 1], [BLOCK_T, BLOCK_H]),
        TensorDescriptor(gate_up_2IH, [I2, H], [H, 1], [BLOCK_2I, BLOCK_H]),
        TensorDescriptor(out_TI, [T, I2 // 2], [I2 // 2, 1], [BLOCK_T, BLOCK_2I // 2]),
        T,
        I2,
        H,
        BLOCK_T=BLOCK_T,
        BLOCK_2I=BLOCK_2I,
        BLOCK_H=BLOCK_H,
        GROUP=GROUP,
        PROGRAMS=num_programs,
        **LAUNCH,
    )
    return out_TI
