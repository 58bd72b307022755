"""Intersection and difference of two byte automata, a breadth-first level at a time in numpy."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.automaton import DEAD, Automaton, make_automaton
from sglbatch.engine.fsm.budget import Budget


def combine(left: Automaton, right: Automaton, how: Literal["and", "minus"], budget: Budget) -> Automaton | None:
    """The automaton of the texts of ``left`` that ``right`` accepts too (and), or does not accept (minus).

    None when there are none. Raises ConstraintError (constraint-too-large) when the budget is used up.
    """
    classes, representative = _joint_classes(left, right)
    tables = [np.vstack([a.table[:, representative], np.full((1, len(representative)), DEAD)]) for a in (left, right)]
    accepting = [np.append(a.accepting, False) for a in (left, right)]
    width = right.num_states + 1  # a pair is left * width + right; the last row of each table is "no way on"
    found = np.array([left.start * width + right.start], dtype=np.int64)
    known = found
    level, rows = found, []
    while len(level):
        l_state, r_state = np.divmod(level, width)
        l_next, r_next = tables[0][l_state], tables[1][r_state]
        dead = (l_next == DEAD) | ((r_next == DEAD) if how == "and" else False)
        pairs = np.where(dead, DEAD, l_next * width + np.where(r_next == DEAD, width - 1, r_next))
        rows.append(pairs)
        budget.spend(pairs.size // 8 + 50)
        new = np.setdiff1d(pairs, known)
        level = new[new >= 0]
        found = np.concatenate([found, level])
        known = np.sort(found)
        budget.check_states(len(found))
    order = np.argsort(found)
    cells = np.concatenate(rows)
    numbers = order[np.searchsorted(found[order], cells.clip(0))]
    table = np.where(cells < 0, DEAD, numbers).astype(np.int32)
    l_state, r_state = np.divmod(found, width)
    accepts = accepting[0][l_state] & (accepting[1][r_state] == (how == "and"))
    return make_automaton(table, accepts, classes, budget)


def _joint_classes(left: Automaton, right: Automaton) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """[256], the class of each byte, and a byte of each class; neither automaton tells a class's bytes apart."""
    both = np.concatenate([left.table, right.table])
    differs = np.ones(256, dtype=np.bool_)
    differs[1:] = (both[:, 1:] != both[:, :-1]).any(axis=0)
    return np.cumsum(differs) - 1, np.flatnonzero(differs)
