"""Attention over shared nodes, merged by log-sum-exp, against plain attention row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sglbatch.engine.attention.torch import AttentionKind, TorchAttention
from sglbatch.engine.batch import FlatBatch, flatten
from sglbatch.engine.scheduler import Scheduler, SchedulerConfig
from sglbatch.engine.sequence import Sequence
from sglbatch.types import Generate, Request

NUM_SLOTS = 600


def mixed_batch(seed: int) -> FlatBatch:
    """A step with every kind of work, from the real scheduler: rows that share nodes, a cut row, decoding rows."""
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(SchedulerConfig(num_slots=NUM_SLOTS, max_batch_tokens=60, max_rows=16))
    shared = rng.integers(0, 9, size=40)
    middle = rng.integers(0, 9, size=3)
    for i in range(12):
        own = rng.integers(0, 9, size=rng.integers(1, 20))
        ids = np.concatenate([shared, *([middle] if i % 2 else []), own]).astype(np.int32)
        operation = Generate(max_tokens=30, temperature=0.0)
        request = Request(request_id=i, program_id=i, prompt_ids=ids, operation=operation, seed=0)
        scheduler.add(Sequence(request, ids, priority=(i,)))
    while True:
        step = scheduler.schedule()
        scheduler.land(step)
        batch, _ = flatten(step, with_positions=True, share_prefill=True)
        if batch.shared and batch.causal and len(batch.singles.rows):
            return batch
        for sequence in scheduler.running:
            sequence.output_ids.append(int(rng.integers(0, 9)))


def plain(batch: FlatBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    """float64, one row and one head at a time."""
    rows: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(batch.input_ids))}
    for work in batch.shared:
        for i in range(work.q_start, work.q_end):
            rows[i] += [(s, work.position + j) for j, s in enumerate(work.slots.tolist())]
    for causal in batch.causal:
        context = len(causal.slots) - (causal.q_end - causal.q_start)
        for j, i in enumerate(range(causal.q_start, causal.q_end)):
            pairs = list(zip(causal.slots.tolist(), causal.positions.tolist(), strict=True))
            rows[i] += pairs[: context + j + 1]
    singles, ends = batch.singles, np.cumsum(batch.singles.lens)
    for i, end, n in zip(singles.rows, ends, singles.lens, strict=True):
        slots, positions = singles.slots[end - n : end], singles.positions[end - n : end]
        rows[int(i)] += list(zip(slots.tolist(), positions.tolist(), strict=True))
    num_heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], num_heads, v.shape[2], dtype=torch.float64)
    for i, pairs in rows.items():
        first = -1 if kind.window is None else int(batch.positions[i]) - kind.window
        slots = [s for s, p in pairs if p > first]
        for h in range(num_heads):
            scores = k[slots, h // group].double() @ q[i, h].double() * kind.scaling
            scores = scores if kind.softcap is None else kind.softcap * torch.tanh(scores / kind.softcap)
            out[i, h] = torch.softmax(scores, dim=0) @ v[slots, h // group].double()
    return out


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("value_size", [16, 24], ids=["flash", "in memory"])
@pytest.mark.parametrize(
    "kind",
    [AttentionKind(scaling=0.2), AttentionKind(scaling=0.2, softcap=5.0), AttentionKind(scaling=0.2, window=17)],
    ids=["plain", "softcap", "window"],
)
def test_equals_plain_attention(heads: tuple[int, int], kind: AttentionKind, value_size: int) -> None:
    batch = mixed_batch(seed=heads[1])
    torch.manual_seed(0)
    q = torch.randn(len(batch.input_ids), heads[0], 16)
    k, v = torch.randn(NUM_SLOTS + 1, heads[1], 16), torch.randn(NUM_SLOTS + 1, heads[1], value_size)
    out = TorchAttention(batch, torch.device("cpu"))(q, k, v, kind)
    expected = plain(batch, q, k, v, kind)
    assert (out.double() - expected).norm() / expected.norm() < 1e-6


def test_sinks_take_their_share() -> None:
    batch = mixed_batch(seed=5)
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 2, 8) for n in (len(batch.input_ids), NUM_SLOTS + 1, NUM_SLOTS + 1))
    kind, sinks = AttentionKind(scaling=1 / math.sqrt(8)), torch.tensor([0.5, -1.0])
    attention = TorchAttention(batch, torch.device("cpu"))
    ones = attention(q, k, torch.ones_like(v), kind, sinks)
    i = int(np.argmax(batch.positions == batch.positions.min()))
    assert (ones < 1).all(), "the sinks' share must be missing from the weights"
    weights = ones[:, :, 0]
    assert torch.allclose(attention(q, k, v, kind, sinks), attention(q, k, v, kind) * weights[..., None], atol=1e-6)
    assert weights[i].shape == (2,)


def test_long_works_go_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = mixed_batch(seed=3)
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 2, 8) for n in (len(batch.input_ids), NUM_SLOTS + 1, NUM_SLOTS + 1))
    attention, kind = TorchAttention(batch, torch.device("cpu")), AttentionKind(scaling=0.3, softcap=9.0)
    whole = attention(q, k, v, kind)
    monkeypatch.setattr("sglbatch.engine.attention.torch.MAX_SCORES", 200)
    assert torch.allclose(attention(q, k, v, kind), whole, atol=1e-6)
