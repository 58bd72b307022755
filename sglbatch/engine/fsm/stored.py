"""Automata as bytes, and their way through a store that outlives the process.

    savez_compressed:  table int32 [S, C]   classes uint8 [256]   accepting bool [S]   work int64 []

A column of the table stands for a run of bytes that no state tells apart; S is 0 where nothing is accepted.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from sglbatch.engine.fsm.automaton import DEAD, Automaton
from sglbatch.engine.fsm.budget import Budget

MIN_STORED_WORK: Final = 20_000
"""Operations that building must have taken, about 10 ms; reading a stored automaton takes 0.5 to 5 ms."""

_DAMAGED: Final = (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error, NotImplementedError)
"""What reading an archive of any bytes at all can raise."""


class AutomatonStore(Protocol):
    """Where automata stay between runs. What it gives was saved under the same key by this very code."""

    def load(self, key: str) -> bytes | None: ...

    def save(self, key: str, data: bytes) -> None: ...


class Stored(NamedTuple):
    """An automaton (None: nothing is accepted) and the operations that building it took."""

    automaton: Automaton | None
    work: int


def stored_or_built(
    store: AutomatonStore | None, key: str, budget: Budget, build: Callable[[], Automaton | None]
) -> Automaton | None:
    """What ``build`` gives, out of the store where it is there; built and stored where it is not, or is damaged.

    The work is spent in either case, so what is accepted and what is refused does not depend on the store.

    Raises ConstraintError: as ``build``; constraint-too-large when the budget is used up.
    """
    if store is None:
        return build()
    data = store.load(key)
    found = None if data is None else from_bytes(data)
    if found is not None:
        budget.spend(found.work)
        return found.automaton
    before = budget.work
    automaton = build()
    work = budget.work - before
    if work >= MIN_STORED_WORK:
        store.save(key, to_bytes(Stored(automaton, work)))
    return automaton


def to_bytes(stored: Stored) -> bytes:
    """The inverse of ``from_bytes``."""
    automaton = stored.automaton
    wide = np.zeros((0, 256), dtype=np.int32) if automaton is None else automaton.table
    accepting = np.zeros(0, dtype=np.bool_) if automaton is None else automaton.accepting
    begins = np.zeros(256, dtype=np.bool_)
    begins[1:] = (wide[:, 1:] != wide[:, :-1]).any(axis=0)
    classes = np.cumsum(begins).astype(np.uint8)
    begins[0] = True
    file = io.BytesIO()
    np.savez_compressed(file, table=wide[:, begins], classes=classes, accepting=accepting, work=np.int64(stored.work))
    return file.getvalue()


def from_bytes(data: bytes) -> Stored | None:
    """None where the bytes are no whole archive (its members have checksums) or hold no automaton."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            members = {name: archive[name] for name in ("table", "classes", "accepting", "work")}
    except _DAMAGED:
        return None
    return _checked(**members)


def _checked(*, table: Any, classes: Any, accepting: Any, work: Any) -> Stored | None:
    kinds = [(array.dtype, array.ndim) for array in (table, classes, accepting, work)]
    if kinds != [(np.int32, 2), (np.uint8, 1), (np.bool_, 1), (np.int64, 0)]:
        return None
    num_states, num_classes = table.shape
    fits = len(classes) == 256 and len(accepting) == num_states and work >= 0
    if not fits or (num_states and (classes.max() >= num_classes or table.min() < DEAD or table.max() >= num_states)):
        return None
    if not num_states:
        return Stored(None, int(work))
    wide = np.ascontiguousarray(table[:, classes])
    wide.flags.writeable = False
    accepting.flags.writeable = False
    return Stored(Automaton(table=wide, accepting=accepting), int(work))
