"""Steps that do not fit the device's memory: run in smaller passes, nothing lost, nothing changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.loader import load_engine
from sglbatch.engine.passes import Pending as InFlight
from sglbatch.engine.sampler import Sampling
from sglbatch.engine.scheduler import SchedulerConfig
from sglbatch.engine.sequence import Step
from sglbatch.errors import ModelError
from sglbatch.models import resolve_model
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Choose, Constraint, Generate, Operation, Request, Text
from tests.engine_stub import StubPending, StubRunner, StubTokenizer
from tests.test_engine_model import run as answers
from tests.test_scheduler import SCORED_WORK, WORK, check_results, largest, request, run

MILD = Constraint(kind="regex", source=" (northerly|north-east|mild)")


class TightRunner(StubRunner):
    """Runs out of memory in steps that are too large: before anything is computed, or when only logits are missing."""

    def __init__(self, num_slots: int, limit: int) -> None:
        super().__init__(num_slots)
        self.limit = limit
        self.largest = 0
        self.num_failed = 0

    def launch(self, step: Step, samplings: Sequence[Sampling | None], before: InFlight | None) -> StubPending:
        assert len(samplings) == len(step.actions)
        size = max(step.num_tokens, len(step.actions))
        if size > self.limit:
            self.num_failed += 1
            if self.num_failed % 2:
                self.run(step, before)
            raise torch.OutOfMemoryError
        self.largest = max(self.largest, size)
        return super().launch(step, samplings, before)


def make_engine(limit: int, num_slots: int, **config: Any) -> tuple[LocalEngine, TightRunner]:
    runner = TightRunner(num_slots, limit)
    overlap = config.pop("overlap", False)
    engine = LocalEngine(
        runner,
        StubTokenizer(),  # type: ignore[arg-type]
        identity="stub",
        context_len=10_000,
        scheduler_config=SchedulerConfig(num_slots=num_slots, max_batch_tokens=64, max_rows=8, **config),
        overlap=overlap,
    )
    return engine, runner


@pytest.fixture(scope="module")
def small_numbers_count() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglbatch.engine.engine.MIN_OVERLAP_TOKENS", 1)
        patch.setattr("sglbatch.engine.expected_use.MIN_FINISHED", 0)
        patch.setattr("sglbatch.engine.passes.MIN_PASS_TOKENS", 2)
        yield


@settings(max_examples=60, deadline=None)
@given(
    work=st.one_of(WORK, SCORED_WORK),
    limit=st.sampled_from([2, 3, 7, 20]),
    extra=st.sampled_from([0, 5, 1000]),
    overlap=st.booleans(),
    keep=st.booleans(),
)
@pytest.mark.usefixtures("small_numbers_count")
def test_nothing_is_lost(
    work: list[tuple[list[int], Operation]], limit: int, extra: int, overlap: bool, keep: bool
) -> None:
    engine, runner = make_engine(limit, largest(work) + extra, overlap=overlap)
    requests = [request(i, prompt, operation, keep=keep) for i, (prompt, operation) in enumerate(work)]
    check_results(requests, run(engine, requests))
    assert engine.stats().out_of_memory == runner.num_failed
    assert runner.largest <= limit
    assert engine.scheduler.pool.num_free == engine.scheduler.config.num_slots


def test_the_budget_shrinks_with_the_memory() -> None:
    engine, runner = make_engine(40, 1000)
    prompts = [[1 + i % 40] * 30 for i in range(20)]
    requests = [request(i, prompt, Generate(max_tokens=3, temperature=0.0)) for i, prompt in enumerate(prompts)]
    check_results(requests, run(engine, requests))
    assert engine.stats().out_of_memory == runner.num_failed == 1, "later steps fit"
    assert engine.scheduler.max_batch_tokens == 32


def test_no_memory_at_all_is_an_error() -> None:
    engine, _ = make_engine(1, 1000)
    engine.submit([request(0, [1] * 100, Generate(max_tokens=3, temperature=0.0))])
    with pytest.raises(ModelError, match="does not fit") as caught:
        engine.step()
    assert caught.value.code == "out-of-memory" and "--kv-tokens" in str(caught.value.hint)


def real_requests(tokenizer: Tokenizer) -> list[Request]:
    """Prompts that share a beginning, asked in every way."""
    head = "Notes on the weather at sea, kept by the keeper of a lighthouse. " * 2
    texts = [f"{head}On day {i} the wind was" for i in range(4)]
    prompts = tokenizer.encode_prompts([(Text(text),) for text in texts])
    choices = tuple(tuple(tokenizer.encode(text)) for text in (" calm and warm", " calm and cold", " a storm"))
    operations = [
        Generate(max_tokens=6, temperature=0.0),
        Generate(max_tokens=6, temperature=0.0, input_logprobs_from=1),
        Generate(max_tokens=12, temperature=0.0, constraint=MILD, exact_choices=True),
        Choose(alternatives=choices),
    ]
    asked = [(prompt, operation) for prompt in prompts for operation in operations]
    return [
        Request(request_id=i, program_id=i, prompt_ids=prompt, operation=operation, seed=i)
        for i, (prompt, operation) in enumerate(asked)
    ]


def test_a_model_that_runs_out_of_memory_halfway(smollm2_dir: Path, smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_dir.is_dir()
    engine = load_engine(resolve_model("smollm2-135m"), smollm2_tokenizer, device="cpu", kv_tokens=1000)
    requests = real_requests(smollm2_tokenizer)
    expected = answers(engine, requests)
    assert all(result.error is None for result in expected.values())
    assert engine.stats().out_of_memory == 0

    def refuse(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[1] > 24:
            raise torch.OutOfMemoryError

    runner: Any = engine._runner
    runner.body.body.layers[15].register_forward_pre_hook(refuse)
    found = answers(engine, requests)
    assert engine.stats().out_of_memory > 1
    for i, result in expected.items():
        assert found[i].output_ids == result.output_ids and found[i].choice == result.choice
        for name in ("choice_logprobs", "input_logprobs"):
            scores, others = getattr(found[i], name) or (), getattr(result, name) or ()
            assert [pytest.approx(value, abs=1e-4) for value in scores] == list(others)
