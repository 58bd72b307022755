"""Sets of strings, as JSON Schema's keywords describe them: closed under "and" and "not"."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.automaton import DEAD, Automaton, automaton_for_choices
from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.nfa import NfaBuilder
from sglbatch.engine.fsm.product import combine
from sglbatch.errors import ConstraintError

MAX_COUNTED_LEN = 4096
"""Longest minLength beside a pattern: the automaton then has to count."""

ENDLESS = 1 << 60
"""Length of the longest text where there is none."""


@dataclass(frozen=True, eq=False)
class TextSet:
    """Texts that hold in all ways; decoded, as JSON Schema sees them.

    Args:
        words: exactly these; the other members are then at their defaults.
        base: automaton of the UTF-8 text; None for all texts. With one ``least`` and ``excluded`` are part of it, and
            ``most`` is there only where it allows longer texts too.
        excluded: these are out.
        least, most: number of characters; None for no limit.
    """

    words: frozenset[str] | None = None
    base: Automaton | None = None
    excluded: frozenset[str] = frozenset()
    least: int = 0
    most: int | None = None

    def holds(self, text: str) -> bool:
        if self.words is not None:
            return text in self.words
        if text in self.excluded or len(text) < self.least or (self.most is not None and len(text) > self.most):
            return False
        return self.base is None or self.base.accepts(text.encode("utf-8", "surrogatepass"))

    @property
    def is_all(self) -> bool:
        return self.words is None and self.base is None and not self.excluded and not self.least and self.most is None


ALL_TEXTS = TextSet()


def words_set(words: Iterable[str]) -> TextSet | None:
    found = frozenset(words)
    return TextSet(words=found) if found else None


def text_and(a: TextSet, b: TextSet, budget: Budget) -> TextSet | None:
    """The texts of both; None when there are none. Raises ConstraintError (constraint-too-large)."""
    if a.is_all:
        return b
    if b.is_all:
        return a
    if a.words is not None or b.words is not None:
        finite, other = (a, b) if a.words is not None else (b, a)
        assert finite.words is not None
        return words_set(word for word in finite.words if other.holds(word))
    base = a.base
    if base is None:
        base = b.base
    elif b.base is not None and b.base is not base:
        base = combine(base, b.base, "and", budget)
        if base is None:
            return None
    least = max(a.least, b.least)
    most = min((m for m in (a.most, b.most) if m is not None), default=None)
    return _settled(base, a.excluded | b.excluded, least, most, budget)


def text_not(a: TextSet, budget: Budget) -> list[TextSet]:
    """Every other text, as a union. Raises ConstraintError (constraint-too-large)."""
    if a.words is not None:
        return [TextSet(excluded=a.words)]
    parts: list[TextSet | None] = [words_set(a.excluded)]
    if a.base is not None:
        rest = combine(all_texts(), a.base, "minus", budget)
        parts.append(TextSet(base=rest) if rest is not None else None)
    if a.least:
        parts.append(TextSet(most=a.least - 1))
    if a.most is not None:
        parts.append(TextSet(least=a.most + 1))
    return [part for part in parts if part is not None]


def without_words(a: TextSet, words: Iterable[str], budget: Budget) -> TextSet | None:
    return text_and(a, TextSet(excluded=frozenset(words)), budget)


def _settled(  # noqa: PLR0911  one case of emptiness a return
    base: Automaton | None, excluded: frozenset[str], least: int, most: int | None, budget: Budget
) -> TextSet | None:
    if most is not None and least > most:
        return None
    if base is None:
        excluded = frozenset(w for w in excluded if least <= len(w) and (most is None or len(w) <= most))
        if most == 0:
            return None if "" in excluded else TextSet(words=frozenset([""]))
        return TextSet(excluded=excluded, least=least, most=most)
    if least > char_lengths(base)[0]:
        if least > MAX_COUNTED_LEN:
            raise ConstraintError(
                "constraint-too-large",
                f"a minLength of {least} beside a pattern needs an automaton that counts that far",
                hint=f"use a length of at most {MAX_COUNTED_LEN}, or leave one of the two out",
            )
        fitted = combine(base, _at_least(least), "and", budget)
        if fitted is None:
            return None
        base = fitted
    excluded = frozenset(word for word in excluded if base.accepts(word.encode("utf-8", "surrogatepass")))
    if excluded:
        rest = combine(base, _trie(excluded, budget), "minus", budget)
        if rest is None:
            return None
        base = rest
    shortest, longest = char_lengths(base)
    if most is not None and shortest > most:
        return None
    return TextSet(base=base, most=most if most is not None and most < longest else None)


def _trie(words: frozenset[str], budget: Budget) -> Automaton:
    if words == {""}:
        return Automaton(table=np.full((1, 256), DEAD, dtype=np.int32), accepting=np.ones(1, dtype=np.bool_))
    return automaton_for_choices(sorted(words), budget)


@lru_cache(maxsize=1)
def all_texts() -> Automaton:
    """Every UTF-8 text."""
    builder = NfaBuilder(Budget())
    whole = builder.repeat(lambda: builder.characters(((0, 0x10FFFF),)), 0, None)
    automaton = builder.build(whole)
    assert automaton is not None
    return automaton


@lru_cache(maxsize=64)
def _at_least(least: int) -> Automaton:
    """UTF-8 texts of at least so many characters: one copy of the automaton of all texts for each character."""
    one = all_texts().table
    size, copies = len(one), least + 1
    inner = one[None, :, :] + np.arange(copies)[:, None, None] * size
    table = np.where(one[None] == DEAD, DEAD, inner).astype(np.int32)
    # A character's first byte moves on to the next copy; its other bytes stay there, and the last copy is never left.
    table[:-1, 0, :] = np.where(one[0] == DEAD, DEAD, table[:-1, 0, :] + size)
    accepting = np.zeros((copies, size), dtype=np.bool_)
    accepting[least, 0] = True
    return Automaton(table=table.reshape(-1, 256), accepting=accepting.reshape(-1))


@lru_cache(maxsize=512)
def char_lengths(automaton: Automaton) -> tuple[int, int]:
    """Characters of the shortest and of the longest accepted UTF-8 text; ENDLESS where there is no longest."""
    shortest = int(remaining_chars(automaton)[automaton.start])
    weights = _edges(automaton)
    indegree = np.zeros(automaton.num_states, dtype=np.int64)
    for row in weights:
        for target in row:
            indegree[target] += 1
    longest = np.full(automaton.num_states, -1, dtype=np.int64)
    longest[automaton.start] = 0
    ready = [s for s in range(automaton.num_states) if indegree[s] == 0]
    num_done = 0
    while ready:
        state = ready.pop()
        num_done += 1
        for target, weight in weights[state].items():
            longest[target] = max(longest[target], longest[state] + weight)
            indegree[target] -= 1
            if indegree[target] == 0:
                ready.append(target)
    if num_done < automaton.num_states:
        return shortest, ENDLESS
    return shortest, int(longest[automaton.accepting].max())


@lru_cache(maxsize=512)
def remaining_chars(automaton: Automaton) -> npt.NDArray[np.int64]:
    """int64 [S], fewest characters from each state to an accepting one."""
    sources: list[list[tuple[int, int]]] = [[] for _ in range(automaton.num_states)]
    for state, row in enumerate(_edges(automaton)):
        for target, weight in row.items():
            sources[target].append((state, weight))
    best = np.full(automaton.num_states, ENDLESS, dtype=np.int64)
    queue: deque[tuple[int, int]] = deque((0, s) for s in np.flatnonzero(automaton.accepting).tolist())
    while queue:
        distance, state = queue.popleft()
        if best[state] <= distance:
            continue
        best[state] = distance
        for source, weight in sources[state]:
            if distance + weight < best[source]:
                (queue.append if weight else queue.appendleft)((distance + weight, source))
    return best


def _edges(automaton: Automaton) -> list[dict[int, int]]:
    """For each state: target -> characters begun on the way (0 for the later bytes of one)."""
    rows: list[dict[int, int]] = [{} for _ in range(automaton.num_states)]
    leads = np.concatenate([automaton.table[:, :0x80], automaton.table[:, 0xC0:]], axis=1)
    for weight, columns in ((1, leads), (0, automaton.table[:, 0x80:0xC0])):
        sources = np.repeat(np.arange(automaton.num_states, dtype=np.int64), columns.shape[1])
        targets = columns.reshape(-1).astype(np.int64)
        pairs = np.unique((sources * automaton.num_states + targets)[targets >= 0])
        for source, target in zip(*(part.tolist() for part in np.divmod(pairs, automaton.num_states)), strict=True):
            rows[source][target] = weight
    return rows
