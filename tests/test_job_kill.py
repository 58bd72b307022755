"""Killed at any moment, the same command continues: equal values, and no journaled call made again."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sglbatch.job.journal import Journal
from sglbatch.job.paths import JobPaths
from sglbatch.job.report import Report
from tests.job_world import World

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "sglbatch"]

CHAIN = """
import sglbatch as sgl

@sgl.function(temperature=0)
def chain(s, word):
    s += "Write about " + word + ":" + sgl.gen("first", max_tokens=6)
    s += "\\nMore:" + sgl.gen("second", max_tokens=6)
    s += "\\nIs it long? " + sgl.select("long", choices=["yes", "no"])
"""
WORDS = ["rain", "iron", "bread", "glass", "music", "horses", "tea", "stone", "paper", "light"]


def num_journaled(paths: JobPaths) -> int:
    journal = Journal(paths.journal)
    journal.close()
    return len(journal)


def check_resumed(paths: JobPaths, *, journaled: int, total: int) -> None:
    """The run that just ended took every recorded call from the journal and made all the others."""
    report = Report.load(paths.report)
    assert report.state == "finished" and report.exit_code == 0
    assert (report.calls_reused, report.requests) == (journaled, total - journaled)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sigkill_at_random_moments(tmp_path: Path, smollm2_dir: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    whole, killed = (World(folder=folder, model=smollm2_dir) for folder in folders)
    for world in (whole, killed):
        world.questions(range(30))
    whole.run()

    moments = random.Random(7)
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-m", "tests.job_process", str(killed.folder), str(smollm2_dir)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            for _ in range(moments.randint(4, 12)):  # from the fourth on, a step of three has been recorded
                assert process.stdout.readline()
            time.sleep(moments.uniform(0, 0.06))
            process.kill()
    journaled = num_journaled(killed.paths)
    assert 0 < journaled < 60, "the moments are such that some calls are done and some are not"
    killed.run()
    check_resumed(killed.paths, journaled=journaled, total=60)
    assert killed.output() == whole.output()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_signals_end_a_process_with_their_code(
    tmp_path: Path, smollm2_dir: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "t.py").write_text(CHAIN.replace("s +=", "import time; time.sleep(0.2); s +=", 1))
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"word": str(i)}) + "\n" for i in range(300)))
    with subprocess.Popen(
        [*COMMAND, "run", "t.py", "d.jsonl", "--model", str(smollm2_dir), "-o", "out.jsonl"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stderr is not None
        while "planning" not in process.stderr.readline():
            pass
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        assert f"stopped by {number.name}" in process.stderr.read()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sigkill_at_20_random_moments_with_the_real_model(tmp_path: Path, smollm2_dir: Path) -> None:
    def start(name: str) -> subprocess.Popen[bytes]:
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            (folder / "t.py").write_text(CHAIN)
            words = [f"{word} and {other}" for word in WORDS for other in WORDS]
            (folder / "d.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in words))
        arguments = ["run", "t.py", "d.jsonl", "--model", str(smollm2_dir), "-o", "out.jsonl"]
        return subprocess.Popen(
            [*COMMAND, *arguments, "--max-batch-tokens", "64"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    begin = time.monotonic()
    assert start("whole").wait() == 0
    duration = time.monotonic() - begin
    total = num_journaled(JobPaths(output=tmp_path / "whole" / "out.jsonl"))

    moments = random.Random(11)
    num_killed = num_finished = 0
    while num_killed < 20 or not num_finished:
        paths = JobPaths(output=tmp_path / f"killed-{num_finished}" / "out.jsonl")
        if paths.report.exists() and Report.load(paths.report).state == "finished":  # killed on its way out
            assert rows(paths.output) == rows(tmp_path / "whole" / "out.jsonl")
            num_finished += 1
            continue
        journaled = num_journaled(paths)
        process = start(paths.output.parent.name)
        try:
            assert process.wait(timeout=None if num_killed >= 20 else moments.uniform(0.3, 0.8) * duration) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            num_killed += 1
            continue
        check_resumed(paths, journaled=journaled, total=total)
        assert rows(paths.output) == rows(tmp_path / "whole" / "out.jsonl")
        num_finished += 1
