"""Scoring a finite choice inside a generation: its alternatives' tokens as branches behind the generating row. Pure.

The alternatives form a trie behind the generated tokens. The generating row scores the trie's root; each *head* (an
alternative's tokens that have to enter the model) reads the generating row's keys and values, and those of the heads
before it as far as they agree. All heads of a step are one piece of branches. Their keys and values lie in the unused
slots of the generating row's tail, only for the step: what was chosen is generated afterwards as a forced run.

    generating row    prompt | tail ......            scores the root
    head (a)                              a           scores what follows a
    head (a, b)                             b         scores what follows a b
    head (c, d)                           c d         scores what follows c, and c d
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple, TypeAlias

import numpy as np

from sglbatch.engine.fsm.finite import Alternative, FiniteChoice, TokenRun
from sglbatch.engine.masses import own_masses
from sglbatch.engine.sequence import Action, Branches, Piece, Sequence, StateRow, Step, Target

TargetsAt: TypeAlias = "dict[TokenRun, tuple[Target, ...]]"


class Branch(NamedTuple):
    """A head in a step: ``shared`` of its tokens are the head's before it; ``targets`` are scored behind the others."""

    head: TokenRun
    shared: int
    targets: TargetsAt


class Probe:
    """One choice on its way to a decision."""

    def __init__(self, choice: FiniteChoice) -> None:
        self.alternatives = choice.alternatives
        self._targets = _targets(choice.alternatives)
        self._heads = sorted({a.head for a in choice.alternatives} - {()})
        self._logprobs: dict[TokenRun, dict[int, float]] = {}

    @property
    def root_targets(self) -> tuple[Target, ...]:
        """What the generating row scores."""
        return self._targets[()]

    @property
    def waiting(self) -> list[TokenRun]:
        """The heads that are not scored yet, in depth-first order."""
        return [head for head in self._heads if head not in self._logprobs]

    @property
    def min_len(self) -> int:
        """Slots without which nothing can be scored."""
        return next(map(len, self.waiting), 0)

    def branches(self, max_tokens: int) -> list[Branch]:
        """As many of the waiting heads as ``max_tokens`` allow, but at least one."""
        branches: list[Branch] = []
        previous: TokenRun = ()
        for head in self.waiting:
            shared = next((i for i, (a, b) in enumerate(zip(previous, head, strict=False)) if a != b), len(previous))
            max_tokens -= len(head) - shared
            if branches and max_tokens < 0:
                break
            nodes = [head[:end] for end in range(shared + 1, len(head) + 1)]
            targets = {n: self._targets[n] for n in nodes if n in self._targets and n not in self._logprobs}
            branches.append(Branch(head, shared, targets))
            previous = head
        return branches

    @property
    def num_waiting(self) -> int:
        """Tokens that have to enter the model to score the waiting heads."""
        return len({head[: i + 1] for head in self.waiting for i in range(len(head))})

    def record(self, node: TokenRun, logprobs: list[float]) -> None:
        """The log-probabilities of what can follow ``node``."""
        self._logprobs[node] = dict(zip(map(_key, self._targets[node]), logprobs, strict=True))

    @property
    def is_scored(self) -> bool:
        return len(self._logprobs) == len(self._targets)

    def log_masses(self) -> list[float]:
        """Each alternative's log-probability, up to what is common to all."""
        logprobs = [self._logprob(alternative) for alternative in self.alternatives]
        if not any(alternative.stops for alternative in self.alternatives):
            return logprobs
        top = max(logprobs)
        masses = own_masses(tuple(a.tokens for a in self.alternatives), [math.exp(p - top) for p in logprobs])
        return [math.log(mass) for mass in masses]

    def _logprob(self, alternative: Alternative) -> float:
        tokens = alternative.tokens
        total = sum(self._at(tokens[:i], token) for i, token in enumerate(tokens))
        return total if alternative.then is None else total + self._at(tokens, alternative.then)

    def _at(self, node: TokenRun, target: Target) -> float:
        return self._logprobs[node][_key(target)]


def _key(target: Target) -> int:
    return target if isinstance(target, int) else ~id(target)


def add_branches(step: Step, sequence: Sequence, branches: list[Branch]) -> None:
    """Puts heads into a step as one piece, behind the tokens of a generating row that are in memory or in the step.

    Their keys and values go to the first unused slots of that row's tail.
    """
    begin = len(sequence.ids) + sequence.tail_len
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    path: list[int] = []
    piece = Piece(sequence, tokens, begin)
    for head, shared, targets in branches:
        for place in path[shared:]:
            ends[place] = len(tokens)
        path = [*path[:shared], *range(len(tokens), len(tokens) + len(head) - shared)]
        tokens += head[shared:]
        depths += range(shared, len(head))
        ends += path[shared:]  # until a later head, or the last one's end, sets them
        for node, wanted in targets.items():
            depth = len(node) - 1
            step.actions.append(Action(sequence, StateRow(piece, path[depth]), begin + depth, wanted, node))
    for place in path:
        ends[place] = len(tokens)
    piece.tail_len = sequence.tail_len + len(tokens)
    piece.branches = Branches(np.array(depths), np.array(ends))
    step.add(piece)


def _targets(alternatives: tuple[Alternative, ...]) -> TargetsAt:
    """For each node of the trie, what is scored behind it: the tokens that leave it, then masks."""
    leaving: dict[TokenRun, set[int]] = defaultdict(set)
    masks: dict[TokenRun, dict[int, Target]] = defaultdict(dict)
    for alternative in alternatives:
        for i, token in enumerate(alternative.tokens):
            leaving[alternative.tokens[:i]].add(token)
        if alternative.then is not None:
            masks[alternative.tokens][_key(alternative.then)] = alternative.then
    return {node: (*sorted(leaving[node]), *masks[node].values()) for node in {*leaving, *masks}}
