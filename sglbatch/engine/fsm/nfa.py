"""Building a non-deterministic byte automaton with empty steps (Thompson 1968), piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from sglbatch.engine.fsm.automaton import Automaton
from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.subset import Nfa, build_automaton
from sglbatch.engine.fsm.utf8 import ByteRanges, Ranges, utf8_sequences

_STATE_WORK = 20
"""Operations a state is counted as: its memory is what has to be bounded."""


class Fragment(NamedTuple):
    """A part of the automaton: what leads from ``start`` to ``end`` is its language.

    Nothing enters ``start`` and nothing leaves ``end`` until fragments are joined, so a fragment is used once.
    """

    start: int
    end: int


class NfaBuilder:
    """Puts fragments together, then makes the minimal deterministic automaton of one of them."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._empty_steps: list[list[int]] = []
        self._byte_steps: list[list[tuple[int, int, int]]] = []
        self._utf8: dict[Ranges, tuple[ByteRanges, ...]] = {}

    # --- fragments -----------------------------------------------------------------------------

    def empty(self) -> Fragment:
        """The empty text only."""
        state = self._new_state()
        return Fragment(state, state)

    def text(self, data: bytes) -> Fragment:
        """Exactly ``data``."""
        start = end = self._new_state()
        for byte in data:
            source, end = end, self._new_state()
            self._byte_steps[source].append((byte, byte, end))
        return Fragment(start, end)

    def characters(self, ranges: Ranges) -> Fragment:
        """One character of ``ranges`` (normalised code points); surrogates match nothing."""
        start, end = self._new_state(), self._new_state()
        if ranges not in self._utf8:
            self._utf8[ranges] = utf8_sequences(ranges)
        before_tail: dict[ByteRanges, int] = {(): end}
        for sequence in self._utf8[ranges]:
            target = end
            for i in range(len(sequence) - 1, 0, -1):
                tail = sequence[i:]
                if tail not in before_tail:
                    before_tail[tail] = self._new_state()
                    self._byte_steps[before_tail[tail]].append((*sequence[i], target))
                target = before_tail[tail]
            self._byte_steps[start].append((*sequence[0], target))
            self._budget.spend(1)
        return Fragment(start, end)

    def concat(self, parts: Iterable[Fragment]) -> Fragment:
        """The parts one after another."""
        start = end = self._new_state()
        for part in parts:
            self._empty_step(end, part.start)
            end = part.end
        return Fragment(start, end)

    def union(self, parts: Iterable[Fragment]) -> Fragment:
        """Any one of the parts."""
        start, end = self._new_state(), self._new_state()
        for part in parts:
            self._empty_step(start, part.start)
            self._empty_step(part.end, end)
        return Fragment(start, end)

    def repeat(self, make_part: Callable[[], Fragment], least: int, most: int | None) -> Fragment:
        """``least`` to ``most`` times what ``make_part`` builds (called once for each copy); None: no limit."""
        start = end = self._new_state()
        for _ in range(least):
            end = self._append(end, make_part())
        if most is None:
            loop = self._new_state()
            self._empty_step(end, loop)
            self._empty_step(self._append(loop, make_part()), loop)
            end = self._new_state()
            self._empty_step(loop, end)
        elif most > least:
            last = self._new_state()
            for _ in range(most - least):
                self._empty_step(end, last)  # straight to the end: a chain of skips would make closures quadratic
                end = self._append(end, make_part())
            self._empty_step(end, last)
            end = last
        return Fragment(start, end)

    def _append(self, end: int, part: Fragment) -> int:
        self._empty_step(end, part.start)
        return part.end

    def _new_state(self) -> int:
        self._budget.spend(_STATE_WORK)
        self._empty_steps.append([])
        self._byte_steps.append([])
        return len(self._empty_steps) - 1

    def _empty_step(self, source: int, target: int) -> None:
        self._budget.spend(1)
        self._empty_steps[source].append(target)

    def build(self, whole: Fragment) -> Automaton | None:
        """The minimal automaton of ``whole``; None when it accepts nothing.

        Raises ConstraintError (constraint-too-large) when the budget is used up.
        """
        return build_automaton(Nfa(self._empty_steps, self._byte_steps, whole.start, whole.end), self._budget)
