"""The Triton kernels against plain torch attention: under Triton's interpreter here, compiled where there is a GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton", reason="triton has no build for this platform")

from sglbatch.engine.attention.torch import AttentionKind, TorchAttention
from sglbatch.engine.attention.triton import Beside, TritonAttention, batch_arrays, list_works, loads_runs
from sglbatch.engine.attention.worklist import TILE_FIELDS
from sglbatch.engine.batch import CausalWork, FlatBatch, SharedWork, SingleWork, TreeWork, plant
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.model_runner import ATTENTION_NAME, ModelRunner
from sglbatch.engine.scheduler import SchedulerConfig
from sglbatch.engine.transfer import upload
from sglbatch.types import Choose, Generate, Operation, Request, Result
from tests.engine_stub import VOCAB, StubTokenizer
from tests.test_attention_torch import NUM_SLOTS, mixed_batch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = {
    "plain": AttentionKind(scaling=0.2),
    "softcap": AttentionKind(scaling=0.2, softcap=5.0),
    "window": AttentionKind(scaling=0.2, window=17),
}


def long_batch(*, in_order: bool = False) -> FlatBatch:
    """Works with whole blocks of slots: a shared node, causal paths, trees, single rows.

    The second tree stands behind the shared node and has no trunk. Slots lie in no order and have positions, or side by
    side, so that they are loaded in chunks.
    """
    slots = np.arange(NUM_SLOTS) if in_order else np.random.default_rng(0).permutation(NUM_SLOTS)
    shared = [SharedWork(q_start=q, q_end=end, slots=slots[:200], position=0) for q, end in ((0, 37), (170, 175))]
    paths = [
        (7, 37, slots[200:330], 200),
        (37, 110, slots[330:490], 0),
        *((q, q + 20, np.concatenate([slots[:150], slots[490 + q - 110 : 510 + q - 110]]), 0) for q in (110, 130)),
        (150, 170, np.concatenate([slots[:150], slots[510:515], slots[530:550]]), 0),
    ]
    causal = [
        CausalWork(q_start=begin, q_end=end, slots=path, positions=first + np.arange(len(path)))
        for begin, end, path, first in paths
    ]
    trees, causal = plant(causal)
    assert [(tree.q_start, tree.q_end) for tree in trees] == [(110, 170)] and len(causal) == 2
    depths = np.array([0, 1, 2, 1, 0])
    trees.append(
        TreeWork(
            q_start=170,
            q_end=175,
            slots=slots[550:555],
            positions=200 + depths,
            seen_from=np.arange(5),
            seen_until=np.array([4, 3, 3, 4, 5]),
        )
    )
    singles = SingleWork(rows=np.arange(7), slots=slots[560:581], positions=200 + np.arange(21) % 3, lens=np.full(7, 3))
    own = [first + len(path) - (end - begin) + np.arange(end - begin) for begin, end, path, first in paths]
    positions = np.concatenate([np.full(7, 202), *own, 200 + depths])
    ids = np.zeros_like(positions)
    return FlatBatch(
        input_ids=ids,
        positions=positions,
        write_slots=ids,
        shared=shared,
        causal=causal,
        singles=singles,
        trees=trees,
        has_positions=not in_order,
    )


def branches_alone(num_rows: int) -> FlatBatch:
    """Alternatives right behind a prompt that they attend to together: a tree that has no trunk, and nothing else."""
    tree = TreeWork(
        q_start=0,
        q_end=num_rows,
        slots=40 + np.arange(num_rows),
        positions=40 + np.arange(num_rows) % 2,
        seen_from=np.arange(num_rows),
        seen_until=np.arange(num_rows) + 2 - np.arange(num_rows) % 2,
    )
    ids = np.zeros(num_rows, dtype=np.int64)
    return FlatBatch(
        input_ids=ids,
        positions=tree.positions,
        write_slots=tree.slots,
        shared=[SharedWork(q_start=0, q_end=num_rows, slots=np.arange(40), position=0)],
        causal=[],
        singles=SingleWork(rows=ids[:0], slots=ids[:0], positions=ids[:0], lens=ids[:0]),
        trees=[tree],
    )


def relative_error(
    heads: tuple[int, int],
    sizes: tuple[int, int],
    kind: AttentionKind,
    dtype: torch.dtype,
    *,
    has_sinks: bool,
    batch: FlatBatch | None = None,
    beside: Beside | None = None,
) -> float:
    batch = mixed_batch(seed=3) if batch is None else batch
    torch.manual_seed(0)
    q = torch.randn(len(batch.input_ids), heads[0], sizes[0], device=DEVICE).to(dtype)
    k, v = (torch.randn(NUM_SLOTS + 1, heads[1], size, device=DEVICE).to(dtype) for size in sizes)
    sinks = torch.randn(heads[0], device=DEVICE) if has_sinks else None
    group = heads[0] // heads[1]
    works = list_works(batch, group=group, merge_all=has_sinks)
    ints = upload(batch_arrays(batch, works, ()), DEVICE)
    attention = TritonAttention(ints, num_parts=works.num_parts, group=group, beside=beside)
    got = attention(q, k, v, kind, sinks).double().cpu()
    oracle = TorchAttention(batch, torch.device("cpu"))
    expected = oracle(
        q.cpu().float(), k.cpu().float(), v.cpu().float(), kind, None if sinks is None else sinks.cpu()
    ).double()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def test_equals_torch(heads: tuple[int, int], kind: str) -> None:
    assert relative_error(heads, (16, 24), KINDS[kind], torch.float32, has_sinks=kind == "plain") < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_whole_blocks_equal_torch(kind: str) -> None:
    error = relative_error((8, 2), (16, 24), KINDS[kind], torch.float32, has_sinks=False, batch=long_batch())
    assert error < 1e-5


@pytest.mark.parametrize("kind", ["plain", "softcap"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
def test_runs_equal_torch(heads: tuple[int, int], kind: str) -> None:
    batch = long_batch(in_order=True)
    group = heads[0] // heads[1]
    works = list_works(batch, group=group)
    own = np.concatenate([works.wide_tiles, works.middle_tiles])[:, TILE_FIELDS.index("num_own_chunks")]
    assert works.runs is not None and len(works.runs) > 3 and own.any() == (group > 1)
    assert relative_error(heads, (16, 24), KINDS[kind], torch.float32, has_sinks=False, batch=batch) < 1e-5


def test_runs_are_for_slots_that_can_be_copied() -> None:
    even, odd = torch.zeros(5, 1, 24, dtype=torch.bfloat16), torch.zeros(5, 1, 20, dtype=torch.bfloat16)
    assert loads_runs([even]) and not loads_runs([even, odd])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [4, 20, 60])
def test_a_tree_without_a_trunk_equals_torch(num_rows: int, kind: str) -> None:
    batch = branches_alone(num_rows)
    error = relative_error((8, 2), (16, 24), KINDS[kind], torch.float32, has_sinks=False, batch=batch)
    assert error < 1e-5


@pytest.mark.parametrize("num_programs", [1, 3, 1000])
def test_tiles_taken_in_turn_equal_torch(num_programs: int) -> None:
    beside = Beside(None, num_programs)
    for batch in (mixed_batch(seed=3), long_batch()):
        error = relative_error(
            (8, 2), (16, 24), KINDS["plain"], torch.float32, has_sinks=False, batch=batch, beside=beside
        )
        assert error < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "size"), [((4, 4), 64), ((6, 2), 128), ((32, 8), 128), ((8, 8), 80), ((4, 1), 256)])
def test_compiled_equals_torch(heads: tuple[int, int], size: int, kind: str, dtype: torch.dtype) -> None:
    limit = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert relative_error(heads, (size, size), KINDS[kind], dtype, has_sinks=kind == "plain") < limit
    batches = [long_batch(), *([long_batch(in_order=True)] if kind != "window" else [])]
    for beside, batch in product((None, Beside(torch.cuda.Stream(), 132)), batches):  # type: ignore[no-untyped-call]
        error = relative_error(heads, (size, size), KINDS[kind], dtype, has_sinks=False, batch=batch, beside=beside)
        assert error < limit


def tiny_engine(kernels: Any) -> LocalEngine:
    """A random two-layer Llama; with triton kernels its layers are fused, which checks them against the plain ones."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation=ATTENTION_NAME,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    runner = ModelRunner(model.to(DEVICE), vocab_size=VOCAB, kernels=kernels)
    assert runner.probe() == [0, 1]
    runner.allocate(400)
    if kernels == "triton":
        runner.fuse()
    return LocalEngine(
        runner,
        StubTokenizer(),  # type: ignore[arg-type]
        identity="tiny",
        context_len=400,
        scheduler_config=SchedulerConfig(num_slots=400, max_batch_tokens=40, max_rows=8),
        overlap=kernels == "triton",
    )


def test_the_fused_engine_equals_the_plain_one() -> None:
    """Prefill that shares, decode, choices and cut rows through fused layers and Triton attention, two cohorts."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1, VOCAB, size=40)
    requests = []
    for i in range(9):
        prompt = np.concatenate([shared, rng.integers(1, VOCAB, size=3 + i % 4)]).astype(np.int32)
        operation: Operation = Generate(max_tokens=4, temperature=0.0)
        if i % 3 == 0:
            operation = Choose(alternatives=((1,), (2, 3), (2, 4)))
        requests.append(Request(request_id=i, program_id=i, prompt_ids=prompt, operation=operation, seed=i))
    results: list[dict[int, Result]] = []
    for kernels in ("torch", "triton"):
        engine = tiny_engine(kernels)
        engine.submit(requests)
        answers: dict[int, Result] = {}
        while engine.has_unfinished:
            answers |= {r.request_id: r for r in engine.step()}
            engine.scheduler.check_integrity()
        results.append(answers)
    for i in range(9):
        plain, fused = results[0][i], results[1][i]
        assert plain.output_ids == fused.output_ids and plain.choice == fused.choice
        if plain.choice_logprobs is not None:
            assert fused.choice_logprobs == pytest.approx(plain.choice_logprobs, abs=1e-3)
