"""What each of several alternatives has for itself, where some begin like others."""

from __future__ import annotations

from collections.abc import Sequence

TINY = 1e-300


def own_masses(alternatives: Sequence[tuple[int, ...]], masses: Sequence[float]) -> list[float]:
    """An alternative that others extend stands for "this and none of the longer ones": it loses theirs."""
    own = list(masses)
    for i in sorted(range(len(alternatives)), key=lambda i: -len(alternatives[i])):
        a = alternatives[i]
        extending = [j for j, b in enumerate(alternatives) if len(b) > len(a) and b[: len(a)] == a]
        own[i] = max(masses[i] - sum(own[j] for j in extending), TINY)
    return own
