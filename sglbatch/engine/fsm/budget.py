"""How much work building one automaton may take."""

from __future__ import annotations

from sglbatch.errors import ConstraintError

MAX_STATES = 50_000
MAX_WORK = 8_000_000


class Budget:
    """Counts states and elementary operations, so that every construction ends.

    Operations are counted instead of seconds: the same constraint is accepted or refused on every
    machine, and nothing here needs a clock. ``MAX_WORK`` takes a few seconds of one core.

    Args:
        max_states: deterministic states before minimisation.
        max_work: operations, each about a set insertion; whole-array operations count less.
    """

    def __init__(self, *, max_states: int = MAX_STATES, max_work: int = MAX_WORK) -> None:
        self.max_states = max_states
        self._max_work = max_work
        self._work = 0

    @property
    def work(self) -> int:
        """Operations spent so far."""
        return self._work

    def spend(self, num_operations: int) -> None:
        """Raises ConstraintError (constraint-too-large) when the operations are used up."""
        self._work += num_operations
        if self._work > self._max_work:
            raise _too_large(f"more than {self._max_work:,} steps to build its automaton")

    def check_states(self, num_states: int) -> None:
        """Raises ConstraintError (constraint-too-large) above ``max_states``."""
        if num_states > self.max_states:
            raise _too_large(f"more than {self.max_states:,} automaton states")


def _too_large(what: str) -> ConstraintError:
    return ConstraintError(
        "constraint-too-large",
        f"the constraint needs {what}",
        hint="use smaller bounded repeats ({m,n}), fewer alternatives, or an unbounded repeat (* or +) with max_tokens",
    )
