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
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np

from sglbatch.engine.fsm.finite import Alternative, FiniteChoice, TokenRun, common_len
from sglbatch.engine.masses import own_masses
from sglbatch.engine.sequence import Action, Branches, Piece, Sequence, StateRow, Step, Target

TargetsAt: TypeAlias = "dict[TokenRun, tuple[Target, ...]]"

MAX_TRIES: Final = 4096
"""Of choices that are remembered."""


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Heads in a step: their tokens as branches, a common beginning once, and what is scored where.

    Attributes:
        scored: (index of a token, its depth, what is scored behind it, the tokens up to it).
    """

    tokens: list[int]
    branches: Branches
    scored: list[tuple[int, int, tuple[Target, ...], TokenRun]]


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """A choice's alternatives as a trie; the same for all rows that come to the choice.

    Attributes:
        targets: what is scored behind each node.
        heads: in depth-first order.
        whole: all of them.
    """

    targets: TargetsAt
    heads: list[TokenRun]
    whole: Heads

    @staticmethod
    @lru_cache(MAX_TRIES)
    def of(choice: FiniteChoice) -> Trie:
        targets = _targets(choice.alternatives)
        heads = sorted({a.head for a in choice.alternatives} - {()})
        return Trie(targets, heads, _laid_out(heads, targets))


class Probe:
    """One choice on its way to a decision."""

    def __init__(self, choice: FiniteChoice) -> None:
        self.alternatives = choice.alternatives
        self._trie = Trie.of(choice)
        self._targets = self._trie.targets
        self._logprobs: dict[TokenRun, dict[int, float]] = {}

    @property
    def root_targets(self) -> tuple[Target, ...]:
        """What the generating row scores."""
        return self._targets[()]

    @property
    def _is_new(self) -> bool:
        """No head is scored."""
        return len(self._logprobs) == (() in self._logprobs)

    @property
    def waiting(self) -> list[TokenRun]:
        """The heads that are not scored yet, in depth-first order."""
        heads = self._trie.heads
        return heads if self._is_new else [head for head in heads if head not in self._logprobs]

    @property
    def min_len(self) -> int:
        """Slots without which nothing can be scored."""
        return next(map(len, self.waiting), 0)

    def heads(self, max_tokens: int) -> Heads:
        """As many of the waiting heads as ``max_tokens`` allow, but at least one."""
        if self._is_new and len(self._trie.whole.tokens) <= max_tokens:
            return self._trie.whole
        heads: list[TokenRun] = []
        previous: TokenRun = ()
        for head in self.waiting:
            max_tokens -= len(head) - common_len([previous, head])
            if heads and max_tokens < 0:
                break
            heads.append(head)
            previous = head
        return _laid_out(heads, {n: t for n, t in self._targets.items() if n not in self._logprobs})

    @property
    def num_waiting(self) -> int:
        """Tokens that have to enter the model to score the waiting heads."""
        if self._is_new:
            return len(self._trie.whole.tokens)
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


def add_heads(step: Step, sequence: Sequence, heads: Heads) -> None:
    """Puts heads into a step as one piece, behind the tokens of a generating row that are in memory or in the step.

    Their keys and values go to the first unused slots of that row's tail.
    """
    begin, tail_len = len(sequence.ids) + sequence.tail_len, sequence.tail_len + len(heads.tokens)
    piece = Piece(sequence, heads.tokens, begin, tail_len=tail_len, branches=heads.branches)
    step.add(piece)
    step.actions += [
        Action(sequence, StateRow(piece, index), begin + depth, targets, node)
        for index, depth, targets, node in heads.scored
    ]


def _laid_out(heads: Seq[TokenRun], targets: TargetsAt) -> Heads:
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    scored: list[tuple[int, int, tuple[Target, ...], TokenRun]] = []
    previous: TokenRun = ()
    path: list[int] = []
    for head in heads:
        shared = common_len([previous, head])
        for place in path[shared:]:
            ends[place] = len(tokens)
        path = [*path[:shared], *range(len(tokens), len(tokens) + len(head) - shared)]
        tokens += head[shared:]
        depths += range(shared, len(head))
        ends += path[shared:]  # until a later head, or the last one's end, sets them
        nodes = [(depth, head[: depth + 1]) for depth in range(shared, len(head))]
        scored += [(path[depth], depth, targets[node], node) for depth, node in nodes if node in targets]
        previous = head
    for place in path:
        ends[place] = len(tokens)
    return Heads(tokens, Branches(np.array(depths), np.array(ends)), scored)


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
