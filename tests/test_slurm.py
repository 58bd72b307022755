"""The array script of docs/slurm.md on a real Slurm, one of its pieces interrupted and put back into the queue."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 420
"""Slurm waits for two minutes before it starts a job again."""


def has_slurm() -> bool:
    if shutil.which("sbatch") is None:
        return False
    return subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=20, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_slurm(), reason="needs a Slurm that answers"),
    pytest.mark.timeout(TIMEOUT_S + 120),
]

TEMPLATE = """
import sglbatch as sgl

@sgl.function(temperature=0.8)
def triage(s, ticket):
    s += "Ticket: " + ticket + "\\nUrgency: " + sgl.select("urgency", ["low", "normal", "high"])
    s += "\\nReason:" + sgl.gen("reason", max_tokens=24)
"""


def array_script() -> str:
    """The documented one, for a small model and two pieces."""
    text = (ROOT / "docs/slurm.md").read_text()
    (script,) = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    script = re.sub(r"#SBATCH --(gres|time|signal)=.*\n", "", script)
    changed = script.replace("llama-7b", "smollm2-135m").replace("tickets.parquet", "tickets.jsonl")
    return changed.replace("1-8", "1-2").replace("/8", "/2")


def test_an_array_whose_piece_is_put_back_makes_the_whole(tmp_path: Path, smollm2_dir: Path) -> None:
    (tmp_path / "triage.py").write_text(TEMPLATE)
    tickets = [json.dumps({"ticket": f"number {i} is broken"}) for i in range(240)]
    (tmp_path / "tickets.jsonl").write_text("\n".join(tickets))
    (tmp_path / "array.sh").write_text(array_script())
    command = tmp_path / "bin/sglbatch"
    command.parent.mkdir()
    command.write_text(f'#!/bin/bash\nexec {sys.executable} -m sglbatch "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        return done.stdout.strip()

    def wait_for(what: str, seconds: float = TIMEOUT_S) -> None:
        end = time.monotonic() + seconds
        while not (tmp_path / what).exists():
            assert time.monotonic() < end, f"{what} is not there: {run('squeue')}"
            time.sleep(0.2)

    job = ("triage.py", "tickets.jsonl", "--model", "smollm2-135m")
    run("sglbatch", "plan", *job, "--save", "job.plan")
    array = run("sbatch", "--parsable", "-n1", "array.sh")
    last = run("sbatch", "--parsable", "-n1", f"--dependency=afterok:{array}", "--wrap", "sglbatch merge out.parquet")
    wait_for("out.shard-1-of-2.parquet.job/journal/000001.jsonl")
    run("scancel", "--signal=USR1", "--batch", f"{array}_1")
    run("sglbatch", "run", *job, "-o", "alone.parquet")
    wait_for("out.parquet.job/report.json")
    while run("squeue", "--noheader", "--jobs", last):
        time.sleep(0.5)
    assert "stopped by SIGUSR1" in (tmp_path / f"slurm-{array}_1.out").read_text()
    alone, merged = (tmp_path / f"{name}.parquet" for name in ("alone", "out"))
    assert run("sglbatch", "run", *job, "-o", "out.parquet").startswith("rows      240 of 240 done, 0 failed")
    assert rows(merged) == rows(alone)


def rows(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = pq.read_table(path).to_pylist()
    return found
