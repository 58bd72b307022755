"""`--save logprobs` through a whole job with the real engine."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sglbatch.job.backends import load_backend
from sglbatch.job.config import RunConfig
from sglbatch.job.execution import Surroundings
from sglbatch.job.progress import Progress
from sglbatch.job.rows import FinishedRow
from sglbatch.job.runner import run_job
from sglbatch.job.signals import StopRequest
from sglbatch.lang.meta_info import kept_logprobs
from sglbatch.lang.variables import Variable
from sglbatch.types import VarType

END = "<|im_end|>"
TEMPLATE = """
import sglbatch as sgl

@sgl.function(temperature=0)
def all_kinds(s, q):
    s += "Question: " + q + "\\nScience? " + sgl.select("science", ["yes", "no"])
    s += "\\nAnswer:" + sgl.gen("answer", max_tokens=4)
    s += "\\nYear:" + sgl.gen("year", regex=" [12][0-9]{3}", max_tokens=8)
    s += "\\nTwo:" + sgl.gen("two", max_tokens=2, n=2, temperature=1)
    s += "\\nNone:" + sgl.gen("none", max_tokens=2, return_logprob=False)
    s += "\\nLength:" + sgl.select("length", ["short", "long"], choices_method=sgl.token_length_normalized)
    s["own"] = "no answer"
"""


def run(folder: Path, save: tuple[str, ...]) -> list[dict[str, Any]]:
    (folder / "all_kinds.py").write_text(TEMPLATE)
    (folder / "data.jsonl").write_text('{"q": "Why is the sky blue?"}\n{"q": "What is two and two?"}\n{"q": null}\n')
    output = folder / f"{'-'.join(save) or 'plain'}.parquet"
    config = RunConfig(
        template=folder / "all_kinds.py",
        data=(str(folder / "data.jsonl"),),
        model="smollm2-135m",
        output=output,
        save=save,
        device="cpu",
    )
    run_job(config, Surroundings(progress=Progress(io.StringIO()), stop=StopRequest(), load_backend=load_backend))
    rows: list[dict[str, Any]] = pq.read_table(output).to_pylist()
    return rows


@pytest.mark.usefixtures("smollm2_dir")
def test_every_answer_comes_with_its_log_probabilities(tmp_path: Path) -> None:
    rows = run(tmp_path, ("transcript", "logprobs"))
    assert rows[2]["_logprobs"] is None and rows[2]["_error"] is not None
    for row in rows[:2]:
        found = row["_logprobs"]
        assert sorted(found) == ["answer", "length", "science", "two", "year"]
        for name in ("answer", "year"):
            text = "".join(entry["text"] for entry in found[name])
            assert text.removesuffix(END) == row[name], "the token that ended it is among them"
        two = ["".join(entry["text"] for entry in one).removesuffix(END) for one in found["two"]]
        assert two == row["two"]
        assert [entry["text"] for entry in found["science"]] == ["yes", "no"]
        assert sum(math.exp(entry["logprob"]) for entry in found["science"]) == pytest.approx(1, abs=1e-6)
        assert max(found["science"], key=lambda entry: entry["logprob"])["text"] == row["science"]
        assert max(found["length"], key=lambda entry: entry["logprob"])["text"] == row["length"]
        assert all(entry["logprob"] <= 0 for name in ("answer", "year") for entry in found[name])
    for row, plain in zip(rows, run(tmp_path, ()), strict=True):
        assert {name: row[name] for name in plain} == plain, "they change no answer"


def test_tokens_that_are_known_by_their_text() -> None:
    meta = {"output_token_logprobs": [(-0.5, None, "a"), (-1.5, None, "b")]}
    variable = Variable(value="ab", var_type=VarType(kind="text"), meta=meta, generated=True)
    assert kept_logprobs(variable, str) == [{"text": "a", "logprob": -0.5}, {"text": "b", "logprob": -1.5}]
    assert kept_logprobs(Variable(value="ab", var_type=VarType(kind="text"), generated=True), str) is None


def test_a_row_keeps_them_on_disk() -> None:
    row = FinishedRow(index=3, key="k", logprobs={"a": [{"text": "x", "logprob": -0.25}]})
    assert FinishedRow.from_json(row.to_json()) == row and "logprobs" not in FinishedRow(index=0, key="").to_json()
