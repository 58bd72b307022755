"""The fixed-size buffers of captured decode steps, filled here and read by the kernels' rules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton has no build for this platform")

from sglbatch.engine.attention.torch import AttentionKind, TorchAttention
from sglbatch.engine.attention.triton import HEIGHTS, Beside, TritonAttention, batch_arrays, list_works
from sglbatch.engine.attention.worklist import NO_TILE, TILE_WIDTH
from sglbatch.engine.batch import CausalWork, FlatBatch, SharedWork, SingleWork
from sglbatch.engine.fused.graphs import SEEN, Bucket, Buffers
from tests.test_attention_torch import NUM_SLOTS, mixed_batch
from tests.test_attention_triton import DEVICE, branches_alone, long_batch

SCRATCH = 9999


def decode_batch(num_rows: int, num_shared: int) -> FlatBatch:
    """Rows with three own slots each, and nodes of 40 slots that all rows share."""
    rows = np.arange(num_rows)
    slots = np.arange(3 * num_rows) + 5000
    singles = SingleWork(rows=rows, slots=slots, positions=slots, lens=np.full(num_rows, 3))
    shared = [
        SharedWork(q_start=0, q_end=num_rows, slots=np.arange(40 * i, 40 * i + 40), position=40 * i)
        for i in range(num_shared)
    ]
    return FlatBatch(
        input_ids=rows + 1, positions=rows + 2, write_slots=rows + 3, shared=shared, causal=[], singles=singles
    )


def views(bucket: Bucket, buffer: np.ndarray) -> dict[str, np.ndarray]:
    whole = np.zeros(bucket.offsets["slots"] + bucket.lens["slots"], dtype=np.int32)
    whole[: len(buffer)] = buffer
    return {name: whole[start : start + bucket.lens[name]] for name, start in bucket.offsets.items()}


@pytest.mark.parametrize(("num_rows", "num_shared"), [(100, 0), (100, 1), (128, 2), (1, 0)])
def test_padding_changes_nothing(num_rows: int, num_shared: int) -> None:
    batch, bucket = decode_batch(num_rows, num_shared), Bucket(128, 4)
    works = list_works(batch, group=4)
    arrays = batch_arrays(batch, works, range(num_rows))
    buffer = bucket.fill(arrays, works.num_parts, SCRATCH)
    assert buffer is not None
    ints = views(bucket, buffer)
    for name, array in arrays.items():
        if name not in ("kv_positions", *SEEN):  # what no graph reads, and what lies in arrays of its own
            assert ints[name][: len(array)].tolist() == array.tolist(), name
    assert (ints["write_slots"][num_rows:] == SCRATCH).all(), "padding rows must not write into anybody's slots"
    for height in HEIGHTS:
        padding = ints[f"{height}_tiles"][len(arrays[f"{height}_tiles"]) :]
        assert len(padding) % TILE_WIDTH == 0 and (padding[::TILE_WIDTH] == NO_TILE).all()
    num_merged = len(arrays["merge_rows"])
    assert (ints["merge_rows"][num_merged:] == bucket.num_parts - 1).all()
    assert (np.diff(ints["merge_first"][num_merged:]) == 0).all(), "padding rows have no parts"
    assert arrays["merge_parts"].max(initial=0) < bucket.num_parts - 1


@pytest.mark.parametrize(("num_rows", "num_shared"), [(128, Bucket(128, 4).num_shared + 1), (128, 6)])
def test_what_does_not_fit_is_left_to_the_eager_path(num_rows: int, num_shared: int) -> None:
    batch = decode_batch(num_rows, num_shared)
    works = list_works(batch, group=4)
    assert Bucket(128, 4).fill(batch_arrays(batch, works, range(num_rows)), works.num_parts, SCRATCH) is None


@pytest.mark.parametrize("make", [long_batch, lambda: mixed_batch(seed=3), lambda: branches_alone(20)])
def test_steps_with_runs_and_trees_are_read_from_the_buffers_as_they_are(make: Callable[[], FlatBatch]) -> None:
    buffers = Buffers(Bucket(256, 3), DEVICE, NUM_SLOTS)
    kind = AttentionKind(scaling=0.2)
    torch.manual_seed(0)
    q = torch.randn(256, 6, 16, device=DEVICE)
    k, v = torch.randn(2, NUM_SLOTS + 1, 2, 16, device=DEVICE)
    attention = TritonAttention(buffers.ints, num_parts=buffers.bucket.num_parts, group=3, beside=Beside(None, 4))
    for batch in (long_batch(), make()):  # the second finds what the first has left
        works = list_works(batch, group=3)
        assert buffers.put(batch_arrays(batch, works, range(len(batch.input_ids))), works.num_parts)
        num_rows = len(batch.input_ids)
        expected = TorchAttention(batch, DEVICE)(q[:num_rows], k, v, kind)
        assert torch.allclose(attention(q, k, v, kind)[:num_rows], expected, atol=1e-5)


def test_more_limited_slots_than_there_is_room_for_are_left_to_the_eager_path() -> None:
    bucket = Bucket(128, 4)
    slots = np.arange(bucket.num_limited + 1)
    none = slots[:0]
    batch = FlatBatch(
        input_ids=slots[:1],
        positions=slots[-1:],
        write_slots=slots[:1],
        shared=[],
        causal=[CausalWork(q_start=0, q_end=1, slots=slots, positions=slots)],
        singles=SingleWork(rows=none, slots=none, positions=none, lens=none),
    )
    works = list_works(batch, group=4)
    assert not Buffers(bucket, DEVICE, SCRATCH).put(batch_arrays(batch, works, [0]), works.num_parts)
