"""The numbers that tokens are drawn with.

Every token gets an exponential number of its own, E, and the token with the largest p / E wins: it is drawn with
probability p (the Gumbel-max trick without its logarithms). A token's number depends on (seed of the call, place in the
answer, token id) alone, so noise in the last bits of the probabilities flips a draw only where two tokens run
neck and neck. Inverting the cumulative distribution, every token's noise moves all boundaries behind it.

Shape suffixes: R rows, V tokens (or whatever is drawn).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

ONE: Final = np.uint64(1)
STEP_64: Final = np.uint64(0x9E3779B97F4A7C15)
MIX_64_1: Final = np.uint64(0xBF58476D1CE4E5B9)
MIX_64_2: Final = np.uint64(0x94D049BB133111EB)

STRIDE: Final = 0x9E3779B9 - (1 << 32)
MIX_1: Final = 0x7FEB352D
MIX_2: Final = 0x846CA68B - (1 << 32)
"""2^32 over the golden ratio, and the multipliers of the hash "lowbias32" (Wellons 2018, found by search for the least
bias of 32-bit integer hashes); as signed numbers."""

LARGEST: Final = 1.0 - 2.0**-24
"""The largest float below 1."""


def race_keys(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """Int32 [R, 2]: the halves, lower first, of the SplitMix64 output (Steele, Lea & Flood 2014) number ``position`` of
    each 64-bit seed.
    """
    z_R = np.array(seeds, dtype=np.uint64) + (np.array(positions, dtype=np.uint64) + ONE) * STEP_64
    z_R = (z_R ^ (z_R >> np.uint64(30))) * MIX_64_1
    z_R = (z_R ^ (z_R >> np.uint64(27))) * MIX_64_2
    z_R ^= z_R >> np.uint64(31)
    halves: npt.NDArray[np.int32] = z_R.astype("<u8").view("<i4").reshape(-1, 2).astype(np.int32, copy=False)
    return halves


def random_bits(keys_R2: torch.Tensor, num: int) -> torch.Tensor:
    """Int32 [R, num], the low 31 bits random: those of the tokens 0, 1, ...; the same on every device.

    Args:
        keys_R2: int32, each row's ``race_keys``.
    """
    ids_V = torch.arange(num, dtype=torch.int32, device=keys_R2.device)
    x_RV = (ids_V * STRIDE) + keys_R2[:, :1]
    shifted_RV = torch.empty_like(x_RV)
    _xor_shifted(x_RV, shifted_RV, 16)
    x_RV.mul_(MIX_1).bitwise_xor_(keys_R2[:, 1:])
    _xor_shifted(x_RV, shifted_RV, 15)
    x_RV.mul_(MIX_2)
    _xor_shifted(x_RV, shifted_RV, 16)
    return x_RV.bitwise_and_(0x7FFFFFFF)


def _xor_shifted(x: torch.Tensor, scratch: torch.Tensor, distance: int) -> None:
    """x ^= x >> distance, in place; the shift is an unsigned one."""
    torch.bitwise_right_shift(x, distance, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - distance)) - 1))


def exponentials(keys_R2: torch.Tensor, num: int) -> torch.Tensor:
    """Fp32 [R, num], exponential with mean 1, from 2^-32 to 17."""
    uniform_RV = random_bits(keys_R2, num).float()
    uniform_RV.add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST)
    return uniform_RV.neg_().log1p_().neg_()
