"""Rows that decode behind a step in flight, with a token that the processor does not know yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sglbatch.engine.decision import Output, decide
from sglbatch.engine.decision import Pending as OnDevice
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.loader import load_engine
from sglbatch.engine.passes import Pending
from sglbatch.engine.sampler import GREEDY, Drawn, Sampling
from sglbatch.engine.scheduler import SchedulerConfig
from sglbatch.engine.sequence import Step
from sglbatch.models import resolve_model
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, Request, Result, Text
from tests.engine_stub import EOS, StubPending, StubRunner, StubTokenizer, generate, ids
from tests.test_engine_model import run


class Watched(StubPending):
    """Outputs that know whether the processor has asked for them."""

    def __init__(self, outputs: list[Output]) -> None:
        super().__init__(outputs)
        self.is_known = False

    def result(self) -> list[Output]:
        self.is_known = True
        return super().result()


class WatchingRunner(StubRunner):
    """Notes of each step how many rows it has, and how many of them take a token that is not known yet."""

    def __init__(self, num_slots: int, most_rows: int) -> None:
        super().__init__(num_slots)
        self.most_rows = most_rows
        self.steps: list[tuple[int, int]] = []

    def best_rows(self, num_ready: int) -> int:
        return num_ready

    def launch(self, step: Step, samplings: Sequence[Sampling | None], before: Pending | None) -> StubPending:
        ahead = [piece for piece in step.pieces if piece.source is not None]
        assert not ahead or (isinstance(before, Watched) and not before.is_known)
        self.steps.append((len(step.pieces), len(ahead)))
        return Watched(self.run(step, before))


def make_engine(
    most_rows: int, max_batch_tokens: int = 64, *, overlap: bool = True
) -> tuple[LocalEngine, WatchingRunner]:
    runner = WatchingRunner(2000, most_rows)
    engine = LocalEngine(
        runner,
        StubTokenizer(),  # type: ignore[arg-type]
        identity="stub",
        context_len=1000,
        scheduler_config=SchedulerConfig(num_slots=2000, max_batch_tokens=max_batch_tokens, max_rows=32),
        overlap=overlap,
    )
    return engine, runner


def request(number: int, prompt: list[int], **more: float | bool) -> Request:
    operation = Generate(temperature=0.0, **more)  # type: ignore[arg-type]
    return Request(request_id=number, program_id=number, prompt_ids=ids(prompt), operation=operation, seed=0)


def test_a_row_goes_on_before_its_token_is_known_and_no_further_than_max_tokens() -> None:
    engine, runner = make_engine(most_rows=4)
    results = run(engine, [request(0, [1, 2, 3], max_tokens=10, ignore_eos=True)])
    assert len(results[0].output_ids) == 10
    assert runner.steps == [(1, 0)] + [(1, 1)] * 9, "every step but the first is launched behind the one before"


def test_few_rows_stay_together_and_many_are_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglbatch.engine.engine.MIN_OVERLAP_TOKENS", 2)
    prompts = [[1, i + 2] for i in range(8)]
    requests = [request(i, prompt, max_tokens=20, ignore_eos=True) for i, prompt in enumerate(prompts)]
    engine, runner = make_engine(most_rows=8)
    run(engine, requests)
    assert runner.steps[1:] == [(8, 8)] * 19
    engine, runner = make_engine(most_rows=7)
    run(engine, requests)
    assert {rows for rows, _ in runner.steps[1:-1]} == {4} and not any(ahead for _, ahead in runner.steps)


def test_rows_that_run_ahead_keep_to_the_budget() -> None:
    requests = [request(i, [1, i + 2], max_tokens=20, ignore_eos=True) for i in range(8)]
    engine, runner = make_engine(most_rows=8, max_batch_tokens=5)
    results = run(engine, requests)
    assert all(len(result.output_ids) == 20 for result in results.values())
    assert any(ahead for _, ahead in runner.steps) and runner.max_tokens_in_step == 5


@pytest.mark.parametrize("num_waiting", [1, 8])
def test_rows_that_wait_for_their_tokens_are_cohorts_however_few(
    monkeypatch: pytest.MonkeyPatch, num_waiting: int
) -> None:
    monkeypatch.setattr("sglbatch.engine.engine.MIN_OVERLAP_TOKENS", 2)
    engine, runner = make_engine(most_rows=8)
    penalties = [0.5] * num_waiting + [0.0] * (8 - num_waiting)
    requests = [
        request(i, [1, i + 2], max_tokens=20, ignore_eos=True, frequency_penalty=penalty)
        for i, penalty in enumerate(penalties)
    ]
    run(engine, requests)
    assert {rows for rows, _ in runner.steps[1:-1]} == {4} and not any(ahead for _, ahead in runner.steps)


def test_results_that_are_held_back_are_there_for_a_run_that_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglbatch.engine.engine.MIN_RESULTS", 2)
    engine, _ = make_engine(most_rows=8)
    lens = [3] * 7 + [20]
    engine.submit([request(i, [1, i + 2], max_tokens=n, ignore_eos=True) for i, n in enumerate(lens)])
    first: list[Result] = []
    while not first:
        first = engine.step()
    rest = engine.drain(0.0)
    assert len(first) == 2 and {r.request_id for r in (*first, *rest)} == set(range(7))
    assert run(engine, []).keys() == {7} and not engine.drain(0.0)


def test_the_longer_the_step_in_flight_the_more_results_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglbatch.engine.engine.MIN_RESULTS", 1)
    monkeypatch.setattr("sglbatch.engine.engine.TOKENS_FOR_RESULT", 2)
    engine, _ = make_engine(most_rows=16)
    lens = [3] * 10 + [20] * 6
    engine.submit([request(i, [1, i + 2], max_tokens=n, ignore_eos=True) for i, n in enumerate(lens)])
    handed_on: list[int] = []
    while sum(handed_on) < 10:
        handed_on.append(len(engine.step()))
    assert [num for num in handed_on if num] == [3, 3, 3, 1], "six rows go on, a result for every two of them"


def test_rows_take_new_slots_in_different_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglbatch.engine.sequence.TAIL_RUN", 8)
    engine, _ = make_engine(most_rows=32, max_batch_tokens=200)
    engine.submit([request(i, [1, i + 2], max_tokens=30, ignore_eos=True) for i in range(32)])
    grown: list[int] = []
    while engine.has_unfinished:
        before = [len(sequence.tail_slots) for sequence in engine.scheduler.running]
        engine.step()
        after = [len(sequence.tail_slots) for sequence in engine.scheduler.running]
        if len(before) == len(after) == 32:
            grown.append(sum(a < b for a, b in zip(before, after, strict=True)))
    assert max(grown[1:]) == 4 and len(grown) > 20, "an eighth of the rows"


def test_all_results_are_handed_on_where_nothing_is_computed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglbatch.engine.engine.MIN_RESULTS", 1)
    engine, _ = make_engine(most_rows=16, overlap=False)
    lens = [1] * 20 + [9]
    engine.submit([request(i, [1, i + 2], max_tokens=n, ignore_eos=True) for i, n in enumerate(lens)])
    assert len(engine.step()) == 20


def test_results_are_all_handed_on_while_the_last_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglbatch.engine.engine.MIN_RESULTS", 2)
    monkeypatch.setattr("sglbatch.engine.engine.MIN_OVERLAP_TOKENS", 2)
    engine, _ = make_engine(most_rows=7)
    engine.submit([request(i, [1, i + 2], max_tokens=3, ignore_eos=True) for i in range(8)])
    handed_on = []
    while engine.has_unfinished:
        handed_on.append(len(engine.step()))
    assert handed_on[-2:] == [4, 4], "those of one cohort while the other's last step runs"


def test_an_end_that_nobody_knew_of_costs_one_token() -> None:
    prompts = [[a, b] for a in range(1, 20) for b in range(1, 4)]
    short = [prompt for prompt in prompts if len(generate(prompt, 30)) < 29]
    assert len(short) > 5, "some answers end by themselves"
    for prompt in short[:6]:
        engine, runner = make_engine(most_rows=4)
        result = run(engine, [request(0, prompt, max_tokens=30)])[0]
        assert list(result.output_ids) == generate(prompt, 30) and result.finish_reason == "stop"
        assert EOS not in result.output_ids
        assert result.usage.generated_tokens == len(result.output_ids) + 1
        assert runner.num_tokens == len(prompt) + result.usage.generated_tokens, "one more than it has use for"
        assert engine.scheduler.pool.num_free == 2000


def test_the_real_model_answers_the_same(smollm2_dir: Path) -> None:
    assert smollm2_dir.is_dir()
    model = resolve_model("smollm2-135m")
    tokenizer = Tokenizer.load(model.path)
    engine = load_engine(model, tokenizer, device="cpu", kv_tokens=4000)
    texts = ["The capital of France is", "Once upon a time there was", "Water boils at a temperature of"]
    prompts = tokenizer.encode_prompts([(Text(text),) for text in texts])
    ways = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "min_tokens": 4}]
    requests = [
        Request(
            request_id=i,
            program_id=i,
            prompt_ids=prompt,
            operation=Generate(max_tokens=12, ignore_eos=True, **way),  # type: ignore[arg-type]
            seed=7 + i,
        )
        for i, (prompt, way) in enumerate(zip(prompts, ways, strict=True))
    ]
    alone = run(engine, requests)
    engine._overlap = True
    seen: list[int] = []
    launch = engine._runner.launch
    engine._runner.launch = lambda step, *rest: (  # type: ignore[method-assign]
        seen.append(sum(piece.source is not None for piece in step.pieces)),
        launch(step, *rest),
    )[1]
    ahead = run(engine, requests)
    assert seen == [0] + [3] * 11
    assert {i: r.output_ids for i, r in ahead.items()} == {i: r.output_ids for i, r in alone.items()}


def test_what_depends_on_the_tokens_before_waits_for_them(smollm2_dir: Path) -> None:
    assert smollm2_dir.is_dir()
    model = resolve_model("smollm2-135m")
    tokenizer = Tokenizer.load(model.path)
    engine = load_engine(model, tokenizer, device="cpu", kv_tokens=4000)
    engine._overlap = True
    operations = [
        Generate(max_tokens=6, temperature=0.0, constraint=Constraint(kind="regex", source="[0-9]{5}")),
        Generate(max_tokens=6, temperature=0.0, frequency_penalty=1.0),
        Generate(max_tokens=6, temperature=0.0, num_top_logprobs=2),
    ]
    (prompt,) = tokenizer.encode_prompts([(Text("A number:"),)])
    launch = engine._runner.launch

    def checked(step: Step, *rest: object) -> Pending:
        assert not any(piece.source is not None for piece in step.pieces)
        return launch(step, *rest)  # type: ignore[arg-type]

    engine._runner.launch = checked  # type: ignore[method-assign]
    for i, operation in enumerate(operations):
        one = Request(request_id=i, program_id=i, prompt_ids=prompt, operation=operation, seed=0)
        assert run(engine, [one])[i].error is None


def test_rows_beside_one_that_asks_for_log_probabilities_can_be_followed() -> None:
    ways = [GREEDY, Sampling(temperature=0.0, num_top_logprobs=2), None, Sampling(temperature=1.0, seed=3)]
    pending = OnDevice(6)
    logits_RV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    expected = logits_RV.argmax(dim=-1).tolist()
    for begin, some in ((0, ways), (4, [ways[1], GREEDY])):
        decide(pending, begin, logits_RV[begin : begin + len(some)], [(7,)] * len(some), some)
    outputs = pending.result()
    assert pending.tokens_at([5, 3, 0]).tolist() == [outputs[5], outputs[3], outputs[0]]
    assert [outputs[0], outputs[5]] == [expected[0], expected[5]]
    assert isinstance(outputs[1], Drawn) and isinstance(outputs[4], Drawn) and isinstance(outputs[2], list)
    assert [outputs[1].token_id, outputs[4].token_id] == [expected[1], expected[4]]
