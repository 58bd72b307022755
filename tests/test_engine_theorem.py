"""Theorem 3.1 on the real model: every edge of the plan's tree enters the model once, under any memory.

Tokens are counted where they enter the model's body, by a hook, and not by the engine's own counters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import sglbatch as sgl
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.loader import load_engine
from sglbatch.lang import Driver, Program
from sglbatch.lang.function import SglFunction
from sglbatch.lang.sampling import Sampling
from sglbatch.models import LocalModel, resolve_model
from sglbatch.planner import JobFacts, make_plan, plan_calls
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Choose, Generate, Operation, Request, Result, Text, TokenIds
from tests.engine_workloads import mixed_prompts, mmlu_prompts

ONE_TOKEN = Generate(max_tokens=1, temperature=0.0)
Call = tuple[TokenIds, Operation]


@pytest.fixture(scope="module")
def model(smollm2_dir: Path) -> LocalModel:
    assert smollm2_dir.is_dir()
    return resolve_model("smollm2-135m")


class Counted:
    """An engine and how many tokens have entered its model."""

    def __init__(self, model: LocalModel, tokenizer: Tokenizer, **options: Any) -> None:
        self.engine: LocalEngine = load_engine(model, tokenizer, **({"reserve": "full"} | options))
        self.num_entered = 0
        runner: Any = self.engine._runner
        runner.body.body.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not args
        self.num_entered += kwargs["input_ids"].numel()

    def run(self, calls: Sequence[Call], order: Sequence[int] | None = None) -> list[Result]:
        """Each call's result; ``order`` puts them at hand-set priorities instead of depth-first."""
        places = {} if order is None else {index: place for place, index in enumerate(order)}
        self.engine.submit(
            [
                Request(
                    request_id=i,
                    program_id=i,
                    prompt_ids=prompt,
                    operation=operation,
                    seed=i,
                    priority=(places[i],) if places else None,
                )
                for i, (prompt, operation) in enumerate(calls)
            ]
        )
        results: dict[int, Result] = {}
        while self.engine.has_unfinished:
            results |= {r.request_id: r for r in self.engine.step()}
        self.engine.scheduler.check_integrity()
        assert all(results[i].error is None for i in range(len(calls)))
        return [results[i] for i in range(len(calls))]


def tokenised(tokenizer: Tokenizer, texts: Sequence[str], *, seed: int = 0) -> list[TokenIds]:
    """Shuffled, so that the order is the plan's doing."""
    texts = random.Random(seed).sample(list(texts), len(texts))
    return tokenizer.encode_prompts([(Text(text),) for text in texts])


def tree_texts(*, rubrics: int, essays: int, questions: int) -> list[str]:
    """A three-level tree: an instruction, rubrics below it, essays below each, questions below each."""
    sentences = [f"Sentence {i} weighs what the writer says against point {i * 7 % 11}." for i in range(60)]
    head = "You grade written answers against a rubric. " + " ".join(sentences[:4])
    texts = []
    for r in range(rubrics):
        rubric = f"Rubric {r}: " + " ".join(sentences[5 + r : 8 + r])
        for e in range(essays):
            essay = f"Essay {r}.{e}: " + " ".join(sentences[20 + 3 * e + r : 24 + 3 * e + r])
            texts += [f"{head}\n{rubric}\n{essay}\nQuestion: is point {q} met?\nAnswer:" for q in range(questions)]
    return texts


def tree_calls(tokenizer: Tokenizer) -> list[Call]:
    return [(ids, ONE_TOKEN) for ids in tokenised(tokenizer, tree_texts(rubrics=2, essays=2, questions=3))]


def mmlu_calls(tokenizer: Tokenizer) -> list[Call]:
    return [(ids, ONE_TOKEN) for ids in tokenised(tokenizer, mmlu_prompts(num_rows=9, num_subjects=3, shots=1))]


def duplicate_calls(tokenizer: Tokenizer) -> list[Call]:
    """The same prompts many times, asked in every way: greedy, by chance, and as a choice; one is another's prefix."""
    texts = tree_texts(rubrics=1, essays=1, questions=2)
    texts = [*texts, texts[0] + " Yes", texts[0] + " Yes, because"]
    letters = Choose(alternatives=tuple(tuple(tokenizer.encode(t)) for t in (" Yes", " Yes, mostly", " No", " Not")))
    longer = Choose(alternatives=tuple(tuple(tokenizer.encode(t)) for t in (" Yes, mostly so", " Yes, always", " Not")))
    chance = Generate(max_tokens=1, temperature=1.0)
    return [(ids, o) for ids in tokenised(tokenizer, texts * 4) for o in (ONE_TOKEN, chance, letters, longer)]


@pytest.mark.parametrize("make_calls", [mmlu_calls, tree_calls, duplicate_calls])
@pytest.mark.parametrize("pool", ["one request", "everything"])
def test_every_edge_enters_the_model_once(
    model: LocalModel, smollm2_tokenizer: Tokenizer, make_calls: Any, pool: str
) -> None:
    calls = make_calls(smollm2_tokenizer)
    check_every_edge_once(model, smollm2_tokenizer, calls, pool=pool, max_batch_tokens=300)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pool", ["one request", "everything"])
def test_500_mmlu_rows_enter_the_model_once(model: LocalModel, smollm2_tokenizer: Tokenizer, pool: str) -> None:
    prompts = tokenised(smollm2_tokenizer, mmlu_prompts(num_rows=500, num_subjects=10, shots=5))
    check_every_edge_once(model, smollm2_tokenizer, [(p, ONE_TOKEN) for p in prompts], pool=pool)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pool", ["one request", "everything"])
def test_a_large_tree_enters_the_model_once(model: LocalModel, smollm2_tokenizer: Tokenizer, pool: str) -> None:
    prompts = tokenised(smollm2_tokenizer, tree_texts(rubrics=6, essays=5, questions=16))
    check_every_edge_once(model, smollm2_tokenizer, [(p, ONE_TOKEN) for p in prompts], pool=pool)


def check_every_edge_once(
    model: LocalModel, tokenizer: Tokenizer, calls: Sequence[Call], *, pool: str, **options: Any
) -> None:
    plan = make_plan([prompt for prompt, _ in calls], [operation for _, operation in calls])
    assert plan.unique_tokens < plan.num_tokens, "there is something to share"
    kv_tokens = plan.kv_tokens_minimum if pool == "one request" else plan.kv_tokens_whole
    counted = Counted(model, tokenizer, kv_tokens=kv_tokens, **options)
    counted.run(calls)
    stats = counted.engine.stats()
    assert counted.num_entered == plan.unique_tokens
    assert stats.computed_prompt_tokens == plan.unique_tokens
    assert stats.prompt_tokens == plan.num_tokens
    assert stats.recomputed_tokens == 0


@pytest.mark.parametrize("make_calls", [mmlu_calls, tree_calls])
def test_other_orders_compute_more(model: LocalModel, smollm2_tokenizer: Tokenizer, make_calls: Any) -> None:
    """The ablation: the same rows with a pool for little more than one request, first-come and at random."""
    calls = make_calls(smollm2_tokenizer)
    plan = make_plan([prompt for prompt, _ in calls])
    kv_tokens = plan.kv_tokens_minimum + 8
    orders: dict[str, list[int]] = {
        "planned": plan.order.tolist(),
        "first-come": list(range(len(calls))),
        "random": random.Random(1).sample(range(len(calls)), len(calls)),
    }
    entered = {}
    for name, order in orders.items():
        counted = Counted(model, smollm2_tokenizer, kv_tokens=kv_tokens)
        counted.run(calls, order)
        assert counted.num_entered == counted.engine.stats().computed_prompt_tokens
        entered[name] = counted.num_entered
    assert entered["planned"] == plan.unique_tokens
    assert min(entered["first-come"], entered["random"]) > 1.2 * entered["planned"], entered


# --- programs ----------------------------------------------------------------------------------


@sgl.function
def three_views(s: Any, topic: str) -> None:
    """Three branches of one prefix, asked at once."""
    s += f"Notes about {topic} for a short talk that opens the evening."
    views = s.fork(3)
    views += lambda i: f" Point {i}:" + sgl.gen("point", max_tokens=1)
    s["points"] = [view["point"] for view in views]


@sgl.function
def views_and_end(s: Any, topic: str) -> None:
    """Two branches, then a follow-up below one of them and one below the stem."""
    s += f"Notes about {topic} for a short talk that opens the evening."
    left, right = s.fork(2)
    left += " First:" + sgl.gen("a", max_tokens=3)
    right += " Second:" + sgl.gen("b", max_tokens=1)
    left += " Moreover:" + sgl.gen("c", max_tokens=2)
    s += f" So{left['a']} and{right['b']}. In short:" + sgl.gen("end", max_tokens=1)


TOPICS = ("the sea", "the sea ice", "old maps", "the sea")  # one twice: equal calls are asked once


class Recorder:
    """The engine as the driver's backend; keeps every request and result."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.requests: dict[int, Request] = {}
        self.results: dict[int, Result] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests |= {r.request_id: r for r in requests}
        self._engine.submit(requests)

    def step(self) -> list[Result]:
        results = self._engine.step()
        self.results |= {r.request_id: r for r in results}
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def expected_tokens(self) -> int:
        """Distinct prefixes of all that was prompted and fed: an answer's last token enters only with a follow-up."""
        prefixes: set[tuple[int, ...]] = set()
        for number, request in self.requests.items():
            answer = self.results[number].output_ids[: self.results[number].usage.generated_tokens - 1]
            fed = (*request.prompt_ids.tolist(), *answer)
            prefixes.update(fed[: i + 1] for i in range(len(fed)))
        return len(prefixes)


def run_programs(counted: Counted, tokenizer: Tokenizer, function: SglFunction) -> tuple[Recorder, int]:
    """Returns what the backend saw, and the plan's unique tokens."""
    recorder = Recorder(counted.engine)
    driver = Driver(tokenizer=tokenizer, model_identity="m", context_len=counted.engine.context_len)
    for i, topic in enumerate(TOPICS):
        sampling = Sampling(temperature=0.0)
        driver.add(Program(function, {"topic": topic}, program_id=i, row_key=str(i), sampling=sampling))
    calls = driver.collect()
    facts = JobFacts(num_rows=len(TOPICS), context_len=counted.engine.context_len)
    plan, _, _ = plan_calls(calls, facts)
    driver.attach(recorder)  # the rest of the protocol goes through __getattr__
    driver.submit([calls[i] for i in plan.order.tolist()], range(len(calls)))
    finished = 0
    while driver.unfinished:
        for program in driver.step():
            assert program.outcome.error is None
            finished += 1
        counted.engine.scheduler.check_integrity()
    assert finished == len(TOPICS)
    assert counted.engine.scheduler.pool.num_free == counted.engine.scheduler.config.num_slots
    return recorder, plan.unique_tokens


@pytest.mark.parametrize("kv_tokens", [24, 2000])
def test_forks_enter_the_model_once(model: LocalModel, smollm2_tokenizer: Tokenizer, kv_tokens: int) -> None:
    counted = Counted(model, smollm2_tokenizer, kv_tokens=kv_tokens)
    recorder, unique_tokens = run_programs(counted, smollm2_tokenizer, three_views)
    assert max(len(r.prompt_ids) for r in recorder.requests.values()) > 16, "the small pool is for little over one"
    assert len(recorder.requests) == 9, "three branches of three distinct topics"
    assert counted.num_entered == unique_tokens


def test_follow_ups_add_only_what_is_new(model: LocalModel, smollm2_tokenizer: Tokenizer) -> None:
    counted = Counted(model, smollm2_tokenizer, kv_tokens=2000)
    recorder, unique_tokens = run_programs(counted, smollm2_tokenizer, views_and_end)
    assert counted.num_entered == recorder.expected_tokens() > unique_tokens


# --- texts -------------------------------------------------------------------------------------


def test_every_pool_gives_the_same_text(model: LocalModel, smollm2_tokenizer: Tokenizer) -> None:
    """fp32, from a pool for the longest request alone to one for everything, and both reservations."""
    generate = Generate(max_tokens=6, temperature=0.0)
    texts = [*mixed_prompts(num_each=2, shots=1), *tree_texts(rubrics=2, essays=1, questions=1)]
    calls: list[Call] = [(ids, generate) for ids in tokenised(smollm2_tokenizer, texts)]
    plan = make_plan([prompt for prompt, _ in calls], [operation for _, operation in calls])
    pools = [plan.kv_tokens(num_running) for num_running in (1, 3, len(calls))]
    assert pools == sorted(set(pools))
    found = {}
    for kv_tokens in pools:
        for reserve in ("full", "soft") if kv_tokens < pools[-1] else ("full",):
            counted = Counted(model, smollm2_tokenizer, kv_tokens=kv_tokens, reserve=reserve)
            found[kv_tokens, reserve] = [r.text for r in counted.run(calls)]
    expected = found[pools[-1], "full"]
    assert all(expected)
    for pool, outputs in found.items():
        assert outputs == expected, pool
