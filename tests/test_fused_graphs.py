"""The fixed-size buffers of captured decode steps, filled here and read by the kernels' rules."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton has no build for this platform")

from sglbatch.engine.attention.triton import HEIGHTS, batch_arrays, list_works
from sglbatch.engine.attention.worklist import NO_TILE, TILE_WIDTH
from sglbatch.engine.batch import FlatBatch, SharedWork, SingleWork
from sglbatch.engine.fused.graphs import Bucket

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
        if name not in ("kv_positions", "seen_from", "seen_until"):  # what no decode step reads
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
