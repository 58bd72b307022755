"""The shipped templates: each reads its sample's columns and asks for its first calls."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglbatch.engine import load_engine
from sglbatch.lang import Driver, Program, load_template
from sglbatch.models import resolve_model
from sglbatch.planner import JobFacts, plan_calls
from sglbatch.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = {
    "multiple_choice": ("questions", 40),
    "classify": ("reviews", 30),
    "extract": ("people", 20),
    "chat": ("prompts", 15),
    "judge": ("essays", 8),
    "self_consistency": ("sums", 10),
    "tree_of_thought": ("sums", 10),
    "react": ("sums", 10),
    "skeleton": ("topics", 6),
    "chat_replay": ("conversations", 6),
    "rag": ("facts", 8),
    "summarise": ("articles", 6),
    "json_extract": ("orders", 8),
}
FIRST_CALLS = {"judge": 3, "self_consistency": 3, "tree_of_thought": 3}
"""Of each row, where it is not one."""
ENDS_AT_ONCE = {"multiple_choice", "classify", "rag", "json_extract"}
"""Templates whose rows make no call after their first ones."""


def _template(name: str) -> Path:
    return ROOT / "templates" / f"{name}.py"


def _rows(sample: str) -> list[dict[str, Any]]:
    lines = (ROOT / "samples" / f"{sample}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_every_template_has_its_sample() -> None:
    assert {path.stem for path in (ROOT / "templates").glob("*.py")} == set(SAMPLES)
    assert {path.stem for path in (ROOT / "samples").iterdir()} == {sample for sample, _ in SAMPLES.values()}


@pytest.mark.parametrize(("sample", "num_rows"), SAMPLES.values())
def test_samples_are_whole(sample: str, num_rows: int) -> None:
    rows = _rows(sample)
    assert len(rows) == num_rows
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == num_rows
    assert len({tuple(row) for row in rows}) == 1
    assert all(value for row in rows for value in row.values())


@pytest.mark.parametrize("name", SAMPLES)
def test_header_says_what_goes_in_and_comes_out(name: str) -> None:
    module = ast.parse(_template(name).read_text(encoding="utf-8"))
    header = ast.get_docstring(module)
    assert header is not None
    (function,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.decorator_list)
    reads = next(line for line in header.splitlines() if line.startswith("Columns read:"))
    makes = header[header.index("Columns made:") : header.index("Sample:")]
    assert f"samples/{SAMPLES[name][0]}.jsonl" in header
    for argument in function.args.args[1:]:
        assert argument.arg in reads
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        if called in ("sgl.gen", "sgl.select") and (variable := ast.literal_eval(call.args[0])) != "score":
            assert variable in makes  # a fork's score comes out under its dimension's name


def test_right_answers_are_spread_and_exist() -> None:
    rows = _rows("questions")
    letters = [row["answer"] for row in rows]
    assert {letter: letters.count(letter) for letter in "ABCD"} == dict.fromkeys("ABCD", 10)
    assert all(len(set(row["choices"])) == 4 for row in rows)


# --- with the real tokenizer and model ---------------------------------------------------------

VALUES: dict[str, dict[str, str]] = {  # what each variable's text must look like
    "multiple_choice": {"choice": "[A-D]"},
    "classify": {"label": "positive|negative|mixed"},
    "extract": {"name": r"[^\n]*", "born": "[0-9]{4}", "field": "science|music|literature|art|politics|sport"},
    "chat": {"verdict": "yes|no"},
    "self_consistency": {"vote": "-?[0-9]+", "agreement": r"[01]\.[0-9]+", "answer": r"\[.*\]"},
    "tree_of_thought": {"plan": r"[^\n]*", "promising": r"[01]\.[0-9]+(e-[0-9]+)?", "answer": "-?[0-9]+"},
    "react": {"steps": "[0-2]", "action": "calculate|finish", "answer": r"[^\n]*"},
    "skeleton": {"points": r"(?s)\[.*\]", "detail": r"(?s)\[.*\]"},
    "chat_replay": {"answers": r"(?s)\[.*\]", "answer": "(?s).*"},
    "rag": {"sources": r"\['.*', '.*'\]", "answer": r"[^\n]*"},
    "summarise": {"summary": r"[^\n]*", "grade": "good|poor", "retried": "True|False"},
    "json_extract": {"order": r'\{"item": ?".*", ?"count": ?[0-9]+, ?"express": ?(true|false)\}|\{.*\}'},
    "judge": {
        "clarity": "[1-5]",
        "evidence": "[1-5]",
        "structure": "[1-5]",
        "verdict": "accept|revise",
    },
}


def _start(name: str, tokenizer: Tokenizer, num_rows: int | None = None) -> tuple[Driver, list[Program]]:
    """A driver with a program for each row of the template's sample."""
    template = load_template(_template(name))
    rows = _rows(SAMPLES[name][0])[:num_rows]
    binding = template.bind(list(rows[0]), {})
    driver = Driver(tokenizer=tokenizer, model_identity="m", context_len=8192)
    programs = [binding.program(row, program_id=index, row_key=str(index)) for index, row in enumerate(rows)]
    for program in programs:
        driver.add(program)
    return driver, programs


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_gives_its_first_calls(name: str, smollm2_tokenizer: Tokenizer) -> None:
    driver, programs = _start(name, smollm2_tokenizer)
    calls = driver.collect(run_outside=True)
    assert not [program.outcome.error for program in programs if program.outcome.error]
    asked = {program_id for call in calls for program_id in call.program_ids}
    assert asked == {program.program_id for program in programs}
    assert len(calls) == FIRST_CALLS.get(name, 1) * len(programs)

    plan, summary, tree = plan_calls(calls, JobFacts(num_rows=len(programs), context_len=8192))
    assert summary.num_requests == len(calls) and summary.num_too_long == 0
    assert summary.follow_up_rows == (0 if name in ENDS_AT_ONCE else len(programs))
    assert plan.best_hit_rate > 0.2
    assert tree.nodes[0].num_requests == len(calls)  # all rows begin alike


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_template_runs_on_the_model(name: str, smollm2_tokenizer: Tokenizer) -> None:
    model = resolve_model("smollm2-135m")
    engine = load_engine(model, smollm2_tokenizer, kv_tokens=4096)
    driver, programs = _start(name, smollm2_tokenizer, 2)
    driver.attach(engine)
    calls = driver.collect(run_outside=True)
    plan, summary, _ = plan_calls(calls, JobFacts(num_rows=2, context_len=8192))
    driver.submit(calls, plan.positions().tolist())
    finished: list[Program] = []
    while driver.unfinished:
        finished += driver.step()
    stats = engine.stats()
    engine.close()
    if not summary.follow_up_rows:
        planned = (summary.num_requests, summary.prompt_tokens, summary.unique_tokens)
        assert (stats.requests, stats.prompt_tokens, stats.computed_prompt_tokens) == planned
    assert {program.program_id for program in finished} == {0, 1}
    for program in programs:
        outcome = program.outcome
        assert outcome.error is None
        values = {variable: str(outcome.values[variable]) for variable in VALUES[name]}
        for variable, pattern in VALUES[name].items():
            assert re.fullmatch(pattern, values[variable]), values
        assert name != "chat" or ("reason" in outcome.values) == (values["verdict"] == "no")
        assert name != "extract" or type(outcome.values["born"]) is int
        assert name != "judge" or 1 <= outcome.returned <= 5
        assert name != "summarise" or outcome.values["retried"] == (values["grade"] == "poor")
        assert name != "chat_replay" or outcome.values["answers"][-1] == outcome.values["answer"]
