"""The scheduler under random work and tiny memories: right contexts, no slot lost, everybody ends, nothing twice."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.masses import TINY
from sglbatch.engine.scheduler import SchedulerConfig
from sglbatch.planner import make_plan
from sglbatch.types import (
    Choose,
    Generate,
    Operation,
    Request,
    Result,
    TokenLogprob,
    prefill_runs,
    unconditional_runs,
)
from tests.engine_stub import StubRunner, StubTokenizer, generate, ids, logprob

UNCONDITIONAL: Final = "unconditional_likelihood_normalized"


def make_engine(num_slots: int, **config: Any) -> tuple[LocalEngine, StubRunner]:
    runner = StubRunner(num_slots)
    overlap = config.pop("overlap", False)
    defaults: dict[str, Any] = {"max_batch_tokens": 16, "max_rows": 8} | config
    engine = LocalEngine(
        runner,
        StubTokenizer(),  # type: ignore[arg-type]
        identity="stub",
        context_len=10_000,
        scheduler_config=SchedulerConfig(num_slots=num_slots, **defaults),
        overlap=overlap,
    )
    return engine, runner


def request(number: int, prompt: list[int], operation: Operation, **more: Any) -> Request:
    return Request(
        request_id=number, program_id=number, prompt_ids=ids(prompt), operation=operation, seed=number, **more
    )


def run(engine: LocalEngine, requests: list[Request], before: Sequence[Request] = ()) -> dict[int, Result]:
    """Runs to the end; checks slots after every step and that the head gets a token in every step."""
    engine.submit(requests)
    results: dict[int, Result] = {}
    while engine.has_unfinished:
        for result in engine.step():
            assert result.request_id not in results, "answered twice"
            results[result.request_id] = result
            engine.finish_program(result.request_id)
        engine.scheduler.check_integrity()
    assert set(results) == {r.request_id for r in (*before, *requests)}
    return results


def unique_tokens(requests: list[Request]) -> int:
    """By counting prefixes; the plan must come to the same."""
    runs = [r for q in requests for r in prefill_runs(q.prompt_ids, q.operation)]
    alone = [r for q in requests for r in unconditional_runs(q.operation)]
    unique = sum(len({tuple(r[: i + 1].tolist()) for r in tree for i in range(len(r))}) for tree in (runs, alone))
    assert make_plan([q.prompt_ids for q in requests], [q.operation for q in requests]).unique_tokens == unique
    return unique


def check_results(requests: list[Request], results: dict[int, Result]) -> None:
    for q in requests:
        prompt, result = q.prompt_ids.tolist(), results[q.request_id]
        if isinstance(q.operation, Generate):
            assert list(result.output_ids) == generate(prompt, q.operation.max_tokens)
            if q.operation.input_logprobs_from is not None:
                assert result.input_logprobs == token_logprobs(prompt, q.operation.input_logprobs_from)
        elif q.operation.method == "exact":
            assert result.choice_logprobs == pytest.approx(choice_logprobs(prompt, q.operation.alternatives))
        else:
            alternatives = q.operation.alternatives
            scored = [token_logprobs([*prompt, *ids], len(prompt)) for ids in alternatives]
            assert list(result.choice_token_logprobs) == scored
            assert list(result.unconditional_logprobs) == [token_logprobs(list(ids), 0) for ids in alternatives]


def token_logprobs(ids: list[int], start: int) -> tuple[TokenLogprob, ...]:
    return tuple((logprob(tuple(ids[:i]), ids[i]) if i else None, ids[i]) for i in range(start, len(ids)))


def choice_logprobs(prompt: list[int], alternatives: tuple[tuple[int, ...], ...]) -> list[float]:
    """Each run's probability less those of the runs that extend it, as shares of all."""
    scores = {
        ids: sum(value or 0.0 for value, _ in token_logprobs([*prompt, *ids], len(prompt))) for ids in alternatives
    }
    masses = {ids: math.exp(score - max(scores.values())) for ids, score in scores.items()}
    for run in sorted(masses, key=len, reverse=True):
        extending = sum(masses[other] for other in masses if other != run and other[: len(run)] == run)
        masses[run] = max(masses[run] - extending, TINY)
    return [math.log(mass / sum(masses.values())) for mass in masses.values()]


@pytest.fixture(scope="module")
def small_numbers_count() -> Iterator[None]:
    """Two cohorts however few rows there are, and hopeful reservations from the first row on: rows must pause."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglbatch.engine.engine.MIN_OVERLAP_TOKENS", 1)
        patch.setattr("sglbatch.engine.expected_use.MIN_FINISHED", 0)
        yield


TOKEN = st.integers(1, 3)
PROMPT = st.lists(TOKEN, min_size=1, max_size=14)
SHARED = st.sampled_from([[], [1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2], [3] * 40])
GENERATE = st.builds(
    Generate,
    max_tokens=st.integers(1, 40),
    temperature=st.just(0.0),
)
CHOOSE = st.builds(
    Choose,
    alternatives=st.lists(
        st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4, unique=True
    ).map(tuple),
)
PROMPTS = st.builds(lambda a, b: a + b, SHARED, PROMPT)
WORK = st.lists(st.tuples(PROMPTS, st.one_of(GENERATE, CHOOSE)), min_size=1, max_size=14)
SHARED_ALTERNATIVES: list[tuple[list[int], Operation]] = [
    ([1, 2], Choose(alternatives=((3, 3, 3), (4, 4, 4)))),
    ([1, 2], Choose(alternatives=((3, 3, 5), (4, 4, 5, 5)))),
    ([1, 2, 3], Choose(alternatives=((1, 1), (3, 3)))),
    ([1, 2, 4, 4], Generate(max_tokens=1, temperature=0.0)),
]
SCORED_WORK = st.sampled_from([0, 3, 9]).flatmap(
    lambda start: st.lists(
        st.tuples(PROMPTS, st.just(Generate(max_tokens=3, temperature=0.0, input_logprobs_from=start))),
        min_size=1,
        max_size=14,
    )
)
"""All from the same token on: a prompt that was computed unscored is computed again for its scores."""


def largest(work: list[tuple[list[int], Operation]]) -> int:
    """Slots that the most demanding request needs alone."""
    return max(
        len(prompt) + o.max_tokens - 1
        if isinstance(o, Generate)
        else len(prompt) + sum(len(r) - len(prompt) for r in prefill_runs(ids(prompt), o))
        for prompt, o in work
    )


@settings(max_examples=80, deadline=None)
@given(
    work=st.builds(lambda a, b: a + b, WORK, st.one_of(st.just([]), SCORED_WORK)),
    extra=st.sampled_from([0, 1, 5, 30, 1000]),
    keep=st.booleans(),
    retain=st.booleans(),
    overlap=st.booleans(),
    limits=st.fixed_dictionaries(
        {"max_batch_tokens": st.sampled_from([9, 16, 64]), "max_rows": st.sampled_from([1, 3, 8])}
    ),
)
@pytest.mark.usefixtures("small_numbers_count")
def test_soft_reservation(  # noqa: PLR0917
    work: list[tuple[list[int], Operation]],
    extra: int,
    keep: bool,
    retain: bool,
    overlap: bool,
    limits: dict[str, int],
) -> None:
    engine, _ = make_engine(largest(work) + extra, retain=retain, overlap=overlap, **limits)
    requests = [request(i, prompt, operation, keep=keep) for i, (prompt, operation) in enumerate(work)]
    results = run(engine, requests)
    check_results(requests, results)
    if not retain:
        assert engine.scheduler.pool.num_free == engine.scheduler.config.num_slots, "something stayed behind"


@settings(max_examples=80, deadline=None)
@given(
    work=st.one_of(WORK, SCORED_WORK),
    extra=st.sampled_from([0, 1, 5, 30, 1000]),
    max_batch_tokens=st.sampled_from([9, 16, 64]),
    overlap=st.booleans(),
)
@example(work=[([1, 2], Choose(alternatives=((1,), (1, 2))))], extra=0, max_batch_tokens=16, overlap=False)
@example(work=SHARED_ALTERNATIVES, extra=0, max_batch_tokens=9, overlap=False)
@pytest.mark.usefixtures("small_numbers_count")
def test_full_reservation_computes_every_token_once(
    work: list[tuple[list[int], Operation]], extra: int, max_batch_tokens: int, overlap: bool
) -> None:
    """Theorem 3.1: with a pool just large enough for the largest request, depth-first order computes each edge once."""
    engine, runner = make_engine(
        largest(work) + extra, max_batch_tokens=max_batch_tokens, reserve="full", overlap=overlap
    )
    requests = [request(i, prompt, operation) for i, (prompt, operation) in enumerate(work)]
    results = run(engine, requests)
    check_results(requests, results)
    stats = engine.stats()
    num_decoded = runner.num_tokens - stats.computed_prompt_tokens
    needed = sum(r.usage.generated_tokens - 1 for r in results.values() if r.usage.generated_tokens)
    ends = sum(r.finish_reason == "stop" for r in results.values())
    # a row that runs ahead may enter one step with the token that turns out to be its end
    assert needed <= num_decoded <= needed + (ends if overlap else 0)
    assert stats.recomputed_tokens == 0
    assert stats.computed_prompt_tokens == unique_tokens(requests)


@settings(max_examples=30, deadline=None)
@given(
    work=st.lists(
        st.tuples(PROMPT, st.one_of(CHOOSE, CHOOSE.map(lambda o: replace(o, method=UNCONDITIONAL)))),
        min_size=1,
        max_size=8,
    ),
    extra=st.sampled_from([0, 5, 1000]),
)
def test_alternatives_without_their_prompts_are_computed_once_for_all(
    work: list[tuple[list[int], Operation]], extra: int
) -> None:
    """No prompt begins as an alternative does, so that their two trees have nothing in common."""
    requests = [request(i, [9, *prompt], operation) for i, (prompt, operation) in enumerate(work)]
    num_slots = max(largest([([9, *p], o)]) + sum(map(len, unconditional_runs(o))) for p, o in work) + extra
    engine, _ = make_engine(num_slots, reserve="full")
    check_results(requests, run(engine, requests))
    assert engine.stats().recomputed_tokens == 0
    assert engine.stats().computed_prompt_tokens == unique_tokens(requests)


@pytest.mark.parametrize("num_slots", [300, 340, 600])
def test_other_orders_compute_more(num_slots: int) -> None:
    """The ablation: the same rows in random or first-come order, under the same small memory."""
    rng = random.Random(0)
    documents = [[rng.randrange(1, 50) for _ in range(200)] for _ in range(8)]
    prompts = [document + [rng.randrange(1, 50) for _ in range(10)] for document in documents for _ in range(6)]
    rng.shuffle(prompts)
    operation = Generate(max_tokens=4, temperature=0.0)
    planned = [request(i, p, operation) for i, p in enumerate(prompts)]
    first_come = [request(i, p, operation, priority=(i,)) for i, p in enumerate(prompts)]
    computed = {}
    for name, requests in {"planned": planned, "first-come": first_come}.items():
        engine, _ = make_engine(num_slots, reserve="full", max_batch_tokens=256)
        check_results(requests, run(engine, requests))
        computed[name] = engine.stats().computed_prompt_tokens
    assert computed["planned"] == unique_tokens(planned)
    assert computed["first-come"] > 2 * computed["planned"]


@pytest.mark.usefixtures("small_numbers_count")
def test_the_head_gets_a_token_in_every_step() -> None:
    """However little memory there is, the least unfinished request advances whenever it is prefilled."""
    engine, _ = make_engine(60, max_batch_tokens=200, max_rows=50)
    requests = [request(i, [1, 2, 3, 1 + i], Generate(max_tokens=50, temperature=0.0)) for i in range(12)]
    engine.submit(requests)
    while engine.has_unfinished:
        running = engine.scheduler.running
        head = min(running, default=None)
        before = len(head.output_ids) if head else 0
        finished = {r.request_id for r in engine.step()}
        if head is not None and head.request.request_id not in finished:
            assert len(head.output_ids) == before + 1
        engine.scheduler.check_integrity()
    assert engine.stats().recomputed_tokens > 0, "with so little memory rows must have paused"


@settings(max_examples=30, deadline=None)
@given(
    chats=st.lists(st.tuples(PROMPT, st.lists(PROMPT, max_size=3)), min_size=1, max_size=6),
    extra=st.sampled_from([0, 10, 200]),
    reserve=st.sampled_from(["soft", "full"]),
)
def test_follow_ups_extend_what_was_kept(
    chats: list[tuple[list[int], list[list[int]]]], extra: int, reserve: str
) -> None:
    """Programs of several calls: each extends the answer before; with room for all, only new text is computed."""
    operation = Generate(max_tokens=5, temperature=0.0)
    texts: dict[int, list[int]] = {i: list(first) for i, (first, _) in enumerate(chats)}
    longest = max(len(first) + sum(len(t) + 5 for t in turns) + 5 for first, turns in chats)
    engine, runner = make_engine(longest + extra, reserve=reserve)
    engine.submit([request(i, texts[i], operation, keep=True, priority=(i, 0)) for i in texts])
    turns_left = {i: list(turns) for i, (_, turns) in enumerate(chats)}
    while engine.has_unfinished:
        for result in engine.step():
            i = result.request_id
            assert list(result.output_ids) == generate(texts[i], 5)
            texts[i] += result.output_ids
            if turns_left[i]:
                texts[i] += turns_left[i].pop(0)
                priority = (i, 9 - len(turns_left[i]))
                engine.submit([request(i, texts[i], operation, keep=True, follow_up=True, priority=priority)])
            else:
                engine.finish_program(i)
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.config.num_slots
    assert runner.num_tokens >= engine.stats().computed_prompt_tokens


def test_follow_ups_compute_only_new_tokens_when_memory_suffices() -> None:
    engine, _ = make_engine(1000)
    first = request(1, [1, 2, 3, 4], Generate(max_tokens=6, temperature=0.0), keep=True)
    engine.submit([first])
    (answer,) = [r for _ in range(6) if engine.has_unfinished for r in engine.step()]
    prompt = [1, 2, 3, 4, *answer.output_ids, 7, 8]
    engine.submit([request(1, prompt, Generate(max_tokens=2, temperature=0.0), follow_up=True)])
    before = engine.stats().computed_prompt_tokens
    engine.step()
    assert engine.stats().computed_prompt_tokens - before == 3, "the last sampled token and the two new ones"
    assert engine.stats().recomputed_tokens == 0


@pytest.mark.parametrize("retain", [False, True])
def test_an_answer_that_a_cut_row_is_about_to_compute_too(retain: bool) -> None:
    prompt = [1, 2]
    longer = [*prompt, *generate(prompt, 12)]
    assert len(longer) == 14
    engine, _ = make_engine(100, max_batch_tokens=2, retain=retain)
    requests = [
        request(0, prompt, Generate(max_tokens=6, temperature=0.0), keep=True, priority=(0,)),
        request(1, longer, Generate(max_tokens=3, temperature=0.0), priority=(1,)),
    ]
    engine.submit(requests[:1])
    assert not [result for _ in range(3) for result in engine.step()]
    check_results(requests, run(engine, [requests[1]], before=[requests[0]]))
    assert retain or engine.scheduler.pool.num_free == 100


@pytest.mark.usefixtures("small_numbers_count")
def test_a_prompt_that_is_scored_again_while_another_row_reads_its_scores() -> None:
    engine, _ = make_engine(100, max_batch_tokens=3, overlap=True)
    prompt = [1, 1, 1, 1, 1, 1, 2]
    requests = [
        request(i, prompt, Generate(max_tokens=1, temperature=0.0, input_logprobs_from=start), priority=(i,))
        for i, start in enumerate((3, 0))
    ]
    check_results(requests, run(engine, requests))


def test_too_long_requests_are_errors_and_others_go_on() -> None:
    engine, _ = make_engine(20)
    requests = [
        request(0, [1] * 30, Generate(max_tokens=1, temperature=0.0)),
        request(1, [1] * 5, Generate(max_tokens=30, temperature=0.0)),
        request(2, [1] * 5, Generate(max_tokens=3, temperature=0.0)),
        request(3, [1] * 19, Choose(alternatives=((1, 2, 3), (2,)))),
    ]
    results = run(engine, requests)
    assert [results[i].error.code if results[i].error else None for i in range(4)] == [  # type: ignore[union-attr]
        "prompt-too-long",
        "prompt-too-long",
        None,
        "prompt-too-long",
    ]


def test_duplicates_enter_the_model_once() -> None:
    engine, runner = make_engine(200, max_batch_tokens=64)
    sampled = Generate(max_tokens=1, temperature=0.0)
    results = run(engine, [request(i, [5, 6, 7, 8], sampled) for i in range(30)])
    assert runner.num_tokens == 4
    assert len({r.text for r in results.values()}) == 1


def test_chunked_prefill_never_passes_the_budget() -> None:
    engine, runner = make_engine(500, max_batch_tokens=10, max_rows=4)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 50, size=60).tolist() for _ in range(6)]
    requests = [request(i, p, Generate(max_tokens=8, temperature=0.0)) for i, p in enumerate(prompts)]
    check_results(requests, run(engine, requests))
    assert runner.max_tokens_in_step <= 10
