"""`plan` beyond the first calls, and `--reorder`, by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglbatch.lang.graph import Graph

TEMPLATE = """
import sglbatch as sgl

@sgl.function(temperature=0)
def judge(s, essay, topic):
    s += sgl.any_order(essay=f"Essay: {essay}\\n", topic=f"Topic: {topic}\\n")
    s += "Think of its style, its structure, its clarity, its evidence and its length before you judge it.\\n"
    forks = s.fork(2)
    forks += [f"{name}: " + sgl.select("score", ["1", "2"]) for name in ("Style", "Length")]
    s += "Verdict after " + forks[0]["score"] + ": " + sgl.gen("verdict", max_tokens=8)
"""


def sglbatch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglbatch", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "judge.py").write_text(TEMPLATE)
    rows = [{"essay": f"Essay number {i} of a few.", "topic": f"A topic of some length, {i % 2}"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def plan(folder: Path, model: Path, *options: str) -> dict[str, Any]:
    done = sglbatch("plan", "judge.py", "rows.jsonl", "--model", str(model), "--json", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_plan_counts_follow_ups_and_suggests_an_order(folder: Path, smollm2_dir: Path) -> None:
    value = plan(folder, smollm2_dir)
    assert (value["requests"], value["traced"]["calls"], value["traced"]["traced"]) == (12, 6, True)
    assert value["traced"]["all_prompt_tokens"][0] > value["prompt_tokens"]
    moved = value["movement"]
    assert moved["best_column_order"] == moved["order_free"][::-1] == ["topic", "essay"]
    reordered = plan(folder, smollm2_dir, "--reorder", "topic,essay")
    assert reordered["unique_prompt_tokens"] < value["unique_prompt_tokens"]
    assert reordered["movement"]["column_order"] == ["topic", "essay"]
    done = sglbatch("plan", "judge.py", "rows.jsonl", "--model", str(smollm2_dir), cwd=folder)
    assert "traced: 6 follow-up calls; with them" in done.stdout
    assert "--reorder topic,essay" in done.stdout


HOW_ROWS_RUN = {
    's += text + sgl.gen("a")\n    s += s["a"] + "." + sgl.gen("b")': "rows are run from the trace, without Python",
    's += text + sgl.gen("a")\n    s += "." * int(s["a"] != "") + sgl.gen("b")': (
        "rows are run by Python from their first answer on: the program branches on the variable 'a' (judge.py:7)"
    ),
    's += text.upper() + sgl.gen("a")': (
        "rows are run by Python: the program looks into the column 'text' (upper) (judge.py:6)"
    ),
}


@pytest.mark.parametrize("body", HOW_ROWS_RUN)
def test_plan_says_how_rows_are_run(folder: Path, smollm2_dir: Path, body: str) -> None:
    (folder / "judge.py").write_text(f"import sglbatch as sgl\n\n\n@sgl.function\ndef judge(s, text):\n    {body}\n")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"Row {i}"}) + "\n" for i in range(40)))
    done = sglbatch("plan", "judge.py", "rows.jsonl", "--model", str(smollm2_dir), cwd=folder)
    assert HOW_ROWS_RUN[body] in done.stdout.splitlines()
    replayed = plan(folder, smollm2_dir)["replayed"]
    assert replayed["without_python"] == ("without Python" in HOW_ROWS_RUN[body])


def test_the_graph_in_its_forms(folder: Path, smollm2_dir: Path) -> None:
    def printed(form: str) -> str:
        options = ["--model", str(smollm2_dir), "--graph", form]
        done = sglbatch("plan", "judge.py", "rows.jsonl", *options, cwd=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    graph = Graph.from_json(json.loads(printed("json")))
    assert [node.kind for node in graph.nodes].count("Select") == 2 and graph.stopped is None
    assert printed("text").strip() == str(graph)
    assert printed("dot").strip() == graph.to_dot()
    wrong = sglbatch("plan", "judge.py", "rows.jsonl", "--model", str(smollm2_dir), "--graph", "svg", cwd=folder)
    assert wrong.returncode == 2 and "choose from: text, dot, json" in wrong.stderr


RARELY = """
import sglbatch as sgl

@sgl.function
def rarely(s, text):
    s += text + sgl.gen("a", max_tokens=4)
    if "7" in f"{text}":
        s += str(sgl.call(len, text))
    s += sgl.gen("b", max_tokens=4)
"""


def test_a_row_unlike_the_checked_ones_does_not_hold_planning_up(folder: Path, smollm2_dir: Path) -> None:
    (folder / "judge.py").write_text(RARELY)
    numbers = [i for i in range(400) if "7" not in str(i)]
    numbers[3] = 7  # not among the rows that are checked, but among those that are rehearsed
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"Row {i}"}) + "\n" for i in numbers))
    value = plan(folder, smollm2_dir)
    assert value["traced"]["traced"] and value["traced"]["estimated"]
    assert 0 < value["traced"]["calls"] <= len(numbers)


def test_reorder_takes_order_free_columns_only(folder: Path, smollm2_dir: Path) -> None:
    for command in ("plan", "run"):
        done = sglbatch(command, "judge.py", "rows.jsonl", "--model", str(smollm2_dir), "--reorder", "x", cwd=folder)
        assert done.returncode == 2
        assert "error[bad-option]" in done.stderr and "it marks: essay, topic" in done.stderr
