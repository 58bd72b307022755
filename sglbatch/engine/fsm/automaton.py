"""The deterministic automaton over bytes that every constraint becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.minimise import minimise
from sglbatch.errors import ConstraintError

DEAD = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Automaton:
    """A minimal automaton in which every state can still reach an accepting one.

    Compared and hashed by identity. The arrays are read-only.

    Args:
        table: int32 [S, 256], the next state for each state and byte, ``DEAD`` (-1) where none is.
        accepting: bool [S].
        start: the first state; always 0.
    """

    table: npt.NDArray[np.int32]
    accepting: npt.NDArray[np.bool_]
    start: int = 0

    @property
    def num_states(self) -> int:
        return len(self.accepting)

    def step(self, state: int, byte: int) -> int:
        """The state after one byte, or ``DEAD``. ``state`` may be ``DEAD``."""
        return DEAD if state == DEAD else self.table.item(state, byte)

    def run(self, state: int, data: bytes) -> int:
        """The state after all of ``data``, or ``DEAD``."""
        for byte in data:
            state = self.step(state, byte)
        return state

    def accepts(self, data: bytes) -> bool:
        state = self.run(self.start, data)
        return state != DEAD and bool(self.accepting[state])


def make_automaton(
    table: npt.NDArray[np.int32],
    accepting: npt.NDArray[np.bool_],
    class_of_byte: npt.NDArray[np.intp],
    budget: Budget,
) -> Automaton | None:
    """Prune, minimise and widen to bytes; None when nothing is accepted.

    Args:
        table: int32 [S, C] over byte classes, start state 0, -1 where there is no way on.
        accepting: bool [S].
        class_of_byte: [256], the column of ``table`` for each byte.
    """
    small = minimise(table, accepting, budget)
    if small is None:
        return None
    small_table, small_accepting = small
    wide = np.ascontiguousarray(small_table[:, class_of_byte])
    wide.flags.writeable = False
    small_accepting.flags.writeable = False
    return Automaton(table=wide, accepting=small_accepting)


def automaton_for_choices(choices: Sequence[str], budget: Budget | None = None) -> Automaton:
    """The automaton that accepts exactly the given texts, built as a trie.

    Raises ConstraintError: no choice, only the empty one, text that UTF-8 cannot hold, too large.
    """
    budget = budget or Budget()
    texts = {_encode_choice(choice) for choice in choices}
    if not texts - {b""}:
        raise ConstraintError(
            "empty-choices", "there is nothing to choose from", hint="give at least one non-empty choice"
        )
    edges: list[dict[int, int]] = [{}]
    final: set[int] = set()
    for text in sorted(texts):
        state = 0
        budget.spend(len(text))
        for byte in text:
            if byte not in edges[state]:
                edges[state][byte] = len(edges)
                edges.append({})
                budget.check_states(len(edges))
            state = edges[state][byte]
        final.add(state)
    table, class_of_byte = _table_of_edges(edges)
    accepting = np.zeros(len(edges), dtype=np.bool_)
    accepting[list(final)] = True
    automaton = make_automaton(table, accepting, class_of_byte, budget)
    assert automaton is not None, "a trie with a text accepts it"
    return automaton


def _encode_choice(choice: str) -> bytes:
    try:
        return choice.encode()
    except UnicodeEncodeError as error:
        raise ConstraintError(
            "invalid-choices",
            f"choice {choice!r} holds a lone surrogate, which no text output can hold",
            hint="remove the characters U+D800 to U+DFFF from the choice",
        ) from error


def _table_of_edges(edges: list[dict[int, int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.intp]]:
    """[S, C] table with a column for each byte that occurs and a last one for all others."""
    used = sorted({byte for row in edges for byte in row})
    class_of_byte = np.full(256, len(used), dtype=np.intp)
    class_of_byte[used] = np.arange(len(used))
    table = np.full((len(edges), len(used) + 1), DEAD, dtype=np.int32)
    for state, row in enumerate(edges):
        for byte, target in row.items():
            table[state, class_of_byte[byte]] = target
    return table, class_of_byte
