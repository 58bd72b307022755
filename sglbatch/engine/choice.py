"""Scoring the alternatives of a ``Choose`` as rows of the engine.

The alternatives form a trie below the prompt. Each distinct run "alternative without its last token" is one row;
rows share what they have in common through the radix tree, so every trie token enters the model once, and each
trie node's next-token distribution scores all alternatives that go through it. A method that wants the alternatives
without the prompt too gets one more row for each such run.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import torch

from sglbatch.engine.draw.race import exponentials, race_keys
from sglbatch.engine.masses import own_masses
from sglbatch.engine.radix.tree import common_prefix_len
from sglbatch.engine.sequence import Sequence
from sglbatch.lang.choices_methods import decide
from sglbatch.types import (
    Choose,
    Priority,
    Request,
    Result,
    TokenIds,
    TokenLogprob,
    Usage,
    prefill_runs,
    unconditional_runs,
)

Place = tuple[int, tuple[int, ...]]
"""Tokens before a run (the prompt's length, or 0 without it) and the run: where a next token is scored."""


class Choice:
    """One request's alternatives on their way to a decision."""

    def __init__(self, request: Request, priority: Priority) -> None:
        assert isinstance(request.operation, Choose)
        self.request = request
        self.operation = request.operation
        self.alternatives = request.operation.alternatives
        self._logprobs: dict[tuple[Place, int], float] = {}
        self._bases: dict[Sequence, int] = {}
        self._num_logprobs = 0
        prompt = request.prompt_ids
        self._add_rows(prefill_runs(prompt, self.operation), self.alternatives, len(prompt), priority)
        self._add_rows(unconditional_runs(self.operation), self.operation.scored, 0, priority)

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._bases)

    def _add_rows(
        self, runs: list[TokenIds], alternatives: tuple[tuple[int, ...], ...], base: int, priority: Priority
    ) -> None:
        """A row for each run; it scores at every position that no earlier row has scored.

        Args:
            base: tokens of each run before the alternatives begin; without any, first tokens are not scored.
        """
        next_tokens = _next_tokens(alternatives)
        first = max(base - 1, 0)
        previous: TokenIds | None = None
        for ids in runs:
            shared = first if previous is None else common_prefix_len(previous, ids)
            targets = {p: next_tokens.get(tuple(ids[base : p + 1].tolist()), ()) for p in range(shared, len(ids))}
            targets = {p: tokens for p, tokens in targets.items() if tokens}
            row = Sequence(
                self.request,
                ids,
                priority=(*priority, len(self._bases)),
                targets=targets,
                shared_len=0 if previous is None else shared,
                alone=base == 0,
            )
            self._bases[row] = base
            self._num_logprobs += sum(map(len, targets.values()))
            previous = ids

    def record(self, sequence: Sequence, position: int, logprobs: list[float]) -> None:
        """The model's log-probability of each target token after ``position``."""
        base, targets = self._bases[sequence], sequence.targets[position]
        place = (base, tuple(sequence.ids[base : position + 1].tolist()))
        for token, logprob in zip(targets, logprobs, strict=True):
            self._logprobs[place, token] = logprob

    @property
    def is_scored(self) -> bool:
        return len(self._logprobs) == self._num_logprobs

    def decide(self) -> Result:
        """The alternative that the choice's method prefers, or an exact draw at its temperature."""
        return self._decide_exactly() if self.operation.method == "exact" else self._decide_by_tokens()

    def _decide_by_tokens(self) -> Result:
        base = len(self.request.prompt_ids)
        starts = self.operation.healed_lens or (0,) * len(self.alternatives)
        conditional = tuple(
            tuple((self._logprobs[(base, ids[:j]), ids[j]], ids[j]) for j in range(start, len(ids)))
            for ids, start in zip(self.alternatives, starts, strict=True)
        )
        unconditional: tuple[tuple[TokenLogprob, ...], ...] = ()
        if self.operation.method == "unconditional_likelihood_normalized":
            unconditional = tuple(
                tuple((self._logprobs[(0, ids[:j]), ids[j]] if j else None, ids[j]) for j in range(len(ids)))
                for ids in self.operation.scored
            )
        return Result(
            request_id=self.request.request_id,
            finish_reason="choice",
            usage=Usage(prompt_tokens=base, generated_tokens=0),
            choice=decide(self.operation.method, conditional, unconditional),
            choice_token_logprobs=conditional,
            unconditional_logprobs=unconditional,
            cached_tokens=self._cached_tokens,
        )

    @property
    def _cached_tokens(self) -> int:
        return min(self.sequences[0].num_cached, len(self.request.prompt_ids))

    def _decide_exactly(self) -> Result:
        operation = self.operation
        logprobs = self.normalised_logprobs()
        if operation.greedy:
            chosen = int(np.argmax(logprobs))
        else:
            weights = np.exp((np.array(logprobs) - max(logprobs)) / operation.temperature)
            keys_12 = torch.from_numpy(race_keys([self.request.seed], [0]))
            chosen = int(np.argmax(weights / exponentials(keys_12, len(weights))[0].numpy()))
        return Result(
            request_id=self.request.request_id,
            finish_reason="choice",
            usage=Usage(prompt_tokens=len(self.request.prompt_ids), generated_tokens=0),
            choice=chosen,
            choice_logprobs=logprobs,
            cached_tokens=self._cached_tokens,
        )

    def normalised_logprobs(self) -> tuple[float, ...]:
        """Log-probability of each alternative, summing to one over the alternatives."""
        base = len(self.request.prompt_ids)
        runs = [sum(self._logprobs[(base, a[:j]), a[j]] for j in range(len(a))) for a in self.alternatives]
        top = max(runs)
        masses = own_masses(self.alternatives, [math.exp(run - top) for run in runs])
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
