"""The fixed-size buffers of captured decode steps, filled here and read by the kernels' rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton has no build for this platform")

from sglbatch.engine.attention.torch import AttentionKind, TorchAttention
from sglbatch.engine.attention.triton import HEIGHTS, Beside, TritonAttention, batch_arrays, list_works
from sglbatch.engine.attention.worklist import NO_TILE, TILE_WIDTH
from sglbatch.engine.batch import CausalWork, FlatBatch, SharedWork, SingleWork
from sglbatch.engine.fused.graphs import SEEN, Bucket, Buffers, StepGraphs
from sglbatch.types import Choose, Generate, Operation, Request, Result
from tests.engine_stub import VOCAB
from tests.test_attention_torch import NUM_SLOTS, mixed_batch
from tests.test_attention_triton import DEVICE, branches_alone, long_batch, tiny_engine

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
        input_ids=rows + 1,
        positions=rows + 2,
        write_slots=rows + 3,
        shared=shared,
        causal=[],
        singles=singles,
        has_positions=False,
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


@pytest.mark.parametrize(
    "make",
    [long_batch, lambda: long_batch(in_order=True), lambda: mixed_batch(seed=3), lambda: branches_alone(20)],
)
def test_steps_with_runs_and_trees_are_read_from_the_buffers_as_they_are(make: Callable[[], FlatBatch]) -> None:
    buffers = Buffers(Bucket(256, 3), DEVICE, NUM_SLOTS)
    kind = AttentionKind(scaling=0.2)
    torch.manual_seed(0)
    q = torch.randn(256, 6, 16, device=DEVICE)
    k, v = torch.randn(2, NUM_SLOTS + 1, 2, 16, device=DEVICE)
    attention = TritonAttention(buffers.ints, num_parts=buffers.bucket.num_parts, group=3, beside=Beside(None, 4))
    for given in (long_batch(), make()):  # the second finds what the first has left
        batch = replace(given, has_positions=False)
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
        has_positions=False,
    )
    works = list_works(batch, group=4)
    assert not Buffers(bucket, DEVICE, SCRATCH).put(batch_arrays(batch, works, [0]), works.num_parts)


class Uncaptured:
    """A bucket whose body runs where its graph would be replayed; final states lie in one place too."""

    def __init__(self, buffers: Buffers, body: Any) -> None:
        bucket = buffers.bucket
        self.buffers = buffers
        self.attention = TritonAttention(
            buffers.ints, num_parts=bucket.num_parts, group=bucket.group, beside=Beside(None, 4)
        )
        self.graph = self
        self._body = body
        self.states_RH = torch.empty(0)

    def replay(self) -> None:
        states_RH = self._body(self.attention.input_ids_T, self.attention.positions_T, self.attention, None)
        self.states_RH = self.states_RH if len(self.states_RH) else torch.empty_like(states_RH)
        self.states_RH.copy_(states_RH)


class UncapturedGraphs(StepGraphs):
    """Step graphs where there is no CUDA."""

    def __init__(self, runner: Any) -> None:
        self._group = runner._group
        self._with_runs = True
        self._buckets: dict[int, Uncaptured] = {}
        self._runner = runner
        self.num_rows: list[int] = []
        """Of the steps that were replayed."""

    def _capture(self, num_rows: int) -> Any:
        scratch_slot = len(self._runner._pools[0].k_NKD) - 1
        if num_rows not in self._buckets:
            buffers = Buffers(Bucket(num_rows, self._group), DEVICE, scratch_slot)
            self._buckets[num_rows] = Uncaptured(buffers, self._runner._fused)
        return self._buckets[num_rows]

    def run(self, batch: FlatBatch, ids: Any = None) -> torch.Tensor | None:
        self.num_rows.append(len(batch.input_ids))
        return super().run(batch, ids)


def test_an_engine_whose_steps_are_replayed_equals_the_plain_one() -> None:
    """A prompt that takes several steps, of which the first have nobody's state to give; rows, and a choice's tree."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, VOCAB, size=150).astype(np.int32)
    operations: list[Operation] = [
        Choose(alternatives=((1,), (2, 3), (2, 4))),
        *[Generate(max_tokens=3, temperature=0.0)] * 2,
    ]
    requests = [
        Request(request_id=i, program_id=i, prompt_ids=np.append(prompt, np.int32(i + 1)), operation=operation, seed=i)
        for i, operation in enumerate(operations)
    ]
    answers: list[dict[int, Result]] = []
    for kernels in ("torch", "triton"):
        engine = tiny_engine(kernels)
        runner: Any = engine._runner
        if kernels == "triton":
            runner._graphs = UncapturedGraphs(runner)
        engine.submit(requests)
        results: list[Result] = []
        while engine.has_unfinished:
            results += engine.step()
        answers.append({result.request_id: result for result in results})
    assert runner._graphs.num_rows[0] == 40 and len(runner._graphs.num_rows) > 2
    for i, plain in answers[0].items():
        replayed = answers[1][i]
        assert plain.output_ids == replayed.output_ids and plain.choice == replayed.choice
        assert (plain.choice_logprobs is None) == (i > 0)
        if plain.choice_logprobs is not None:
            assert replayed.choice_logprobs == pytest.approx(plain.choice_logprobs, abs=1e-3)


def test_warming_up_runs_every_height_of_tiles_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that fit no graph have kernels of their own; and no graph is captured before products are timed."""
    runner: Any = tiny_engine("triton")._runner
    launched: list[tuple[str, bool]] = []
    attend = TritonAttention._attend_tiles

    def noted(self: TritonAttention, height: str, *args: Any, **options: Any) -> None:
        if len(self._ints[f"{height}_tiles"]):
            launched.append((height, options.get("num_in_turn", 0) > 0))
        attend(self, height, *args, **options)

    monkeypatch.setattr(TritonAttention, "_attend_tiles", noted)
    monkeypatch.setattr("sglbatch.engine.model_runner.reserve_pinned", lambda: None)
    graphs = runner._graphs = UncapturedGraphs(runner)
    monkeypatch.setattr(graphs, "capture_all", lambda: None)
    runner.warm_up(128)
    assert {height for height, in_turn in launched if not in_turn} == set(HEIGHTS)
    assert not graphs.num_rows
