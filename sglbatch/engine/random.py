"""Random numbers as a pure function of (seed, position), so that no row's depend on its neighbours."""

from __future__ import annotations

MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A float in [0, 1): the SplitMix64 output (Steele, Lea & Flood 2014) number ``position`` of stream ``seed``."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    z ^= z >> 31
    return (z >> 11) * 2.0**-53
