"""The parts that the machine of a schema is made of: literals, finite lists and strings.

A part reads bytes from a local state on. It has byte moves, may end, or opens into sequences of other parts.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, Final, Protocol, TypeAlias

from sglbatch.engine.fsm.automaton import DEAD, Automaton
from sglbatch.engine.fsm.schema_texts import ENDLESS, TextSet, all_texts, char_lengths, remaining_chars

Local: TypeAlias = Any
"""A part's own state, hashable."""

Move: TypeAlias = tuple[int, int, Local]
"""First byte, last byte, the local state after it."""

INFINITE: Final = 1 << 40
"""Cost of what cannot be completed."""


class Part(Protocol):
    """Something that reads a stretch of the text."""

    start: Local

    def moves(self, local: Local) -> list[Move]: ...

    def ends(self, local: Local) -> bool:
        """The stretch may end here."""

    def opens(self, local: Local) -> Iterable[tuple[tuple[Part, Local], ...]]:
        """Sequences of parts, each with its state, any one of which goes on from here without a byte."""

    def cost(self, local: Local) -> int:
        """Bytes of the shortest way to the stretch's end; INFINITE when there is none."""

    def is_free(self, local: Local) -> bool:
        """Inside a text without any bound."""


class Literal:
    """Exactly these bytes. The state is how many have been read."""

    start: Local = 0

    def __init__(self, data: bytes) -> None:
        self._data = data

    def moves(self, local: Local) -> list[Move]:
        return [(self._data[local], self._data[local], local + 1)] if local < len(self._data) else []

    def ends(self, local: Local) -> bool:
        return bool(local == len(self._data))

    def opens(self, local: Local) -> Iterable[tuple[tuple[Part, Local], ...]]:
        return ()

    def is_free(self, local: Local) -> bool:
        return False

    def cost(self, local: Local) -> int:
        return len(self._data) - int(local)


class OneOf:
    """One of a few texts, as a trie. The state is the trie's node."""

    start: Local = 0

    def __init__(self, texts: Iterable[bytes]) -> None:
        self._edges: list[dict[int, int]] = [{}]
        self._final: set[int] = set()
        costs: dict[int, int] = {}
        for text in texts:
            node = 0
            for i, byte in enumerate(text):
                costs[node] = min(costs.get(node, INFINITE), len(text) - i)
                if byte not in self._edges[node]:
                    self._edges[node][byte] = len(self._edges)
                    self._edges.append({})
                node = self._edges[node][byte]
            costs[node] = 0
            self._final.add(node)
        self._costs = costs

    def moves(self, local: Local) -> list[Move]:
        return [(byte, byte, node) for byte, node in self._edges[local].items()]

    def ends(self, local: Local) -> bool:
        return local in self._final

    def opens(self, local: Local) -> Iterable[tuple[tuple[Part, Local], ...]]:
        return ()

    def is_free(self, local: Local) -> bool:
        return False

    def cost(self, local: Local) -> int:
        return self._costs.get(local, INFINITE)


class Matched:
    """A text that an automaton accepts. The state is the automaton's."""

    def __init__(self, automaton: Automaton) -> None:
        self.start: Local = automaton.start
        self._automaton = automaton
        self._costs: list[int] | None = None

    def moves(self, local: Local) -> list[Move]:
        return runs_of(self._automaton, local)

    def ends(self, local: Local) -> bool:
        return bool(self._automaton.accepting[local])

    def opens(self, local: Local) -> Iterable[tuple[tuple[Part, Local], ...]]:
        return ()

    def is_free(self, local: Local) -> bool:
        return False

    def cost(self, local: Local) -> int:
        if self._costs is None:
            self._costs = byte_costs(self._automaton, escaped=False)
        return self._costs[local]


_SHORT_ESCAPES: Final = {0x22: 0x22, 0x5C: 0x5C, 0x62: 0x08, 0x66: 0x0C, 0x6E: 0x0A, 0x72: 0x0D, 0x74: 0x09}
"""Letter after the backslash -> the character it stands for."""

_PLAIN, _OPEN, _ESCAPE, _UNICODE, _CLOSED = range(5)
_OFF: Final = -1
"""No excluded text begins like this one."""


class Quoted:
    r"""A JSON string whose decoded text is in a set; written as json.dumps(ensure_ascii=False) writes it.

    The state is (phase, state of the base, characters, node of the excluded texts' trie, hex digits read); characters
    are counted up to the largest number that matters.
    """

    start: Local = (_OPEN, 0, 0, 0, ())

    def __init__(self, texts: TextSet) -> None:
        assert texts.words is None, "a finite set is a OneOf"
        self._base = all_texts() if texts.base is None else texts.base
        self._least = texts.least
        self._most = texts.most
        self._remaining = remaining_chars(self._base).tolist() if texts.base is not None and texts.most else None
        self._is_endless = texts.most is None and (texts.base is None or char_lengths(texts.base)[1] == ENDLESS)
        self._trie: list[dict[int, int]] = [{}]
        self._excluded: set[int] = set()
        for word in sorted(texts.excluded):
            self._exclude(word)
        if not texts.excluded:
            self.start = (_OPEN, 0, 0, _OFF, ())
        self._rows: dict[int, list[Move]] = {}
        self._costs: list[int] | None = None

    def _exclude(self, word: str) -> None:
        try:
            data = word.encode()
        except UnicodeEncodeError:  # a lone surrogate is never written
            return
        node = 0
        for byte in data:
            if byte not in self._trie[node]:
                self._trie[node][byte] = len(self._trie)
                self._trie.append({})
            node = self._trie[node][byte]
        self._excluded.add(node)

    def moves(self, local: Local) -> list[Move]:
        phase, base, chars, node, digits = local
        if phase == _OPEN:
            return [(0x22, 0x22, (_PLAIN, base, chars, node, ()))]
        if phase == _PLAIN:
            return self._plain_moves(base, chars, node)
        if phase == _ESCAPE:
            found = [(a, a, t) for a, c in _SHORT_ESCAPES.items() if (t := self._after(base, chars, node, c))]
            if self._unicode_targets(base, chars, node):
                found.append((0x75, 0x75, (_UNICODE, base, chars, node, ())))
            return found
        if phase == _UNICODE:
            return self._unicode_moves(base, chars, node, digits)
        return []

    def _plain_moves(self, base: int, chars: int, node: int) -> list[Move]:
        found: list[Move] = []
        for first, last, target in self._row(base):
            begins = not 0x80 <= first <= 0xBF
            if begins and self._most is not None and chars >= self._most:
                continue
            counted = self._count(chars) if begins else chars
            if self._remaining is not None and self._remaining[target] > self._most_left(counted):
                continue
            if node == _OFF:
                found.append((first, last, (_PLAIN, target, counted, _OFF, ())))
            else:
                found += self._split(first, last, target, counted, node)
        if self._base.accepting[base] and chars >= self._least and node not in self._excluded:
            found.append((0x22, 0x22, (_CLOSED, 0, 0, _OFF, ())))
        if self._unicode_targets(base, chars, node) or any(
            self._after(base, chars, node, c) for c in _SHORT_ESCAPES.values()
        ):
            found.append((0x5C, 0x5C, (_ESCAPE, base, chars, node, ())))
        return found

    def _split(self, first: int, last: int, target: int, counted: int, node: int) -> list[Move]:
        """A range of bytes, those apart that go on in the trie of excluded texts."""
        found: list[Move] = []
        at = first
        for byte in sorted(b for b in self._trie[node] if first <= b <= last):
            if at < byte:
                found.append((at, byte - 1, (_PLAIN, target, counted, _OFF, ())))
            child = self._trie[node][byte]
            if not self._is_trap(target, counted, child):
                found.append((byte, byte, (_PLAIN, target, counted, child, ())))
            at = byte + 1
        if at <= last:
            found.append((at, last, (_PLAIN, target, counted, _OFF, ())))
        return found

    def _is_trap(self, base: int, chars: int, node: int) -> bool:
        """An excluded text that has no room to become another one."""
        return node in self._excluded and self._most is not None and chars >= self._most and base == self._base.start

    def _after(self, base: int, chars: int, node: int, character: int) -> Local | None:
        """The state after an escaped character; None when it cannot stand here."""
        target = self._base.step(base, character)
        if target == DEAD or (self._most is not None and chars >= self._most):
            return None
        child = _OFF if node == _OFF else self._trie[node].get(character, _OFF)
        counted = self._count(chars)
        if self._remaining is not None and self._remaining[target] > self._most_left(counted):
            return None
        return None if self._is_trap(target, counted, child) else (_PLAIN, target, counted, child, ())

    def _unicode_targets(self, base: int, chars: int, node: int) -> list[tuple[str, Local]]:
        """Control characters without a short escape: their four hex digits, and the state after them."""
        row = self._base.table[base, :0x20]
        if (row == DEAD).all():
            return []
        controls = [c for c in range(0x20) if row[c] != DEAD and c not in _SHORT_ESCAPES.values()]
        return [(f"{c:04x}", t) for c in controls if (t := self._after(base, chars, node, c))]

    def _unicode_moves(self, base: int, chars: int, node: int, digits: tuple[int, ...]) -> list[Move]:
        read = bytes(digits).decode()
        found: dict[int, Local] = {}
        for text, target in self._unicode_targets(base, chars, node):
            if text.startswith(read):
                digit = ord(text[len(read)])
                found[digit] = target if len(read) == 3 else (_UNICODE, base, chars, node, (*digits, digit))
        return [(digit, digit, target) for digit, target in found.items()]

    def _most_left(self, chars: int) -> int:
        assert self._most is not None
        return self._most - chars

    def _count(self, chars: int) -> int:
        if self._most is not None:
            return chars + 1
        return min(chars + 1, self._least)

    def _row(self, base: int) -> list[Move]:
        """The moves of the base that are written as they are."""
        if base not in self._rows:
            runs = runs_of(self._base, base)
            self._rows[base] = [piece for run in runs for piece in _unescaped(*run)]
        return self._rows[base]

    def ends(self, local: Local) -> bool:
        return bool(local[0] == _CLOSED)

    def opens(self, local: Local) -> Iterable[tuple[tuple[Part, Local], ...]]:
        return ()

    def is_free(self, local: Local) -> bool:
        return self._is_endless and local[0] == _PLAIN and local[2] >= self._least

    def cost(self, local: Local) -> int:
        phase, base, chars, node, _ = local
        if phase == _CLOSED:
            return 0
        if phase in (_ESCAPE, _UNICODE):
            return 1 + min(self.cost(target) for _, _, target in self.moves(local))
        if self._costs is None:
            self._costs = byte_costs(self._base, escaped=True)
        own = self._costs[base] + max(0, self._least - chars)
        if node in self._excluded and not self._costs[base] and chars >= self._least:
            own += 1
        return int(own) + (2 if phase == _OPEN else 1)


def runs_of(automaton: Automaton, state: int) -> list[Move]:
    """The live transitions of a state as ranges of bytes."""
    row = automaton.table[state].tolist()
    runs: list[Move] = []
    first = 0
    for byte in range(1, 257):
        if byte == 256 or row[byte] != row[first]:
            if row[first] != DEAD:
                runs.append((first, byte - 1, row[first]))
            first = byte
    return runs


def _unescaped(first: int, last: int, target: int) -> list[Move]:
    """A range without the characters that JSON escapes."""
    found: list[Move] = []
    for low, high in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xFF)):
        if max(first, low) <= min(last, high):
            found.append((max(first, low), min(last, high), target))
    return found


@lru_cache(maxsize=512)
def byte_costs(automaton: Automaton, *, escaped: bool) -> list[int]:
    """Fewest bytes from each state to an accepting one; ``escaped``: as JSON writes them."""
    sources: list[list[tuple[int, int]]] = [[] for _ in range(automaton.num_states)]
    for state in range(automaton.num_states):
        best: dict[int, int] = {}
        for first, last, target in runs_of(automaton, state):
            plain = not escaped or bool(_unescaped(first, last, target))
            short = any(first <= c <= last for c in _SHORT_ESCAPES.values())
            best[target] = min(best.get(target, INFINITE), 1 if plain else 2 if short else 6)
        for target, weight in best.items():
            sources[target].append((state, weight))
    costs = [INFINITE] * automaton.num_states
    heap = [(0, s) for s in range(automaton.num_states) if automaton.accepting[s]]
    while heap:
        cost, state = heappop(heap)
        if cost < costs[state]:
            costs[state] = cost
            for source, weight in sources[state]:
                if cost + weight < costs[source]:
                    heappush(heap, (cost + weight, source))
    return costs


def json_bytes(value: Any) -> bytes:
    """A string as JSON text; characters as they are, but lone surrogates escaped, which UTF-8 cannot hold."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text).encode()


def breadth_first(start: Any, successors: Any) -> list[Any]:
    """Everything reachable from ``start``, nearest first."""
    found = {start: None}
    queue = deque([start])
    while queue:
        for other in successors(queue.popleft()):
            if other not in found:
                found[other] = None
                queue.append(other)
    return list(found)
