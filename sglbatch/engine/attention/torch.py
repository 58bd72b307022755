"""Attention over a flat batch in plain torch: correct everywhere, fast enough on a CPU, the oracle for kernels.

Each work gives, for its rows, an output and the log-sum-exp of its scores; outputs of several works on the same row
are merged by their log-sum-exps (the online softmax, Milakov & Gimelshein 2018), so a shared node is read once.

Shape suffixes: T flat tokens, R rows, S or L context, K key/value heads, G query heads for each of them, Q = K * G,
D head size (of values, in outputs), N slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sglbatch.engine.batch import FlatBatch, Ints, SingleWork, TreeWork

MAX_SCORES = 1 << 24
"""Most scores held at once (64 MiB in fp32); longer works go in slices of rows."""
PADDING = 32
"""Slots by which rows that are padded together may differ, beside a factor of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKind:
    """What a layer's attention adds to plain softmax(q k^T * scaling) v."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


@dataclass(slots=True)
class _Flat:
    """Neighbouring query rows with the slots they see; mask [R, S] is True where they may look."""

    rows: slice
    slots: slice | torch.Tensor
    mask: torch.Tensor | None
    q_positions: torch.Tensor
    kv_positions: torch.Tensor
    _bias_MS: torch.Tensor | None = None

    def bias_MS(self, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask as something to add to scores, for M = R * group (row, query head) pairs; made once a step."""
        if self.mask is not None and self._bias_MS is None:
            bias_RS = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            self._bias_MS = bias_RS.masked_fill_(~self.mask, float("-inf")).repeat_interleave(group, dim=0)
        return self._bias_MS


@dataclass(frozen=True, slots=True)
class _Padded:
    rows: torch.Tensor
    slots_RL: torch.Tensor
    mask_RL: torch.Tensor
    q_positions: torch.Tensor
    kv_positions_RL: torch.Tensor


class TorchAttention:
    """The attention of one flat batch; made once a step, called once a layer."""

    def __init__(self, batch: FlatBatch, device: torch.device) -> None:
        self._device = device
        self._positions_T = self._to_device(batch.positions)
        self.write_slots_T = self._to_device(batch.write_slots)
        self._flat = [self._shared_rows(w.q_start, w.q_end, w.slots, w.position) for w in batch.shared]
        self._flat += [self._causal_rows(w.q_start, w.q_end, w.slots, w.positions) for w in batch.causal]
        self._flat += [self._tree_rows(tree) for tree in batch.trees]
        self._padded = [self._padded_rows(*padded) for padded in pad_singles(batch.singles)]

    def _to_device(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _slots(self, slots: Ints) -> slice | torch.Tensor:
        """A slice where the slots lie in one piece: then keys and values are views, not copies."""
        if len(slots) and int(slots[-1]) - int(slots[0]) == len(slots) - 1 and bool((slots[1:] > slots[:-1]).all()):
            return slice(int(slots[0]), int(slots[-1]) + 1)
        return self._to_device(slots)

    def _shared_rows(self, q_start: int, q_end: int, slots: Ints, position: int) -> _Flat:
        positions = torch.arange(position, position + len(slots), device=self._device)
        rows = slice(q_start, q_end)
        return _Flat(rows, self._slots(slots), None, self._positions_T[rows], positions)

    def _causal_rows(self, q_start: int, q_end: int, slots: Ints, positions: Ints) -> _Flat:
        num_rows, num_slots = q_end - q_start, len(slots)
        mask = torch.ones(num_rows, num_slots, dtype=torch.bool, device=self._device).tril(num_slots - num_rows)
        rows = slice(q_start, q_end)
        return _Flat(rows, self._slots(slots), mask, self._positions_T[rows], self._to_device(positions))

    def _tree_rows(self, tree: TreeWork) -> _Flat:
        i = torch.arange(tree.q_end - tree.q_start, device=self._device)[:, None]
        mask = torch.ones(len(i), len(tree.slots), dtype=torch.bool, device=self._device)
        mask[:, tree.trunk_len :] = (self._to_device(tree.seen_from) <= i) & (i < self._to_device(tree.seen_until))
        rows = slice(tree.q_start, tree.q_end)
        return _Flat(rows, self._slots(tree.slots), mask, self._positions_T[rows], self._to_device(tree.positions))

    def _padded_rows(self, rows: Ints, slots: Ints, positions: Ints, lens: Ints) -> _Padded:
        rows_R = self._to_device(rows)
        mask_RL = torch.arange(slots.shape[1], device=self._device) < self._to_device(lens)[:, None]
        return _Padded(rows_R, self._to_device(slots), mask_RL, self._positions_T[rows_R], self._to_device(positions))

    def __call__(
        self,
        q_TQD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        kind: AttentionKind,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention output [T, Q, D] in q's dtype."""
        layer = _Layer(q_TQD, k_NKD, v_NKD, kind)
        shape = (*q_TQD.shape[:2], v_NKD.shape[-1])
        out_TQD = torch.zeros(shape, dtype=torch.float32, device=q_TQD.device)
        lse_TQ = torch.full(q_TQD.shape[:2], float("-inf"), dtype=torch.float32, device=q_TQD.device)
        for padded in self._padded:
            out, lse = layer.attend_padded(padded)
            out_TQD.index_copy_(0, padded.rows, out)
            lse_TQ.index_copy_(0, padded.rows, lse)
        for work in self._flat:
            for rows, out, lse in layer.attend_flat(work):
                _merge(out_TQD[rows], lse_TQ[rows], out, lse)
        if sinks_Q is not None:
            out_TQD *= torch.sigmoid(lse_TQ - sinks_Q.float()).unsqueeze(-1)
        return out_TQD.to(q_TQD.dtype)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's queries and pools."""

    q_TQD: torch.Tensor
    k_NKD: torch.Tensor
    v_NKD: torch.Tensor
    kind: AttentionKind

    def attend_flat(self, work: _Flat) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """(rows, output, log-sum-exp) of a flat work; in slices of rows whose scores fit, where they are in memory."""
        k_SKD, v_SKD = self.k_NKD[work.slots], self.v_NKD[work.slots]
        if self._has_flash:
            bias_MS = work.bias_MS(self.q_TQD.shape[1] // k_SKD.shape[1], self.q_TQD.dtype)
            yield work.rows, *attend_flash(self.q_TQD[work.rows], k_SKD, v_SKD, bias_MS, self.kind.scaling)
            return
        mask_RS = _windowed(work.mask, work.q_positions[:, None], work.kv_positions[None, :], self.kind.window)
        num_rows = max(1, MAX_SCORES // (self.q_TQD.shape[1] * k_SKD.shape[0]))
        for begin in range(work.rows.start, work.rows.stop, num_rows):
            rows = slice(begin, min(begin + num_rows, work.rows.stop))
            mask = None if mask_RS is None else mask_RS[begin - work.rows.start : rows.stop - work.rows.start]
            yield rows, *attend_flat(self.q_TQD[rows], k_SKD, v_SKD, mask, self.kind)

    @property
    def _has_flash(self) -> bool:
        """Whether torch's flash attention for CPUs computes this kind. A window may hide all slots from a row."""
        plain = self.kind.softcap is None and self.kind.window is None
        return plain and self.v_NKD.shape[-1] == self.k_NKD.shape[-1] and self.q_TQD.device.type == "cpu"

    def attend_padded(self, work: _Padded) -> tuple[torch.Tensor, torch.Tensor]:
        mask_RL = _windowed(work.mask_RL, work.q_positions[:, None], work.kv_positions_RL, self.kind.window)
        k_RLKD, v_RLKD = self.k_NKD[work.slots_RL], self.v_NKD[work.slots_RL]
        return attend_padded(self.q_TQD[work.rows], k_RLKD, v_RLKD, mask_RL, self.kind)


def pad_singles(work: SingleWork) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
    """(rows [R], slots [R, L], positions [R, L], lens [R]) of rows with similar lens, so that padding stays bounded."""
    order = np.argsort(work.lens, kind="stable")
    starts = np.concatenate([[0], np.cumsum(work.lens)])[:-1]
    begin = 0
    while begin < len(order):
        longest = 2 * work.lens[order[begin]] + PADDING
        end = int(np.searchsorted(work.lens[order], longest, side="right"))
        chosen = order[begin:end]
        lens = work.lens[chosen]
        index_RL = np.minimum(np.arange(lens[-1]), lens[:, None] - 1) + starts[chosen][:, None]
        yield work.rows[chosen], work.slots[index_RL], work.positions[index_RL], lens
        begin = end


def _windowed(
    mask: torch.Tensor | None, q_positions: torch.Tensor, kv_positions: torch.Tensor, window: int | None
) -> torch.Tensor | None:
    """Takes out what lies further back than a sliding window reaches."""
    if window is None:
        return mask
    near = kv_positions > q_positions - window
    return near if mask is None else mask & near


def _soften(scores: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    scores = scores.float() * kind.scaling
    return scores if kind.softcap is None else torch.tanh(scores / kind.softcap) * kind.softcap


def _softmax(scores: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities over the last dimension and the log-sum-exp; a row that may see nothing gives 0 and -inf."""
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    probs = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float32).min))
    return probs, lse.squeeze(-1)


def attend_flat(
    q_RQD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    mask_RS: torch.Tensor | None,
    kind: AttentionKind,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows over one context: output fp32 [R, Q, D] and log-sum-exp fp32 [R, Q]."""
    R, Q, D = q_RQD.shape
    K = k_SKD.shape[1]
    q_KMD = q_RQD.view(R, K, Q // K, D).permute(1, 0, 2, 3).reshape(K, R * (Q // K), D)
    scores_KMS = _soften(torch.bmm(q_KMD, k_SKD.permute(1, 2, 0)), kind)
    mask_MS = None if mask_RS is None else mask_RS.repeat_interleave(Q // K, dim=0)
    probs_KMS, lse_KM = _softmax(scores_KMS, mask_MS)
    out_KMD = torch.bmm(probs_KMS.to(v_SKD.dtype), v_SKD.permute(1, 0, 2)).float()
    out_RQD = out_KMD.view(K, R, Q // K, -1).permute(1, 0, 2, 3).reshape(R, Q, -1)
    return out_RQD, lse_KM.view(K, R, Q // K).permute(1, 0, 2).reshape(R, Q)


def attend_flash(
    q_RQD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    bias_MS: torch.Tensor | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend_flat`` by torch's flash attention for CPUs: scores never reach memory, 6 to 14 times as fast.

    Every row must see a slot.
    """
    R, Q, D = q_RQD.shape
    K = k_SKD.shape[1]
    q_KMD = q_RQD.view(R, K, Q // K, D).permute(1, 0, 2, 3).reshape(K, R * (Q // K), D)
    out_1KMD, lse_1KM = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_KMD[None],
        k_SKD.permute(1, 0, 2)[None],
        v_SKD.permute(1, 0, 2)[None],
        attn_mask=None if bias_MS is None else bias_MS[None, None],
        scale=scaling,
    )
    out_RQD = out_1KMD[0].float().view(K, R, Q // K, -1).permute(1, 0, 2, 3).reshape(R, Q, -1)
    return out_RQD, lse_1KM[0].view(K, R, Q // K).permute(1, 0, 2).reshape(R, Q)


def attend_padded(
    q_RQD: torch.Tensor,
    k_RLKD: torch.Tensor,
    v_RLKD: torch.Tensor,
    mask_RL: torch.Tensor | None,
    kind: AttentionKind,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row over its own context: output fp32 [R, Q, D] and log-sum-exp fp32 [R, Q]."""
    R, Q, D = q_RQD.shape
    K = k_RLKD.shape[2]
    q_RKGD = q_RQD.view(R, K, Q // K, D)
    scores_RKGL = _soften(torch.matmul(q_RKGD, k_RLKD.permute(0, 2, 3, 1)), kind)
    probs_RKGL, lse_RKG = _softmax(scores_RKGL, None if mask_RL is None else mask_RL[:, None, None, :])
    out_RKGD = torch.matmul(probs_RKGL.to(v_RLKD.dtype), v_RLKD.permute(0, 2, 1, 3)).float()
    return out_RKGD.reshape(R, Q, -1), lse_RKG.reshape(R, Q)


def _merge(out_RQD: torch.Tensor, lse_RQ: torch.Tensor, new_RQD: torch.Tensor, new_lse_RQ: torch.Tensor) -> None:
    """Merges another part of the same rows' softmax into (out, lse), in place."""
    total_RQ = torch.logaddexp(lse_RQ, new_lse_RQ)
    base_RQ = total_RQ.clamp(min=torch.finfo(torch.float32).min)
    out_RQD.mul_(torch.exp(lse_RQ - base_RQ).unsqueeze(-1))
    out_RQD.addcmul_(new_RQD, torch.exp(new_lse_RQ - base_RQ).unsqueeze(-1))
    lse_RQ.copy_(total_RQ)
