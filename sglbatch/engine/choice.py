"""Scoring the alternatives of a ``Choose`` exactly, as rows of the engine.

The alternatives form a trie below the prompt. Each distinct run "alternative without its last token" is one row;
rows share what they have in common through the radix tree, so every trie token enters the model once, and each
trie node's next-token distribution scores all alternatives that go through it.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from sglbatch.engine.radix.tree import common_prefix_len
from sglbatch.engine.random import uniform
from sglbatch.engine.sequence import Sequence
from sglbatch.types import Choose, Priority, Request, Result, Usage, prefill_runs

TINY = 1e-300


class Choice:
    """One request's alternatives on their way to a decision."""

    def __init__(self, request: Request, priority: Priority) -> None:
        assert isinstance(request.operation, Choose)
        self.request = request
        self.alternatives = request.operation.alternatives
        self._next_tokens = _next_tokens(self.alternatives)
        self._logprobs: dict[tuple[tuple[int, ...], int], float] = {}
        self.sequences = self._make_sequences(priority)
        self._num_logprobs = sum(len(tokens) for tokens in self._next_tokens.values())

    def _make_sequences(self, priority: Priority) -> list[Sequence]:
        """A row for each run; it scores at every position that no earlier row of the choice has scored."""
        prompt = self.request.prompt_ids
        sequences: list[Sequence] = []
        previous = prompt
        for k, ids in enumerate(prefill_runs(prompt, self.request.operation)):
            shared = common_prefix_len(previous, ids) if k else len(prompt) - 1
            targets = {p: self._next_tokens[tuple(ids[len(prompt) : p + 1].tolist())] for p in range(shared, len(ids))}
            targets = {p: tokens for p, tokens in targets.items() if tokens}
            row = Sequence(self.request, ids, priority=(*priority, k), targets=targets, shared_len=shared if k else 0)
            sequences.append(row)
            previous = ids
        return sequences

    def record(self, sequence: Sequence, position: int, targets: tuple[int, ...], logprobs: list[float]) -> None:
        """The model's log-probability of each target token after ``position``."""
        prefix = tuple(sequence.ids[len(self.request.prompt_ids) : position + 1].tolist())
        for token, logprob in zip(targets, logprobs, strict=True):
            self._logprobs[prefix, token] = logprob

    @property
    def is_scored(self) -> bool:
        return len(self._logprobs) == self._num_logprobs

    def decide(self) -> Result:
        """The most probable alternative, or a draw at the choice's temperature."""
        operation = self.request.operation
        assert isinstance(operation, Choose)
        logprobs = self.normalised_logprobs()
        if operation.greedy:
            chosen = int(np.argmax(logprobs))
        else:
            weights = np.exp((np.array(logprobs) - max(logprobs)) / operation.temperature)
            threshold = uniform(self.request.seed, 0) * weights.sum()
            chosen = min(int(np.searchsorted(weights.cumsum(), threshold, side="right")), len(weights) - 1)
        return Result(
            request_id=self.request.request_id,
            finish_reason="choice",
            usage=Usage(prompt_tokens=len(self.request.prompt_ids), generated_tokens=0),
            choice=chosen,
            choice_logprobs=logprobs,
        )

    def normalised_logprobs(self) -> tuple[float, ...]:
        """Log-probability of each alternative, summing to one over the alternatives."""
        runs = [sum(self._logprobs[a[:j], a[j]] for j in range(len(a))) for a in self.alternatives]
        top = max(runs)
        masses = _own_masses(self.alternatives, [math.exp(run - top) for run in runs])
        total = sum(masses)
        return tuple(math.log(mass / total) for mass in masses)

    def row_of(self, alternative: int) -> Sequence:
        """The row whose path the chosen alternative continues."""
        ids = np.concatenate([self.request.prompt_ids, np.array(self.alternatives[alternative][:-1], dtype=np.int32)])
        return next(s for s in self.sequences if np.array_equal(s.ids, ids))


def _next_tokens(alternatives: tuple[tuple[int, ...], ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For each node of the alternatives' trie, the tokens that leave it."""
    leaving: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for alternative in alternatives:
        for j, token in enumerate(alternative):
            leaving[alternative[:j]].add(token)
    return {prefix: tuple(sorted(tokens)) for prefix, tokens in leaving.items()}


def _own_masses(alternatives: tuple[tuple[int, ...], ...], masses: list[float]) -> list[float]:
    """What each alternative has for itself: an alternative that others extend loses theirs."""
    own = list(masses)
    for i in sorted(range(len(alternatives)), key=lambda i: -len(alternatives[i])):
        a = alternatives[i]
        extending = [j for j, b in enumerate(alternatives) if len(b) > len(a) and b[: len(a)] == a]
        own[i] = max(masses[i] - sum(own[j] for j in extending), TINY)
    return own
