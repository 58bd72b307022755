"""What is planned beyond the first calls: trusted traces, tokens of all calls, text in another order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import sglbatch as sgl
from sglbatch.engine import load_engine
from sglbatch.engine.fsm.compiled import Compiler
from sglbatch.engine.fsm.regex import compile_regex
from sglbatch.lang import Driver, Program, load_template
from sglbatch.lang.function import SglFunction
from sglbatch.lang.trace import PLAIN_ENVIRONMENT, trace_program
from sglbatch.models import resolve_model
from sglbatch.planner import JobFacts, plan_calls
from sglbatch.planner.foresight import CallTokens, check_trace, spread
from sglbatch.planner.made_up import RehearsalBackend, short_match, stand_in
from sglbatch.planner.movement import movement_of
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Request, Result
from tests.test_templates import SAMPLES, _rows, _template

ROWS = [{"question": "x" * length, "topic": f"t{length % 3}"} for length in range(1, 33)]


def distrust(function: SglFunction, rows: Sequence[Mapping[str, Any]] = ROWS) -> str | None:
    used = {parameter.name for parameter in function.parameters}
    trace = trace_program(function, {})
    return check_trace(trace, function, [{k: row[k] for k in used} for row in rows], PLAIN_ENVIRONMENT, Compiler())


# --- which traces are trusted ------------------------------------------------------------------


def test_straight_programs_are_trusted() -> None:
    @sgl.function
    def program(s: Any, question: str, topic: str) -> str:
        with s.user():
            s += f"{topic}: " + question
        s += sgl.assistant(sgl.gen("a", max_tokens=3) + " and " + sgl.select("b", ["x", "y"]))
        forks = s.fork(2)
        forks += lambda i: f" part {i} of {s['a']}" + sgl.gen("c", n=2)
        forks.join()
        s += forks[0]["b"] + sgl.gen("d", regex="[0-9]{4}")
        return str(int(s["d"]) + len(s["c"]))

    assert distrust(program) is None


def test_templates_that_are_trusted(smollm2_tokenizer: Tokenizer) -> None:
    found = {}
    for name in SAMPLES:
        template = load_template(_template(name))
        rows = [template.bind(list(row), {}).arguments(row) for row in _rows(SAMPLES[name][0])]
        found[name] = check_trace(
            trace_program(template.function, {}), template.function, rows, PLAIN_ENVIRONMENT, Compiler()
        )
    trusted = {"classify", "extract", "judge", "self_consistency", "skeleton", "json_extract"}
    assert {name for name, reason in found.items() if reason is None} == trusted
    assert found["chat"] == "branches on the answer 'verdict' (chat.py:24)"
    assert found["summarise"] is not None and found["summarise"].startswith("branches on the answer 'grade'")
    assert found["rag"] is not None and found["rag"].startswith("calls search outside")
    assert found["chat_replay"] is not None and found["chat_replay"].startswith("looks into the column 'turns'")


def test_conditions_on_a_column_are_not_trusted() -> None:
    @sgl.function
    def by_length(s: Any, question: str) -> None:
        s += question
        if len(question) > 30:
            s += " (long)"
        s += sgl.gen("a")

    @sgl.function
    def by_length_of_a_text(s: Any, question: str) -> None:
        text = f"Question: {question}"
        s += text + ("!" if len(text) > 40 else "?") + sgl.gen("a")

    @sgl.function
    def by_value(s: Any, topic: str) -> None:
        s += ("one" if topic == "t1" else "other") + sgl.gen("a")

    assert distrust(by_length) == "looks into the column 'question' (len) (test_planner_foresight.py:74)"
    assert distrust(by_length_of_a_text) == "does something else on checked row 31"
    assert distrust(by_value) == "branches on the column 'topic' (test_planner_foresight.py:85)"


def test_randomness_is_not_trusted() -> None:
    @sgl.function
    def seeded(s: Any, topic: str) -> None:
        s += topic + str(s.rng.random()) + sgl.gen("a")

    @sgl.function
    def unseeded(s: Any, topic: str) -> None:
        s += topic + random.choice(["a", "b", "c"]) + sgl.gen("a")

    assert distrust(seeded) is not None and "random numbers" in str(distrust(seeded))
    assert "does something else on checked row" in str(distrust(unseeded))


def test_results_that_decide_are_not_trusted() -> None:
    @sgl.function
    def by_text(s: Any, topic: str) -> None:
        s += topic + sgl.gen("a")
        text = f"{s['a']}"
        if text.startswith(" yes"):
            s += "more" + sgl.gen("b")

    @sgl.function
    def by_number(s: Any, topic: str) -> None:
        s += topic + sgl.gen("n", dtype=int)
        for _ in range(int(s["n"])):
            s += sgl.gen("b")

    assert "does something else" in str(distrust(by_text))
    assert distrust(by_number) == "makes a number of the answer 'n' (test_planner_foresight.py:116)"


@pytest.mark.parametrize(("number", "most"), [(0, 32), (1, 32), (31, 32), (32, 32), (1000, 32)])
def test_spread(number: int, most: int) -> None:
    indices = spread(number, most)
    assert len(indices) == min(number, most) == len(set(indices))
    assert not number or (indices[0], indices[-1]) == (0, number - 1)


@pytest.mark.parametrize("pattern", ["[0-9]{4}", "(yes|no)", "a*", '"[^"]{2,5}"', "é+x", "(True|False)"])
def test_short_matches(pattern: str) -> None:
    automaton = compile_regex(pattern)
    texts = [short_match(automaton, skip=i // 2, descending=bool(i % 2)) for i in range(4)]
    assert all(automaton.accepts(text.encode()) for text in texts)
    assert len(set(texts)) > 1


# --- tokens of all calls -----------------------------------------------------------------------


class Recording:
    """An engine whose answers are kept."""

    def __init__(self, engine: Any) -> None:
        self.answers: dict[tuple[int, tuple[int, ...]], Result] = {}
        self._engine = engine
        self._asked: dict[int, Request] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[Request]) -> None:
        self._asked |= {request.request_id: request for request in requests}
        self._engine.submit(requests)

    def step(self) -> list[Result]:
        results: list[Result] = self._engine.step()
        for result in results:
            self.answers[_place(self._asked[result.request_id])] = result
        return results


def _place(request: Request) -> tuple[int, tuple[int, ...]]:
    assert request.priority is not None
    return request.program_id, request.priority[1:]


def _run(name: str, tokenizer: Tokenizer, backend: Any, num_rows: int) -> None:
    template = load_template(_template(name))
    rows = _rows(SAMPLES[name][0])[:num_rows]
    binding = template.bind(list(rows[0]), {})
    driver = Driver(tokenizer=tokenizer, model_identity="m", context_len=8192, backend=backend)
    for index, row in enumerate(rows):
        driver.add(binding.program(row, program_id=index, row_key=str(index)))
    calls = driver.collect()
    plan, _, _ = plan_calls(calls, JobFacts(num_rows=num_rows, context_len=8192))
    driver.submit([calls[i] for i in plan.order.tolist()], range(len(calls)))
    while driver.unfinished:
        driver.step()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["judge", "self_consistency", "skeleton"])
def test_planned_tokens_are_those_that_the_engine_computes(name: str, smollm2_tokenizer: Tokenizer) -> None:
    """The trusted programs are rehearsed with the engine's answers: every prompt and every computed token is known."""
    engine = load_engine(resolve_model("smollm2-135m"), smollm2_tokenizer, kv_tokens=8192)
    recording = Recording(engine)
    _run(name, smollm2_tokenizer, recording, 4)
    stats = engine.stats()
    rehearsal = RehearsalBackend(
        lambda request: replace_id(recording.answers[_place(request)], request.request_id), context_len=8192
    )
    _run(name, smollm2_tokenizer, rehearsal, 4)
    tokens = CallTokens.of(rehearsal.answered)
    assert (tokens.num_calls, tokens.prompt, tokens.computed) == (
        stats.requests,
        stats.prompt_tokens,
        stats.computed_prompt_tokens,
    )
    low, high = (_stand_in_tokens(name, smollm2_tokenizer, longest) for longest in (False, True))
    assert low.num_calls == tokens.num_calls == high.num_calls
    assert low.prompt <= tokens.prompt <= high.prompt


def _stand_in_tokens(name: str, tokenizer: Tokenizer, longest: bool) -> CallTokens:
    rehearsal = RehearsalBackend(lambda request: stand_in(request, Compiler(), longest=longest), context_len=8192)
    _run(name, tokenizer, rehearsal, 4)
    return CallTokens.of(rehearsal.answered)


def replace_id(result: Result, request_id: int) -> Result:
    return Result(
        request_id=request_id,
        text=result.text,
        output_ids=result.output_ids,
        tail=result.tail,
        finish_reason=result.finish_reason,
        usage=result.usage,
        choice=result.choice,
        choice_logprobs=result.choice_logprobs,
    )


# --- text in another order ---------------------------------------------------------------------


@sgl.function
def late(s: Any, question: str, topic: str, essay: str) -> None:
    s += sgl.any_order(question=f"{question}\n", topic=f"{topic}\n", essay=f"{essay}\n")
    s += "Now judge the text by its style, its structure, its clarity, its evidence and its length: "
    s += sgl.gen("a")


MOVED = [{"question": f"q{i}", "topic": f"topic {i % 2}", "essay": f"essay {i % 3} " * 4} for i in range(12)]


def test_movement_suggests_with_numbers(smollm2_tokenizer: Tokenizer) -> None:
    trace = trace_program(late, {})
    moved = movement_of(
        trace.graph, MOVED, lambda text: len(smollm2_tokenizer.encode(text)), order_free=trace.order_free
    )
    assert moved.columns == ("question", "topic", "essay")
    assert moved.best_columns == ("essay", "topic", "question")
    essay_tokens = len(smollm2_tokenizer.encode(MOVED[0]["essay"]))
    topic_tokens = len(smollm2_tokenizer.encode("topic 0"))
    assert (moved.saved_tokens, moved.best_saved_tokens) == (0, 9 * essay_tokens + 6 * topic_tokens)
    assert 16 <= moved.movable_tokens <= 30
    text = "\n".join(moved.lines())
    assert f"saves {moved.movable_tokens * 11} tokens" in text
    assert "--reorder essay,topic,question" in text
    assert moved.to_json()["tokens_saved_if_in_front"] == moved.movable_tokens * 11


def test_reorder_changes_only_what_is_order_free(smollm2_tokenizer: Tokenizer) -> None:
    texts = []
    for reorder in ((), ("essay",), ("topic", "essay")):
        driver = Driver(tokenizer=smollm2_tokenizer, model_identity="m", context_len=8192, reorder=reorder)
        driver.add(Program(late, MOVED[0], program_id=0, row_key="0"))
        (call,) = driver.collect()
        texts.append(call.prompt_text.split("Now judge")[0].split("\n")[:3])
    question, topic, essay = MOVED[0]["question"], MOVED[0]["topic"], MOVED[0]["essay"]
    assert texts == [[question, topic, essay], [essay, question, topic], [topic, essay, question]]
