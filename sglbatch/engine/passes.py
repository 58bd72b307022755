"""A step in several forward passes, where one does not fit the device's memory.

A scheduled step owns its slots, and a token's keys and values depend on what is before it only. So a step that ran out
of memory is run again from its beginning, its pieces one after another in passes that are small enough; what the failed
pass had written is written again. Nothing is taken back: the scheduler need not know.

    step     pieces 0 1 2 3      actions on states of pieces 1, 3, and on states that the tree keeps
    passes   0 1 | 2 3a | 3b     each with the actions on its own states; last, those on kept states
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sglbatch.engine.decision import Output
from sglbatch.engine.sampler import Sampling
from sglbatch.engine.sequence import Piece, StateRow, Step
from sglbatch.errors import ModelError

MIN_PASS_TOKENS = 16
"""A pass of so few tokens that does not fit the memory is the end."""


class Pending(Protocol):
    """A launched step's outputs, one for each action. They may be asked for more than once."""

    def result(self) -> list[Output]: ...

    def tokens_at(self, places: list[int]) -> torch.Tensor:
        """Sampled ids of some actions, int64, on the device where they may still be drawn."""


class Runner(Protocol):
    """What puts a step through a model; ``ModelRunner``, and a stub in tests of the scheduler."""

    @property
    def most_rows(self) -> int:
        """Of a step of decoding rows that is launched as one."""

    def best_rows(self, num_ready: int) -> int: ...

    def launch(self, step: Step, samplings: Seq[Sampling | None], before: Pending | None) -> Pending: ...


class Finished:
    """A ``Pending`` whose outputs are there."""

    def __init__(self, outputs: list[Output]) -> None:
        self._outputs = outputs

    def result(self) -> list[Output]:
        return self._outputs

    def tokens_at(self, places: list[int]) -> torch.Tensor:
        return torch.tensor([self._outputs[place] for place in places], dtype=torch.int64)


@dataclass(kw_only=True, slots=True)
class _Pass:
    """Part of a step, and which of the step's actions its own are."""

    step: Step = field(default_factory=Step)
    places: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Tokens, or rows of logits."""
        return max(self.step.num_tokens, len(self.step.actions))


class Passes:
    """Launches steps, whole as long as they fit.

    Attributes:
        max_tokens: of a pass; None until the memory has run out for the first time.
        num_out_of_memory: how often it has.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.max_tokens: int | None = None
        self.num_out_of_memory = 0

    def launch(self, step: Step, samplings: Seq[Sampling | None], before: Pending | None) -> Pending:
        """Launches a step. In several passes it is over on return.

        Args:
            before: the step in flight, which some rows' tokens come from; it is waited for before a step that did not
                fit is tried again.

        Raises:
            ModelError: ``out-of-memory``, however small the pass.
        """
        whole = _Pass(step=step, places=list(range(len(step.actions))))
        if self.max_tokens is None or whole.size <= self.max_tokens:
            pending = self._try(whole, samplings, before)
            if pending is not None:
                return pending
            if before is not None:
                before.result()
            self._shrink(whole)
        return Finished(self._run_in_parts(whole, samplings, before))

    def _run_in_parts(self, whole: _Pass, samplings: Seq[Sampling | None], before: Pending | None) -> list[Output]:
        outputs: list[Output] = [0] * len(samplings)
        waiting = [whole]
        while waiting:
            part = waiting.pop()
            assert self.max_tokens is not None
            if part.size > self.max_tokens:
                waiting += reversed(list(_split(part, self.max_tokens)))
                continue
            pending = self._try(part, [samplings[i] for i in part.places], before)
            if pending is None:
                self._shrink(part)
                waiting.append(part)
                continue
            for place, output in zip(part.places, pending.result(), strict=True):
                outputs[place] = output
        return outputs

    def _try(self, part: _Pass, samplings: Seq[Sampling | None], before: Pending | None) -> Pending | None:
        """None when the memory ran out. The error is not handed on: it holds what the failed pass had allocated."""
        try:
            return self._runner.launch(part.step, samplings, before)
        except torch.OutOfMemoryError:
            return None

    def _shrink(self, failed: _Pass) -> None:
        self.num_out_of_memory += 1
        torch.cuda.empty_cache()
        if failed.size <= MIN_PASS_TOKENS:
            raise ModelError(
                "out-of-memory",
                f"a step of {failed.size} tokens does not fit the device's memory beside the weights and the KV pool",
                hint="give a smaller --kv-tokens, or free the device",
            )
        largest = failed.size if self.max_tokens is None else min(failed.size, self.max_tokens)
        self.max_tokens = max(MIN_PASS_TOKENS, largest // 2)


def _split(whole: _Pass, max_tokens: int) -> Iterator[_Pass]:
    """Passes of at most ``max_tokens`` that give the same when they run in this order."""
    step = whole.step
    kept = {id(row) for row in step.new_states}
    own: dict[int, list[int]] = defaultdict(list)
    later: list[int] = []
    for i, action in enumerate(step.actions):
        if action.row.piece is None or id(action.row) in kept:
            later.append(i)  # states that were or will be stored, often one for many actions
        else:
            own[id(action.row)].append(i)
    rows = _rows_by_piece(step)
    part = _Pass()
    for piece in [shorter for longer in step.pieces for shorter in _cut(longer, rows, max_tokens)]:
        if part.step.num_tokens + len(piece.token_ids) > max_tokens:
            yield part
            part = _Pass()
        part.step.add(piece)
        part.step.new_states += [row for row in rows[id(piece)] if id(row) in kept]
        _take(part, whole, [i for row in rows[id(piece)] for i in own[id(row)]])
    if part.step.pieces:
        yield part
    for begin in range(0, len(later), max_tokens):
        part = _Pass()
        _take(part, whole, later[begin : begin + max_tokens])
        yield part


def _rows_by_piece(step: Step) -> dict[int, list[StateRow]]:
    """The states that are still to be computed, by the id of their piece."""
    rows: dict[int, list[StateRow]] = defaultdict(list)
    for row in {id(row): row for row in (*step.new_states, *(a.row for a in step.actions))}.values():
        if row.piece is not None:
            rows[id(row.piece)].append(row)
    return rows


def _take(part: _Pass, whole: _Pass, indices: list[int]) -> None:
    part.step.actions += [whole.step.actions[i] for i in indices]
    part.places += [whole.places[i] for i in indices]


def _cut(piece: Piece, rows: dict[int, list[StateRow]], max_tokens: int) -> list[Piece]:
    """The piece in pieces of at most ``max_tokens``; its states are theirs from now on."""
    size = len(piece.token_ids)
    if size <= max_tokens:
        return [piece]
    parts = []
    for begin in range(0, size, max_tokens):
        end = min(begin + max_tokens, size)
        part = piece.part(begin, end)
        parts.append(part)
        for row in rows[id(piece)]:
            if begin <= row.offset < end and row.piece is piece:
                row.piece, row.offset = part, row.offset - begin
                rows[id(part)].append(row)
    return parts
