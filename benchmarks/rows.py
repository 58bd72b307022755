"""What a row costs in Python, run by its function and from its trace: up to its first calls, and to its end.

python benchmarks/rows.py WORKLOADS_DIR/mmlu.jsonl [--rows N] [--memory]

No model and no tokenizer: answers are made up and come at once, one row after another. Processor time, the best of a
few tries.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sglbatch as sgl
from sglbatch.engine.fsm import Compiler
from sglbatch.lang import Program, load_template
from sglbatch.lang.calls import Choices, ModelCall
from sglbatch.lang.environment import Environment
from sglbatch.lang.function import SglFunction
from sglbatch.lang.guard import Guard
from sglbatch.lang.replay import Replay
from sglbatch.lang.row_program import RowProgram
from sglbatch.lang.scripts import Scripts
from sglbatch.lang.trace import BracketFrames
from sglbatch.planner.foresight import spread
from sglbatch.planner.made_up import MadeUpAnswers
from sglbatch.types import Result, Usage

ROOT = Path(__file__).parent.parent
TEMPLATES = {
    "classify": "reviews",
    "multiple_choice": "questions",
    "json_extract": "orders",
    "chat_replay": "conversations",
    "judge": "essays",
    "chat": "prompts",
    "skeleton": "topics",
}
TRIES = 3
USAGE = Usage(prompt_tokens=1, generated_tokens=1)
ENVIRONMENT = Environment(
    seed=0, chat=BracketFrames(), specials={"<|im_start|>": 1, "<|im_end|>": 2}, eos_token_ids=frozenset({2})
)


@sgl.function
def mmlu(s: Any, prompt: str) -> None:
    s += prompt + sgl.select("answer", choices=[" A", " B", " C", " D"])


Make = Callable[[Mapping[str, Any], int, str], RowProgram]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path, help="JSONL with a column prompt")
    parser.add_argument("--rows", type=int, default=14_000)
    parser.add_argument("--memory", action="store_true", help="instead: what rows hold that wait for a first answer")
    options = parser.parse_args()
    prompts = [{"prompt": json.loads(line)["prompt"]} for line in options.prompts.read_text().splitlines()]
    columns = "first calls, by function µs | from trace µs | to the end, by function µs | from trace µs"
    columns = "held by function KB | from trace KB" if options.memory else columns
    print(f"| program | rows | {columns} |\n{'|---' * (columns.count('|') + 3)}|")
    measure("mmlu, a prompt a row", mmlu, prompts[: options.rows], memory=options.memory)
    for name, sample in TEMPLATES.items():
        template = load_template(ROOT / "templates" / f"{name}.py")
        rows = [json.loads(line) for line in (ROOT / "samples" / f"{sample}.jsonl").read_text().splitlines()]
        binding = template.bind(list(rows[0]), {})
        arguments = [binding.arguments(row) for row in rows]
        number = options.rows // 7
        repeated = [arguments[i % len(arguments)] for i in range(number)]
        measure(name, template.function, repeated, memory=options.memory)


def measure(name: str, function: SglFunction, rows: Sequence[Mapping[str, Any]], *, memory: bool) -> None:
    guard = Guard.of_template(function.strings(), ENVIRONMENT)

    def by_function(arguments: Mapping[str, Any], program_id: int, row_key: str) -> Program:
        return Program(function, arguments, program_id=program_id, row_key=row_key)

    scripts = Scripts(function, by_function, environment=ENVIRONMENT, guard=guard)
    scripts.learn([rows[i] for i in spread(len(rows))], [MadeUpAnswers(0, Compiler())])
    assert isinstance(scripts.program(rows[0], 0, ""), Replay), scripts.refused
    if memory:
        held = [f"{held_bytes(make, rows, guard) / len(rows) / 1024:.1f}" for make in (by_function, scripts.program)]
        print(f"| {name} | {len(rows):,} | {' | '.join(held)} |", flush=True)
        return
    figures = []
    for to_end in (False, True):
        for make in (by_function, scripts.program):
            seconds = min(ran(make, rows, guard, to_end=to_end) for _ in range(TRIES))
            figures.append(f"{seconds / len(rows) * 1e6:.1f}")
    print(f"| {name} | {len(rows):,} | {' | '.join(figures)} |", flush=True)


def ran(make: Make, rows: Sequence[Mapping[str, Any]], guard: Guard, *, to_end: bool) -> float:
    """Processor seconds."""
    answers = MadeUpAnswers(0, Compiler())
    start = time.process_time()
    started = []
    for number, arguments in enumerate(rows):
        program = make(arguments, number, "row")
        program.start(ENVIRONMENT, guard)
        calls = program.take_calls()
        if not to_end:
            started.append((program, calls))  # as a job holds them
        while to_end and calls:
            call = calls.pop(0)
            assert isinstance(call, ModelCall)
            program.deliver(call.path, answered(call, answers))
            calls += program.take_calls()
    return time.process_time() - start


def held_bytes(make: Make, rows: Sequence[Mapping[str, Any]], guard: Guard) -> int:
    """Of all rows, as they wait for their first answers; the calls themselves are the driver's."""
    started = []
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number, arguments in enumerate(rows):
        program = make(arguments, number, "row")
        program.start(ENVIRONMENT, guard)
        program.take_calls()
        started.append(program)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return held


def answered(call: ModelCall, answers: MadeUpAnswers) -> Result:
    if isinstance(call.question, Choices):
        return Result(request_id=0, choice=0, finish_reason="choice", usage=USAGE)
    return Result(request_id=0, text=answers.text(call), output_ids=(5,), usage=USAGE)


if __name__ == "__main__":
    main()
