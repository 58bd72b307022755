"""A pushdown machine over bytes, made deterministic a state at a time as it is walked.

JSON nests, so a schema's language is in general not regular. A configuration is a part with its state on top of a
stack of parts that go on when it ends; a state of the machine is a set of configurations (the powerset construction),
numbered when it is first met. Walking needs no more than that, and the states met while generating are few.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.automaton import DEAD
from sglbatch.engine.fsm.schema_parts import INFINITE, Local, Part
from sglbatch.engine.fsm.vocabulary import UNMADE


class Frame:
    """A part in a state, and the frames that go on when it ends (None: everything has ended).

    One object for equal contents, so compared by identity. Stacks that differ only below share what is above (a
    graph-structured stack, Tomita 1985): without it, alternatives at each level of nesting would multiply.
    """

    __slots__ = ("_cost", "closure", "local", "moves", "parents", "part")

    def __init__(self, part: Part, local: Local, parents: Frames) -> None:
        self.part = part
        self.local = local
        self.parents = parents
        self.closure: Frames | None = None
        self.moves: list[tuple[int, int, Frame]] | None = None
        self._cost: int | None = None

    @property
    def cost(self) -> int:
        """Bytes of the shortest way to the end of everything."""
        if self._cost is None:
            self._cost = self.part.cost(self.local) + cost_of(self.parents)
        return self._cost


Frames: TypeAlias = frozenset[Frame | None]


def cost_of(frames: Frames) -> int:
    return min((0 if frame is None else frame.cost for frame in frames), default=INFINITE)


class Machine:
    """The deterministic machine of a part. States are integers; 0 is the start.

    Args:
        alphabet: bytes that may be used; None for all.
    """

    start: Final = 0

    def __init__(self, part: Part, alphabet: frozenset[int] | None = None) -> None:
        self._left_out = frozenset() if alphabet is None else frozenset(range(256)) - alphabet
        self._frames: dict[tuple[Part, Local, Frames], Frame] = {}
        self._merges: dict[Frames, Frames] = {}
        self._states: list[Frames] = []
        self._numbers: dict[Frames, int] = {}
        self._steps: list[dict[int, int]] = []
        self._offsets = _empty_offsets(64)
        self._has_row: npt.NDArray[np.bool_] = np.zeros(64, dtype=np.bool_)
        self._number(self._closed([self._frame(part, part.start, frozenset([None]))]))

    @property
    def num_states(self) -> int:
        """States met so far."""
        return len(self._states)

    def step(self, state: int, byte: int) -> int:
        """The state after one byte, or DEAD."""
        if state == DEAD:
            return DEAD
        if self._has_row[state]:
            return max(int(self._offsets[state * 256 + byte]) // 256, DEAD)
        steps = self._steps[state]
        if byte in self._left_out:
            return DEAD
        if byte not in steps:
            reached = [
                target
                for frame in self._states[state]
                if frame is not None
                for first, last, target in self._moves(frame)
                if first <= byte <= last
            ]
            steps[byte] = self._number(self._closed(reached)) if reached else DEAD
        return steps[byte]

    def run(self, state: int, data: bytes) -> int:
        for byte in data:
            state = self.step(state, byte)
            if state == DEAD:
                break
        return state

    def accepts(self, data: bytes) -> bool:
        state = self.run(self.start, data)
        return state != DEAD and self.accepting(state)

    def accepting(self, state: int) -> bool:
        return None in self._states[state]

    def cost(self, state: int) -> int:
        """Bytes of the shortest way to an accepting state."""
        return cost_of(self._states[state])

    def free_text(self, state: int) -> bool:
        """Inside a string without any bound."""
        return all(frame is not None and frame.part.is_free(frame.local) for frame in self._states[state])

    def row(self, state: int) -> npt.NDArray[np.int32]:
        """int32 [256], the state after each byte."""
        self._see_to_row(state)
        offsets = self._offsets[state * 256 : state * 256 + 256]
        row: npt.NDArray[np.int32] = np.where(offsets < 0, DEAD, offsets // 256).astype(np.int32)
        return row

    @property
    def offsets(self) -> npt.NDArray[np.int32]:
        """See ``vocabulary.GrowingRows``."""
        return self._offsets

    def make(self, states: npt.NDArray[np.int64]) -> None:
        for state in states[~self._has_row[states]].tolist():
            self._see_to_row(state)

    def _see_to_row(self, state: int) -> None:
        if self._has_row[state]:
            return
        row = self._make_row(state)
        row[list(self._left_out)] = DEAD
        if len(self._offsets) < (len(self._states) + 2) * 256:
            self._offsets = _empty_offsets(2 * len(self._states), self._offsets)
        self._offsets[state * 256 : state * 256 + 256] = np.where(row == DEAD, -256, row * 256)
        self._has_row[state] = True

    def _make_row(self, state: int) -> npt.NDArray[np.int32]:
        row = np.full(256, DEAD, dtype=np.int32)
        frames = [frame for frame in self._states[state] if frame is not None]
        moves = [move for frame in frames for move in self._moves(frame)]
        if len(frames) == 1:
            for first, last, target in moves:
                row[first : last + 1] = self._number(self._closed([target]))
            return row
        bounds = sorted({move[0] for move in moves} | {move[1] + 1 for move in moves})
        known: dict[tuple[Frame, ...], int] = {}
        for first, end in pairwise(bounds):
            targets = tuple(t for low, high, t in moves if low <= first <= high)
            if not targets:
                continue
            if targets not in known:
                known[targets] = self._number(self._closed(targets))
            row[first:end] = known[targets]
        return row

    def _number(self, frames: Frames) -> int:
        number = self._numbers.get(frames)
        if number is None:
            number = self._numbers[frames] = len(self._states)
            self._states.append(frames)
            self._steps.append({})
            if number >= len(self._has_row):
                self._has_row = np.append(self._has_row, np.zeros(len(self._has_row), dtype=np.bool_))
        return number

    def _frame(self, part: Part, local: Local, parents: Frames) -> Frame:
        key = (part, local, parents)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(part, local, parents)
        return frame

    def _moves(self, frame: Frame) -> list[tuple[int, int, Frame]]:
        if frame.moves is None:
            part, parents = frame.part, frame.parents
            frame.moves = [(a, b, self._frame(part, local, parents)) for a, b, local in part.moves(frame.local)]
        return frame.moves

    def _closed(self, frames: Iterable[Frame]) -> Frames:
        """The frames that read bytes, reached from any of these without one; None is the end of everything."""
        return self._merged(frozenset().union(*map(self._closure, frames)))

    def _merged(self, frames: Frames) -> Frames:
        """The same with one frame for each part and state, which has the parents of all that had them."""
        if len(frames) < 2:
            return frames
        if frames not in self._merges:
            parents: dict[tuple[Part, Local], list[Frames]] = {}
            for frame in frames:
                if frame is not None:
                    parents.setdefault((frame.part, frame.local), []).append(frame.parents)
            merged: set[Frame | None] = {None} if None in frames else set()
            for (part, local), several in parents.items():
                together = several[0] if len(several) == 1 else self._merged(frozenset().union(*several))
                merged.add(self._frame(part, local, together))
            self._merges[frames] = frozenset(merged)
        return self._merges[frames]

    def _closure(self, frame: Frame) -> Frames:
        """What ``_closed`` gives for one frame, before merging."""
        if frame.closure is None:
            found: set[Frame | None] = set()
            seen = {frame}
            stack = [frame]
            while stack:
                top = stack.pop()
                if top.closure is not None:
                    found.update(top.closure)
                    continue
                if self._moves(top):
                    found.add(top)
                for other in self._opened(top):
                    if other is None:
                        found.add(None)
                    elif other not in seen:
                        seen.add(other)
                        stack.append(other)
            frame.closure = frozenset(found)
        return frame.closure

    def _opened(self, frame: Frame) -> Iterable[Frame | None]:
        if frame.part.ends(frame.local):
            yield from frame.parents
        for sequence in frame.part.opens(frame.local):
            parents = frame.parents
            for part, local in reversed(sequence):
                parents = frozenset([self._frame(part, local, parents)])
            yield from parents


def _empty_offsets(num_states: int, made: npt.NDArray[np.int32] | None = None) -> npt.NDArray[np.int32]:
    """Rows for so many states, with those of ``made``; the last row leads nowhere."""
    offsets = np.full((num_states + 2) * 256, UNMADE, dtype=np.int32)
    offsets[-256:] = -256
    if made is not None:
        offsets[: len(made) - 512] = made[:-512]
    return offsets
