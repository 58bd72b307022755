"""From logits to tokens.

Shape suffixes: R rows, V vocabulary, W = ceil(V / 32) mask words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from sglbatch.engine.draw.race import race_keys
from sglbatch.engine.draw.torch import Ways, draw_tokens
from sglbatch.engine.fsm.bitmask import Bitmask
from sglbatch.engine.sequence import Target
from sglbatch.engine.transfer import to_device, upload
from sglbatch.types import TokenLogprob

MASK_ROWS = 512
"""Rows whose masks are applied at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one row's token is drawn.

    Args:
        temperature: 0 is greedy.
        seed, position: of the call, 64 bits, and the token's place in its answer: what the draw depends on.
        mask_W: int32 bitmask of allowed tokens, or None for all.
        penalties: token id -> what is taken off its logit.
        banned: tokens that may not come.
        num_top_logprobs: None asks for the token alone; else for log-probabilities too, see ``Drawn``.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    mask_W: npt.NDArray[np.int32] | None = None
    penalties: Mapping[int, float] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    num_top_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def filters(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


GREEDY = Sampling(temperature=0.0)
"""The most probable token, nothing else asked."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token with log-probabilities under the model's own distribution: its own, and the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...]


def draw(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> list[int | Drawn]:
    """One token a row, with log-probabilities where the row asks for them. ``logits_RV`` as for ``sample``."""
    logits_RV = logits_RV.float()
    asked = [i for i, s in enumerate(samplings) if s.num_top_logprobs is not None]
    logprobs = dict(zip(asked, torch.log_softmax(logits_RV[asked], dim=-1), strict=True)) if asked else {}
    drawn: list[int | Drawn] = list(sample(logits_RV, samplings))
    for i, logprobs_V in logprobs.items():
        token_id, num_top = drawn[i], samplings[i].num_top_logprobs
        assert isinstance(token_id, int) and num_top is not None
        top = logprobs_V.topk(num_top)
        pairs = tuple(zip(top.values.tolist(), top.indices.tolist(), strict=True))
        drawn[i] = Drawn(token_id, float(logprobs_V[token_id]), pairs)
    return drawn


def sample(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> list[int]:
    """One token a row. ``logits_RV``, of any type, may be changed."""
    tokens: list[int] = sample_tokens(logits_RV, samplings).tolist()
    return tokens


def sample_tokens(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """As ``sample``, int64 [R] on the logits' device."""
    if all(s is GREEDY for s in samplings):
        return logits_RV.argmax(dim=-1)
    logits_RV = logits_RV.float()
    for i, sampling in enumerate(samplings):
        if sampling.penalties or sampling.banned:
            _adjust(logits_RV[i], sampling)
    _apply_masks(logits_RV, samplings)
    tokens = logits_RV.argmax(dim=-1)
    drawn = [i for i, s in enumerate(samplings) if not s.greedy]
    if drawn:
        ways = _ways(drawn, [samplings[i] for i in drawn], logits_RV)
        tokens[ways.rows_R.long()] = _draw(logits_RV, ways)
    return tokens


def _ways(rows: list[int], samplings: Sequence[Sampling], logits_RV: torch.Tensor) -> Ways:
    vocab_size = logits_RV.shape[1]
    top_k = [s.top_k if s.top_k > 0 else vocab_size for s in samplings]
    arrays = {
        "rows_R": np.array(rows, dtype=np.int32),
        "keys_R2": race_keys([s.seed for s in samplings], [s.position for s in samplings]).ravel(),
        "top_k_R": np.array(top_k).clip(max=vocab_size).astype(np.int32),
    }
    floats = {f"{name}_R": [getattr(s, name) for s in samplings] for name in ("temperature", "top_p", "min_p")}
    arrays |= {name: np.array(values, dtype=np.float32).view(np.int32) for name, values in floats.items()}
    sent = upload(arrays, logits_RV.device)
    return Ways(
        rows_R=sent["rows_R"],
        keys_R2=sent["keys_R2"].view(-1, 2),
        top_k_R=sent["top_k_R"],
        filters=any(s.filters for s in samplings),
        **{name: sent[name].view(torch.float32) for name in floats},
    )


def _draw(logits_RV: torch.Tensor, ways: Ways) -> torch.Tensor:
    if logits_RV.device.type == "cpu":
        return draw_tokens(logits_RV, ways)
    from sglbatch.engine.draw import triton  # only where there is a GPU is there a triton for sure

    return triton.draw_tokens(logits_RV, ways)


def _adjust(logits_V: torch.Tensor, sampling: Sampling) -> None:
    if sampling.penalties:
        logits_V[list(sampling.penalties)] -= torch.tensor(list(sampling.penalties.values()), device=logits_V.device)
    if sampling.banned:
        logits_V[list(sampling.banned)] = float("-inf")


def _apply_masks(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    masked = [(i, s.mask_W) for i, s in enumerate(samplings) if s.mask_W is not None]
    for part, allowed_RV in _allowed([mask for _, mask in masked], logits_RV):
        rows = to_device([i for i, _ in masked[part]], logits_RV.device)
        logits_RV[rows] = logits_RV[rows].masked_fill(~allowed_RV, float("-inf"))


def _allowed(masks: Sequence[Bitmask], logits_RV: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some masks at a time, unpacked: which of them, and bool [their number, V]. Equal objects are uploaded once."""
    if not masks:
        return
    distinct = {id(mask): mask for mask in masks}
    place = {key: i for i, key in enumerate(distinct)}
    words_MW = to_device(np.stack(list(distinct.values())), logits_RV.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    allowed_MV = ((words_MW[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits_RV.shape[1]]
    for begin in range(0, len(masks), MASK_ROWS):
        part = slice(begin, begin + MASK_ROWS)
        yield part, allowed_MV[to_device([place[id(mask)] for mask in masks[part]], logits_RV.device)]


def score(logits_RV: torch.Tensor, targets: Sequence[Sequence[Target]]) -> list[list[float]]:
    """Log-probabilities of each row's targets under the unmodified distribution."""
    values = iter(score_targets(logits_RV, targets).tolist())
    return [[next(values) for _ in wanted] for wanted in targets]


def score_targets(logits_RV: torch.Tensor, targets: Sequence[Sequence[Target]]) -> torch.Tensor:
    """As ``score``, all rows' targets one after another, fp32 [sum of lens] on the logits' device."""
    flat = [(i, target) for i, wanted in enumerate(targets) for target in wanted]
    rows = to_device([i for i, _ in flat], logits_RV.device)
    tokens_S = to_device([t if isinstance(t, int) else 0 for _, t in flat], logits_RV.device)
    scores_S = logits_RV[rows, tokens_S].float()
    places = [place for place, (_, target) in enumerate(flat) if not isinstance(target, int)]
    masks = [target for _, target in flat if not isinstance(target, int)]
    for part, allowed_RV in _allowed(masks, logits_RV):
        asked = to_device(places[part], logits_RV.device)
        masked_RV = logits_RV[rows[asked]].masked_fill(~allowed_RV, float("-inf"))
        scores_S[asked] = torch.logsumexp(masked_RV.float(), dim=-1)
    return scores_S - torch.logsumexp(logits_RV.float(), dim=-1)[rows]
