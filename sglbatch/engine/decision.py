"""What a step decides: tokens and scores, on their way from the device to the scheduler.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeAlias

import torch

from sglbatch.engine.sampler import Drawn, Sampling, draw, sample_tokens, score_targets
from sglbatch.engine.sequence import Target
from sglbatch.engine.transfer import to_device

Output: TypeAlias = "int | Drawn | list[float]"
"""A sampled token id, one with log-probabilities, or the log-probabilities of an action's targets."""


class Pending:
    """A step's outputs, one for each action; on a GPU they may still be on their way."""

    def __init__(self, num_actions: int) -> None:
        self._outputs: list[Output] = [0] * num_actions
        self._tokens: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        """Places, ids on the device, and the same on their way to the processor."""
        self._scores: list[tuple[list[int], list[int], torch.Tensor]] = []
        self._event: torch.cuda.Event | None = None

    def add_outputs(self, places: list[int], outputs: Sequence[Output]) -> None:
        for place, output in zip(places, outputs, strict=True):
            self._outputs[place] = output

    def add_tokens(self, places: list[int], tokens_R: torch.Tensor) -> None:
        """Sampled ids, int64 [R]."""
        self._tokens.append((places, tokens_R, _to_host(tokens_R)))

    def add_scores(self, places: list[int], lens: list[int], scores: torch.Tensor) -> None:
        """Log-probabilities of all targets of the given actions, one after another."""
        self._scores.append((places, lens, _to_host(scores)))

    def seal(self, device: torch.device) -> None:
        """Everything has been launched."""
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def tokens_at(self, places: list[int]) -> torch.Tensor:
        """Sampled ids of some actions, int64 on the device, without waiting for them."""
        index = {place: i for i, place in enumerate(chain.from_iterable(places for places, *_ in self._tokens))}
        tokens_R = torch.cat([tokens for _, tokens, _ in self._tokens])
        return tokens_R[to_device([index[place] for place in places], tokens_R.device)]

    def result(self) -> list[Output]:
        """Waits for this step, not for any that was launched after it."""
        if self._event is not None:
            self._event.synchronize()
        for places, _, tokens in self._tokens:
            self.add_outputs(places, tokens.tolist())
        for places, lens, scores in self._scores:
            values, ends = scores.tolist(), list(accumulate(lens))
            self.add_outputs(places, [values[end - n : end] for end, n in zip(ends, lens, strict=True)])
        return self._outputs


@dataclass(frozen=True, slots=True)
class IdsInFlight:
    """Token ids that a step takes from the one before it, on the device.

    rows_F: int64 [F], the flat rows that they are for; tokens_F: int64 [F].
    """

    rows_F: torch.Tensor
    tokens_F: torch.Tensor

    def put_into(self, input_ids_T: torch.Tensor) -> None:
        input_ids_T.index_copy_(0, self.rows_F, self.tokens_F.to(input_ids_T.dtype))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _rows(logits_RV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits_RV if len(rows) == len(logits_RV) else logits_RV[to_device(rows, logits_RV.device)]


def decide(
    pending: Pending,
    first: int,
    logits_RV: torch.Tensor,
    targets: Sequence[tuple[Target, ...]],
    samplings: Sequence[Sampling | None],
) -> None:
    """Decides the actions first, first + 1, ... whose logits these are. Scores first: sampling changes the logits."""
    scored = [i for i, s in enumerate(samplings) if s is None]
    if scored:
        wanted = [targets[i] for i in scored]
        scores = score_targets(_rows(logits_RV, scored), wanted)
        pending.add_scores([first + i for i in scored], [len(t) for t in wanted], scores)
    drawn = [(i, s) for i, s in enumerate(samplings) if s is not None]
    for asks_more in (False, True):  # rows that may be followed unseen have their tokens on the device, see tokens_at
        some = [(i, s) for i, s in drawn if (s.num_top_logprobs is not None) == asks_more]
        if not some:
            continue
        rows_RV = _rows(logits_RV, [i for i, _ in some])
        places, ways = [first + i for i, _ in some], [s for _, s in some]
        if asks_more:
            pending.add_outputs(places, draw(rows_RV, ways))
        else:
            pending.add_tokens(places, sample_tokens(rows_RV, ways))
