"""What a user sees of a run, and the thread beside it."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import pytest

from sglbatch.errors import SglbatchError
from sglbatch.job.heartbeat import Heartbeat
from sglbatch.job.progress import Progress
from sglbatch.job.report import ErrorGroup, Report
from sglbatch.job.signals import Stopped, StopRequest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_stages_and_now_and_then_a_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream, line_every_s=0.05)
    with progress.stage("run", label="running", total=3):
        progress.advance(1)
        time.sleep(0.06)
        progress.advance(1, hits="50.0%")
        progress.advance(1)
    assert stream.getvalue() == "running ...\nrunning: 2 of 3 rows, hits 50.0%\n"
    assert progress.seconds["run"] >= 0.06


def test_on_a_terminal_a_bar_with_notes_above_it() -> None:
    stream = Terminal()
    progress = Progress(stream)
    with progress.stage("load", label="loading the model"):
        progress.note("a note")
    with progress.stage("run", label="running", total=3):
        progress.advance(2, hits="50.0%")
        progress.note("bell \x07")
    shown = stream.getvalue()
    assert shown.startswith("loading the model ...\na note\n")
    assert "running" in shown and "bell \\x07\n" in shown and "\x07" not in shown


def test_stages_of_one_name_add_up() -> None:
    progress = Progress(io.StringIO())
    for _ in range(2):
        with progress.stage("plan", label="planning"):
            time.sleep(0.01)
    assert progress.seconds["plan"] >= 0.02


def test_the_heartbeat_beats_and_tells_of_its_failure() -> None:
    beaten = threading.Event()
    failed = threading.Event()

    def duty() -> None:
        if beaten.is_set():
            failed.set()
            raise OSError(28, "No space left on device")
        beaten.set()

    with Heartbeat([duty], period_s=0.01) as heartbeat:
        assert beaten.wait(5)
        assert failed.wait(5)
        deadline = time.monotonic() + 5
        with pytest.raises(OSError, match="No space"):
            while time.monotonic() < deadline:
                heartbeat.check()


def test_a_time_limit_stops() -> None:
    StopRequest(time_limit_s=100).check()
    stop = StopRequest(time_limit_s=0.001)
    time.sleep(0.002)
    with pytest.raises(Stopped) as caught:
        stop.check()
    assert caught.value.exit_code == 75


def test_the_report_for_people_escapes_what_comes_from_data() -> None:
    report = Report(
        state="stopped",
        exit_code=75,
        rows=5,
        rows_done=2,
        rows_failed=1,
        prompt_tokens=100,
        computed_prompt_tokens=25,
        hit_rate=0.75,
        errors=(ErrorGroup(code="program-error", count=1, first_row=2, sample="red \x1b[31m"),),
        warnings=("1 rows hit max_tokens",),
        seconds={"run": 2.0},
    )
    text = report.render()
    assert "2 of 5 done, 1 failed" in text and "hit rate 75.0%" in text
    assert "1 x program-error, first in row 2: red \\x1b[31m" in text and "\x1b" not in text
    assert "the same command continues it" in text


def test_a_report_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for content, code in ((None, "no-report"), ("{", "job-damaged"), ('{"errors": [], "warnings": []}', "job-damaged")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(SglbatchError) as caught:
            Report.load(path)
        assert caught.value.code == code
