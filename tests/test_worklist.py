"""Works and their tiles, read as the kernels read them: every pair of a row and a query head sees its slots once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton has no build for this platform")

from sglbatch.engine.attention.triton import HEIGHTS, batch_arrays, list_works, tile_pairs
from sglbatch.engine.attention.worklist import NO_TILE, TILE_FIELDS, TILE_WIDTH
from sglbatch.engine.batch import CausalWork, FlatBatch, SharedWork, SingleWork
from sglbatch.engine.fused.graphs import Bucket

SCRATCH = 1 << 20
GROUPS = st.one_of(st.integers(1, 16), st.sampled_from([32, 48, 64, 65, 80, 128, 200]))


def make_batch(rng: np.random.Generator, num_rows: int, num_shared: int, *, causal: bool) -> FlatBatch:
    """Nodes over any runs of rows; each row has slots of its own, or is part of a prefill."""
    num_taken = 0

    def take(num: int) -> Any:
        nonlocal num_taken
        num_taken += num
        return np.arange(num_taken - num, num_taken)

    shared = []
    for _ in range(num_shared):
        start, end = sorted(rng.choice(num_rows + 1, 2, replace=False).tolist())
        num = int(rng.choice([1, 3, 40, 1023, 1024, 1025, 2500], p=[0.2, 0.3, 0.4, 0.025, 0.025, 0.025, 0.025]))
        shared.append(SharedWork(q_start=start, q_end=end, slots=take(num), position=0))
    first = int(rng.integers(num_rows + 1)) if causal else num_rows
    prefills = []
    at = first
    while at < num_rows:
        size = min(int(rng.integers(1, 70)), num_rows - at)
        own = take(size + int(rng.integers(0, 20)))
        prefills.append(CausalWork(q_start=at, q_end=at + size, slots=own, positions=np.zeros_like(own)))
        at += size
    lens = rng.integers(1, 6, first)
    own = take(int(lens.sum()))
    return FlatBatch(
        input_ids=np.zeros(num_rows, dtype=np.int64),
        positions=np.zeros(num_rows, dtype=np.int64),
        write_slots=np.zeros(num_rows, dtype=np.int64),
        shared=shared,
        causal=prefills,
        singles=SingleWork(rows=np.arange(first), slots=own, positions=np.zeros_like(own), lens=lens),
    )


def mask_of(slots: Any) -> int:
    """A bit for each slot of a run."""
    if not len(slots):
        return 0
    first = int(slots[0])
    assert (np.diff(slots) == 1).all(), "a node's or a row's slots lie side by side here"
    return ((1 << len(slots)) - 1) << first


def union(masks: Iterable[int]) -> int:
    """Of slots that are in one mask each."""
    whole = 0
    for mask in masks:
        assert not whole & mask, "seen twice"
        whole |= mask
    return whole


def slots_of_rows(batch: FlatBatch) -> list[int]:
    rows: list[list[int]] = [[] for _ in batch.input_ids]
    for shared in batch.shared:
        for row in range(shared.q_start, shared.q_end):
            rows[row].append(mask_of(shared.slots))
    for causal in batch.causal:
        num_before = len(causal.slots) - (causal.q_end - causal.q_start)
        for i, row in enumerate(range(causal.q_start, causal.q_end)):
            rows[row].append(mask_of(causal.slots[: num_before + i + 1]))
    ends = np.cumsum(batch.singles.lens)
    for row, end, num in zip(batch.singles.rows, ends, batch.singles.lens, strict=True):
        rows[row].append(mask_of(batch.singles.slots[end - num : end]))
    return [union(masks) for masks in rows]


def attend(ints: Mapping[str, Any], group: int) -> dict[int, dict[int, int]]:
    """What each part has of each query head, as ``attend_tiles`` goes through the tiles; nothing is written twice."""
    parts: dict[int, dict[int, int]] = defaultdict(dict)
    for height in HEIGHTS:
        pairs = tile_pairs(group)[height]
        for tile in ints[f"{height}_tiles"].reshape(-1, TILE_WIDTH)[:, : len(TILE_FIELDS)].tolist():
            index, first_row, num_rows, first, num_slots, causal, first_part = tile
            if index == NO_TILE:
                continue
            assert 0 <= first_row < len(ints["positions"]) and index * pairs < num_rows * group, "an empty tile"
            mask = mask_of(ints["slots"][first : first + num_slots])
            for pair in range(index * pairs, min((index + 1) * pairs, num_rows * group)):
                row, head = divmod(pair, group)
                part = parts[first_part + row]
                assert head not in part, "written twice"
                part[head] = mask & (mask >> (num_rows - 1 - row if causal else 0))
    return parts


def merge(parts: dict[int, dict[int, int]], ints: Mapping[str, Any], num_rows: int, group: int) -> list[dict[int, int]]:
    """Each row's query heads after the merge."""
    outputs = {row: parts[row] for row in range(num_rows) if row in parts}
    for i, row in enumerate(ints["merge_rows"].tolist()):
        own = ints["merge_parts"][ints["merge_first"][i] : ints["merge_first"][i + 1]].tolist()
        if own:
            assert row not in outputs
            outputs[row] = {head: union(parts[part][head] for part in own) for head in range(group)}
    return [outputs[row] for row in range(num_rows)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_rows=st.one_of(st.integers(1, 20), st.integers(1, 128)),
    num_shared=st.integers(0, 6),
    group=GROUPS,
    causal=st.booleans(),
    merge_all=st.booleans(),
)
def test_every_pair_sees_its_slots_once(  # noqa: PLR0917
    seed: int, num_rows: int, num_shared: int, group: int, causal: bool, merge_all: bool
) -> None:
    batch = make_batch(np.random.default_rng(seed), num_rows, num_shared, causal=causal)
    expected = [dict.fromkeys(range(group), slots) for slots in slots_of_rows(batch)]
    works = list_works(batch, group=group, merge_all=merge_all)
    arrays = batch_arrays(batch, works, range(num_rows))
    assert merge(attend(arrays, group), arrays, num_rows, group) == expected
    if causal or merge_all:
        return
    bucket = Bucket(128, group)
    buffer = bucket.fill(arrays, works.num_parts, SCRATCH)
    if buffer is None:
        assert num_shared > 1, "a graph has room for one node over all rows"
        return
    whole = np.concatenate([buffer, np.zeros(bucket.lens["slots"], dtype=np.int32)])
    ints = {name: whole[start : start + bucket.lens[name]] for name, start in bucket.offsets.items()}
    assert merge(attend(ints, group), ints, num_rows, group) == expected
