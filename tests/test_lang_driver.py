"""The driver: order, memo, equal calls, parking, thousands of programs."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sglbatch as sgl
from sglbatch.lang import Driver, Outcome, PendingCall, Program
from sglbatch.lang.function import SglFunction
from sglbatch.lang.sampling import Sampling, SamplingOverride
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Choose, Request, VarType
from tests.lang_backend import ScriptedBackend

GREEDY = Sampling(temperature=0.0)


class Memo(dict[str, dict[str, Any]]):
    """A journal in memory."""

    def put(self, key: str, value: dict[str, Any]) -> None:
        assert key not in self, "a call was made twice"
        self[key] = value


def echo(prompt: str, request: Request) -> str | int:
    if hasattr(request.operation, "alternatives"):
        return len(prompt) % len(request.operation.alternatives)
    return str(sum(prompt.encode()) % 97)


def drive(driver: Driver) -> list[Program]:
    calls = driver.collect()
    if calls:
        driver.submit(calls, list(range(len(calls))))
    finished: list[Program] = []
    while driver.unfinished:
        finished += driver.step()
    return finished


def run_rows(
    tokenizer: Tokenizer,
    function: SglFunction,
    rows: list[dict[str, Any]],
    *,
    memo: Memo | None = None,
    shuffle: int | None = None,
    seed: int = 0,
    sampling: Sampling = GREEDY,
    **options: Any,
) -> tuple[list[Outcome], Driver, ScriptedBackend]:
    backend = ScriptedBackend(tokenizer, echo, shuffle=shuffle, batch=3 if shuffle is not None else 64)
    driver = Driver(
        tokenizer=tokenizer, model_identity="m", context_len=8192, backend=backend, memo=memo, seed=seed, **options
    )
    for i, row in enumerate(rows):
        driver.add(Program(function, row, program_id=i, row_key=f"row {i}", sampling=sampling))
    finished = drive(driver)
    assert sorted(program.program_id for program in finished) == list(range(len(rows)))
    return [p.outcome for p in sorted(finished, key=lambda p: p.program_id)], driver, backend


def squared(value: int) -> int:
    return value * value


@sgl.function
def mixed(s: Any, word: str, number: int) -> Any:
    s += f"Word {word}: " + sgl.select("kind", ["good", "bad"]) + "."
    s += sgl.gen("n", dtype=int)
    forks = s.fork(2)
    forks += lambda i: f" part {i}" + sgl.gen("part")
    if s["kind"] == "bad":
        s["square"] = sgl.call(squared, number)
    forks.join()
    s += " end" + sgl.gen("end")
    s["luck"] = s.rng.random()
    return s["part"]


ROWS = [{"word": f"w{i % 7}", "number": i} for i in range(40)]


def test_outcomes_do_not_depend_on_the_order_of_answers(smollm2_tokenizer: Tokenizer) -> None:
    plain, driver, backend = run_rows(smollm2_tokenizer, mixed, ROWS)
    assert all(outcome.error is None for outcome in plain)
    assert driver.calls_made == len(backend.requests) + sum("square" in outcome.values for outcome in plain)
    for shuffle in (1, 2):
        assert run_rows(smollm2_tokenizer, mixed, ROWS, shuffle=shuffle)[0] == plain
    parked = run_rows(smollm2_tokenizer, mixed, ROWS, shuffle=3, max_live_programs=5)[0]
    assert parked == plain
    outcome = plain[0]
    assert outcome.dtypes["kind"] == VarType(kind="enum", choices=("good", "bad"))
    assert outcome.dtypes["n"] == VarType(kind="int")
    assert outcome.dtypes["part"] == VarType(kind="text", is_list=True)
    assert outcome.dtypes["luck"] == VarType(kind="float")
    assert outcome.finish == {"kind": "choice", "n": "stop", "part": "stop", "end": "stop"}
    assert outcome.usage.prompt_tokens > outcome.usage.generated_tokens > 0
    assert outcome.transcript.startswith("Word w0: ")


def test_a_finished_job_makes_no_calls(smollm2_tokenizer: Tokenizer) -> None:
    memo = Memo()
    first, made, _ = run_rows(smollm2_tokenizer, mixed, ROWS, memo=memo)
    again, driver, backend = run_rows(smollm2_tokenizer, mixed, ROWS, memo=memo)
    assert again == first
    assert backend.requests == [] and driver.calls_made == 0
    assert made.calls_reused == 0
    assert driver.calls_reused == made.calls_made + made.calls_collapsed


def test_a_job_stopped_halfway_repeats_nothing(smollm2_tokenizer: Tokenizer) -> None:
    whole = Memo()
    expected = run_rows(smollm2_tokenizer, mixed, ROWS, memo=whole)[0]
    keys = list(whole)
    for kept in (1, len(keys) // 2, len(keys) - 1):
        memo = Memo((key, whole[key]) for key in keys[:kept])
        assert run_rows(smollm2_tokenizer, mixed, ROWS, memo=memo, shuffle=kept)[0] == expected
        assert memo == whole


def test_equal_greedy_calls_are_asked_once(smollm2_tokenizer: Tokenizer) -> None:
    @sgl.function
    def same(s: Any) -> None:
        s += "the same" + sgl.gen("x")

    outcomes, driver, backend = run_rows(smollm2_tokenizer, same, [{}] * 10)
    assert len(backend.requests) == driver.calls_made == 1
    assert driver.calls_collapsed == 9
    assert len({outcome.values["x"] for outcome in outcomes}) == 1
    _, driver, backend = run_rows(smollm2_tokenizer, same, [{}] * 10, sampling=Sampling(temperature=1.0))
    assert len({request.seed for request in backend.requests}) == 10


def test_follow_ups_keep_their_place(smollm2_tokenizer: Tokenizer) -> None:
    @sgl.function
    def chain(s: Any, word: str) -> None:
        s += word + sgl.gen("a")
        forks = s.fork(2)
        forks += lambda i: f" {i}" + sgl.gen("b")
        forks.join()
        s += "." + sgl.gen("c")

    backend = ScriptedBackend(smollm2_tokenizer, echo)
    driver = Driver(tokenizer=smollm2_tokenizer, model_identity="m", context_len=8192)
    for i in range(3):
        driver.add(Program(chain, {"word": f"w{i}"}, program_id=i, row_key=str(i)))
    calls = driver.collect()
    assert [call.prompt_text for call in calls] == ["w0", "w1", "w2"]
    assert [call.program_ids for call in calls] == [[0], [1], [2]]
    driver.attach(backend)
    driver.submit(calls, [2, 0, 1])
    while driver.unfinished:
        driver.step()
    priorities = [request.priority for request in backend.requests if request.program_id == 0]
    assert priorities == [(2, 0), (2, 1, 0, 0), (2, 1, 1, 0), (2, 2)]
    assert [request.follow_up for request in backend.requests if request.program_id == 0] == [False, True, True, True]


def test_after_a_join_the_earliest_place_counts(smollm2_tokenizer: Tokenizer) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "x"
        forks = s.fork(3)
        forks += lambda i: f" {i}" + sgl.gen("b")
        forks.join()
        s += "." + sgl.gen("c")

    backend = ScriptedBackend(smollm2_tokenizer, echo)
    driver = Driver(tokenizer=smollm2_tokenizer, model_identity="m", context_len=8192, backend=backend)
    driver.add(Program(program, {}, program_id=0, row_key="0"))
    driver.submit(driver.collect(), [7, 3, 5])
    while driver.unfinished:
        driver.step()
    assert backend.requests[-1].priority == (3, 1)


def test_planning_makes_no_outside_calls(smollm2_tokenizer: Tokenizer) -> None:
    made: list[int] = []

    def look_up(value: int) -> int:
        made.append(value)
        return value

    @sgl.function
    def program(s: Any) -> None:
        s += f"{sgl.call(look_up, 7)}" + sgl.gen("x")

    driver = Driver(tokenizer=smollm2_tokenizer, model_identity="m", context_len=8192)
    driver.add(Program(program, {}, program_id=0, row_key="0"))
    assert driver.collect() == [] and made == [] and driver.num_waiting_outside == 1
    calls = driver.collect(run_outside=True)
    assert [call.prompt_text for call in calls] == ["7"] and made == [7] and driver.num_waiting_outside == 0


def test_planning_knows_what_outside_calls_gave_before(smollm2_tokenizer: Tokenizer) -> None:
    @sgl.function
    def program(s: Any, word: str) -> None:
        s += sgl.call(str.upper, word) + sgl.call(str.lower, word) + sgl.gen("x")

    memo = Memo()
    for run_outside, words in ((True, ["Ab"]), (False, ["Ab", "Cd"])):
        driver = Driver(tokenizer=smollm2_tokenizer, model_identity="m", context_len=8192, memo=memo)
        for i, word in enumerate(words):
            driver.add(Program(program, {"word": word}, program_id=i, row_key=word))
        assert [call.prompt_text for call in driver.collect(run_outside=run_outside)] == ["ABab"]
    assert (driver.calls_reused, driver.num_waiting_outside) == (2, 1)


def test_a_mistake_of_the_template_ends_the_job(smollm2_tokenizer: Tokenizer) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.gen("_error")

    driver = Driver(tokenizer=smollm2_tokenizer, model_identity="m", context_len=8192)
    with pytest.raises(sgl.SglbatchError) as caught:
        driver.add(Program(program, {}, program_id=0, row_key="0"))
    assert caught.value.code == "reserved-name"
    assert caught.value.where is not None and caught.value.where.startswith("test_lang_driver.py:")
    assert not driver.unfinished


def test_whose_value_counts(smollm2_tokenizer: Tokenizer) -> None:
    @sgl.function(max_new_tokens=20, temperature=0.5)
    def program(s: Any) -> None:
        s += "x" + sgl.gen("a") + sgl.gen("b", max_tokens=5)

    backend = ScriptedBackend(smollm2_tokenizer, echo)
    driver = Driver(tokenizer=smollm2_tokenizer, model_identity="m", context_len=8192, backend=backend)
    forced = (SamplingOverride(), SamplingOverride(max_tokens=7))
    for i, override in enumerate(forced):
        driver.add(Program(program, {}, program_id=i, row_key=str(i), sampling=Sampling(top_p=0.9), forced=override))
    drive(driver)
    found = [
        (r.program_id, r.operation.max_tokens, r.operation.temperature, r.operation.top_p) for r in backend.requests
    ]
    assert sorted(found) == [(0, 5, 0.5, 0.9), (0, 20, 0.5, 0.9), (1, 5, 0.5, 0.9), (1, 7, 0.5, 0.9)]


def test_a_function_that_changes_between_runs_is_the_rows_error(smollm2_tokenizer: Tokenizer) -> None:
    runs: list[int] = []

    @sgl.function
    def program(s: Any) -> None:
        runs.append(1)
        s += "x" + sgl.gen(f"name {len(runs)}") + sgl.gen("b")

    outcomes, _, _ = run_rows(smollm2_tokenizer, program, [{}], max_live_programs=0)
    assert outcomes[0].error is not None and outcomes[0].error.code == "not-deterministic"


def test_a_selects_tokens_do_not_depend_on_when_answers_come(smollm2_tokenizer: Tokenizer) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Say "
        other = s.copy()
        other += "other" + sgl.gen("c")
        s += sgl.gen("a") + sgl.select("b", [" walk", " talk"])
        other["c"]
        s += "ing" + sgl.gen("d")

    asked = set()
    for shuffle in range(8):
        backend = ScriptedBackend(smollm2_tokenizer, echo, shuffle=shuffle, batch=1)
        program.run(backend=backend, temperature=0)
        asked.add(next(r.operation.alternatives for r in backend.requests if isinstance(r.operation, Choose)))
    walk, talk = smollm2_tokenizer.encode(" walk"), smollm2_tokenizer.encode(" talk")
    assert asked == {(tuple(walk), tuple(talk))}


# --- random programs ---------------------------------------------------------------------------

STEPS = st.recursive(
    st.sampled_from(["text", "gen", "select", "read", "branch", "set", "outside", "contains"]),
    lambda inner: st.tuples(st.sampled_from(["gather_variable", "concate_and_append"]), st.lists(inner, max_size=4)),
    max_leaves=14,
)


def perform(s: Any, steps: list[Any], depth: str) -> None:
    for i, step in enumerate(steps):
        name = f"v{i % 3}"
        match step:
            case "text":
                s += f" t{depth}{i}"
            case "gen":
                s += sgl.gen(name, temperature=i % 2)
            case "select":
                s += sgl.select(name, [" yes", " no", " yes sir"])
            case "set":
                s[name] = i
            case "contains":
                s["has"] = name in s
            case "read":
                s += str(s[name]) if name in s else "-"
            case "branch":
                s += " even" if len(s.text()) % 2 == 0 else " odd"
            case "outside":
                s += str(sgl.call(squared, i))
            case (mode, inner):
                forks = s.fork(2)
                for j, branch in enumerate(forks):
                    perform(branch, inner[j:], f"{depth}{j}")
                forks.join(mode)


@sgl.function
def random_program(s: Any, steps: list[Any]) -> str:
    s += "Start"
    perform(s, steps, "")
    return s.text()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(STEPS, max_size=8), min_size=1, max_size=3), st.integers(0, 1000))
def test_random_programs(smollm2_tokenizer: Tokenizer, programs: list[list[Any]], shuffle: int) -> None:
    rows = [{"steps": steps} for steps in programs]
    memo = Memo()
    expected, _, backend = run_rows(smollm2_tokenizer, random_program, rows, memo=memo)
    for outcome in expected:
        assert outcome.error is None
        assert outcome.returned == outcome.transcript
    parked, _, again = run_rows(smollm2_tokenizer, random_program, rows, shuffle=shuffle, max_live_programs=0)
    assert parked == expected
    assert {r.prompt_ids.tobytes() for r in again.requests} == {r.prompt_ids.tobytes() for r in backend.requests}
    replayed, driver, _ = run_rows(smollm2_tokenizer, random_program, rows, memo=memo)
    assert replayed == expected and driver.calls_made == 0


def test_thousands_of_programs_wait_at_once(smollm2_tokenizer: Tokenizer) -> None:
    @sgl.function
    def program(s: Any, i: int) -> None:
        s += f"Number {i}" + sgl.gen("x")
        s["y"] = s["x"] + "!"
        s += "." + sgl.gen("z")

    start = time.monotonic()
    driver = Driver(tokenizer=smollm2_tokenizer, model_identity="m", context_len=8192)
    for i in range(5000):
        driver.add(Program(program, {"i": i}, program_id=i, row_key=str(i), sampling=GREEDY))
    calls: list[PendingCall] = driver.collect()
    assert len(calls) == 5000
    driver.attach(ScriptedBackend(smollm2_tokenizer, echo, batch=1000))
    driver.submit(calls, list(range(5000)))
    finished: list[Program] = []
    while driver.unfinished:
        finished += driver.step()
    assert len(finished) == 5000
    assert all(p.outcome.error is None and p.outcome.values["y"].endswith("!") for p in finished)
    assert time.monotonic() - start < 60
