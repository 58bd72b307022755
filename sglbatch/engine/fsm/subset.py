"""Subset construction (Rabin and Scott 1959): from a non-deterministic byte automaton to a deterministic one."""

from __future__ import annotations

from array import array
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.automaton import DEAD, Automaton, make_automaton
from sglbatch.engine.fsm.budget import Budget

StateSet: TypeAlias = frozenset[int]


class Nfa(NamedTuple):
    """A non-deterministic automaton; its language is what leads from ``start`` to ``end``.

    ``empty_steps[s]`` are the states reached without reading anything; ``byte_steps[s]`` are
    (first byte, last byte, target), the bytes being inclusive.
    """

    empty_steps: list[list[int]]
    byte_steps: list[list[tuple[int, int, int]]]
    start: int
    end: int


def build_automaton(nfa: Nfa, budget: Budget) -> Automaton | None:
    """The minimal deterministic automaton of ``nfa``; None when it accepts nothing.

    Raises ConstraintError (constraint-too-large) when the budget is used up.
    """
    class_of_byte = _byte_classes(nfa)
    subsets, cells = _subsets(nfa, class_of_byte.tolist(), budget)
    table = np.frombuffer(cells, dtype=np.int32).reshape(len(subsets), -1)
    accepting = np.fromiter((nfa.end in subset for subset in subsets), dtype=np.bool_, count=len(subsets))
    return make_automaton(table, accepting, class_of_byte, budget)


def _subsets(nfa: Nfa, class_of_byte: list[int], budget: Budget) -> tuple[list[StateSet], array[int]]:
    """Every reachable subset [S], and int32 [S * C], the number of the subset that each byte class leads to."""
    closures: dict[int, StateSet] = {}

    def closure(state: int) -> StateSet:
        if state not in closures:
            closures[state] = _closure(nfa, state, budget)
        return closures[state]

    steps = [
        [(c, target) for first, last, target in row for c in range(class_of_byte[first], class_of_byte[last] + 1)]
        for row in nfa.byte_steps
    ]
    subsets = [closure(nfa.start)]
    number = {subsets[0]: 0}
    cells = array("i")
    for subset in subsets:
        targets: dict[int, list[int]] = {}
        for state in subset:
            budget.spend(1 + len(steps[state]))
            for byte_class, target in steps[state]:
                targets.setdefault(byte_class, []).append(target)
        joined: dict[tuple[int, ...], int] = {}
        row = [DEAD] * (class_of_byte[-1] + 1)
        for byte_class, states in targets.items():
            key = tuple(states)
            if key not in joined:
                union = frozenset().union(*map(closure, states))
                budget.spend(len(union) + len(states))
                joined[key] = number.setdefault(union, len(subsets))
                if joined[key] == len(subsets):
                    subsets.append(union)
                    budget.check_states(len(subsets))
            row[byte_class] = joined[key]
        cells.extend(row)
    return subsets, cells


def _closure(nfa: Nfa, start: int, budget: Budget) -> StateSet:
    """The states reachable by empty steps that matter later: those with a byte step, and the end."""
    seen = {start}
    stack = [start]
    while stack:
        for target in nfa.empty_steps[stack.pop()]:
            if target not in seen:
                seen.add(target)
                stack.append(target)
    budget.spend(len(seen))
    return frozenset(state for state in seen if state == nfa.end or nfa.byte_steps[state])


def _byte_classes(nfa: Nfa) -> npt.NDArray[np.intp]:
    """[256], the class of each byte; no step tells the bytes of a class apart. Classes ascend with the bytes."""
    is_first = np.zeros(257, dtype=np.bool_)
    for row in nfa.byte_steps:
        for first, last, _ in row:
            is_first[first] = is_first[last + 1] = True
    is_first[0] = False
    return np.cumsum(is_first[:256])
