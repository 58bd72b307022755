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
from sglbatch.engine.attention.worklist import CHUNK, NO_TILE, TILE_WIDTH
from sglbatch.engine.batch import CausalWork, FlatBatch, SharedWork, SingleWork, TreeWork, plant
from sglbatch.engine.fused.graphs import Bucket
from tests.engine_stub import seen_in_tree

SCRATCH = 1 << 20
GROUPS = st.one_of(st.integers(1, 16), st.sampled_from([32, 48, 64, 65, 80, 128, 200]))


def make_batch(
    rng: np.random.Generator, num_rows: int, num_shared: int, *, causal: bool, has_positions: bool = True
) -> FlatBatch:
    """Nodes over any runs of rows; each row has slots of its own, or is part of a prefill, alone or in a tree.

    Slots lie side by side, mostly with a gap somewhere.
    """
    num_taken = 0

    def take(num: int) -> Any:
        nonlocal num_taken
        num_taken += num + 1
        slots = np.arange(num_taken - num, num_taken)
        slots[: int(rng.integers(num + 1))] -= 1
        return slots

    shared = []
    for _ in range(num_shared):
        start, end = sorted(rng.choice(num_rows + 1, 2, replace=False).tolist())
        num = int(rng.choice([1, 3, 40, 1023, 1024, 1025, 2500], p=[0.2, 0.3, 0.4, 0.025, 0.025, 0.025, 0.025]))
        shared.append(SharedWork(q_start=start, q_end=end, slots=take(num), position=0))
    first = int(rng.integers(num_rows + 1)) if causal else num_rows
    prefills, trees = [], []
    at = first
    while at < num_rows:
        size = min(int(rng.integers(1, 70)) if rng.random() < 0.8 else 200, num_rows - at)
        own = take(size + int(rng.integers(0, 20) if rng.random() < 0.7 else rng.integers(50, 300)))
        if rng.random() < 0.5:
            trunk_len = int(rng.integers(len(own) + 1)) if rng.random() < 0.8 else 0
            seen_from, seen_until = np.sort(rng.integers(0, size + 1, (2, len(own) - trunk_len)), axis=0)
            if not trunk_len:  # behind shared nodes alone, where a row sees itself at least
                seen_from[-size:] = np.arange(size)
                seen_until[-size:] = np.maximum(seen_until[-size:], seen_from[-size:] + 1)
            trees.append(
                TreeWork(
                    q_start=at,
                    q_end=at + size,
                    slots=own,
                    positions=np.zeros_like(own),
                    seen_from=seen_from,
                    seen_until=seen_until,
                )
            )
        else:
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
        trees=trees,
        has_positions=has_positions,
    )


def mask_of(slots: Any) -> int:
    """A bit for each slot."""
    if len(slots) and (np.diff(slots) == 1).all():  # a run
        return ((1 << len(slots)) - 1) << int(slots[0])
    return union(1 << slot for slot in slots.tolist())


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
    for tree in batch.trees:
        for i, row in enumerate(range(tree.q_start, tree.q_end)):
            rows[row].append(mask_of(seen_in_tree(tree, i)))
    ends = np.cumsum(batch.singles.lens)
    for row, end, num in zip(batch.singles.rows, ends, batch.singles.lens, strict=True):
        rows[row].append(mask_of(batch.singles.slots[end - num : end]))
    return [union(masks) for masks in rows]


def attend(ints: Mapping[str, Any], group: int) -> dict[int, dict[int, int]]:
    """What each part has of each query head, as ``attend_tiles`` goes through the tiles; nothing is written twice."""
    parts: dict[int, dict[int, int]] = defaultdict(dict)
    for height in HEIGHTS:
        pairs = tile_pairs(group)[height]
        for tile in ints[f"{height}_tiles"].reshape(-1, TILE_WIDTH).tolist():
            index, first_row, num_rows, first, num_whole, skip, num_slots, first_part, run, num_runs, *own = tile
            if index == NO_TILE:
                continue
            assert 0 <= first_row < len(ints["positions"]) and index * pairs < num_rows * group, "an empty tile"
            assert 0 <= num_whole <= num_slots
            runs = [*(ints["runs"].reshape(-1, 2)[run : run + num_runs].tolist() if num_runs else []), own]
            in_runs = [mask_of(slot + np.arange(num_chunks * CHUNK)) for slot, num_chunks in runs]
            assert height != "narrow" or not any(in_runs)
            whole = union([mask_of(ints["slots"][first : first + num_whole]), *in_runs])
            rest = slice(first + num_whole + skip, first + num_slots + skip)
            for pair in range(index * pairs, min((index + 1) * pairs, num_rows * group)):
                row, head = divmod(pair, group)
                part = parts[first_part + row]
                assert head not in part, "written twice"
                sees = (ints["seen_from"][rest] <= row) & (row < ints["seen_until"][rest])
                part[head] = union([whole, mask_of(ints["slots"][rest][sees])])
                assert part[head], "a row sees something of each of its works"
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
    num_rows=st.one_of(st.integers(1, 20), st.integers(1, 128), st.integers(100, 400)),
    num_shared=st.integers(0, 6),
    group=GROUPS,
    causal=st.booleans(),
    merge_all=st.booleans(),
    has_positions=st.booleans(),
    with_runs=st.booleans(),
)
def test_every_pair_sees_its_slots_once(  # noqa: PLR0917
    seed: int,
    num_rows: int,
    num_shared: int,
    group: int,
    causal: bool,
    merge_all: bool,
    has_positions: bool,
    with_runs: bool,
) -> None:
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, num_rows, num_shared, causal=causal, has_positions=has_positions)
    expected = [dict.fromkeys(range(group), slots) for slots in slots_of_rows(batch)]
    works = list_works(batch, group=group, merge_all=merge_all, with_runs=with_runs)
    assert (works.runs is not None) == (with_runs and not has_positions)
    arrays = batch_arrays(batch, works, range(num_rows))
    assert merge(attend(arrays, group), arrays, num_rows, group) == expected
    if causal or merge_all or num_rows > 128:
        return
    assert not len(arrays["seen_from"]) and not len(arrays["seen_until"])
    bucket = Bucket(128, group, works.runs is not None)
    buffer = bucket.fill(arrays, works.num_parts, SCRATCH)
    if buffer is None:
        assert num_shared > 1, "a graph has room for one node over all rows"
        return
    whole = np.concatenate([buffer, np.zeros(bucket.lens["slots"], dtype=np.int32)])
    ints = {name: whole[start : start + bucket.lens[name]] for name, start in bucket.offsets.items()}
    ints["seen_from"] = ints["seen_until"] = ints["slots"]
    assert merge(attend(ints, group), ints, num_rows, group) == expected


def random_paths(rng: np.random.Generator, num_pieces: int) -> list[CausalWork]:
    """Pieces in depth-first order; each leaves the path of the one before it, and may begin before or behind that."""
    works: list[CausalWork] = []
    path, q_start, num_taken = np.empty(0, dtype=np.int64), 0, 0
    for _ in range(num_pieces):
        alike = int(rng.integers(len(path) + 1)) if rng.random() < 0.7 else int(0.9 * len(path))
        num_new = int(rng.integers(1, 30))
        path = np.concatenate([path[:alike], np.arange(num_taken, num_taken + num_new)])
        num_taken += num_new
        num_rows = int(rng.integers(num_new, min(len(path), num_new + 3) + 1)) if rng.random() < 0.2 else num_new
        q_start += int(rng.random() < 0.1)  # a row that is not prefilled
        works.append(CausalWork(q_start=q_start, q_end=q_start + num_rows, slots=path, positions=np.arange(len(path))))
        q_start += num_rows
    return works


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_pieces=st.integers(1, 40))
def test_a_row_in_a_tree_sees_what_its_piece_did(seed: int, num_pieces: int) -> None:
    works = random_paths(np.random.default_rng(seed), num_pieces)
    trees, alone = plant(works)
    kept = {id(work) for work in alone}
    seen: dict[int, list[int]] = {}
    for tree in trees:
        for i, row in enumerate(range(tree.q_start, tree.q_end)):
            assert row not in seen, "a row in two works"
            seen[row] = sorted(seen_in_tree(tree, i).tolist())
    for work in works:
        context_len = len(work.slots) - (work.q_end - work.q_start)
        for i, row in enumerate(range(work.q_start, work.q_end)):
            assert (row in seen) != (id(work) in kept)
            assert row not in seen or seen[row] == sorted(work.slots[: context_len + i + 1].tolist())


def test_neighbours_on_a_long_prompt_are_one_tree() -> None:
    prompt = np.arange(100)
    works = [
        CausalWork(
            q_start=8 * i,
            q_end=8 * i + 8,
            slots=np.concatenate([prompt, 100 + 8 * i + np.arange(8)]),
            positions=np.arange(108),
        )
        for i in range(5)
    ]
    trees, alone = plant(works)
    assert not alone and [(t.q_start, t.q_end, t.trunk_len, len(t.slots)) for t in trees] == [(0, 40, 100, 140)]
