"""Jobs from start to end over a scripted backend: resume, diffs, failures, stops."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglbatch.errors import SglbatchError
from sglbatch.job import commands
from sglbatch.job.config import MaxFailures
from sglbatch.job.manifest import Manifest
from sglbatch.job.records import numbered_files
from sglbatch.job.report import Report
from sglbatch.job.status import export_rows, read_status
from sglbatch.types import Result
from tests.job_world import TWO_GENS, World
from tests.lang_backend import ScriptedBackend
from tests.test_job_lock import HOLD

RAISES = """
import sglbatch as sgl

@sgl.function(temperature=0)
def picky(s, q):
    if q.startswith("bad"):
        raise ValueError("a bad row")
    s += q + sgl.gen("a", max_tokens=4)
"""

IN_BRANCH = """
import sglbatch as sgl

@sgl.function(temperature=0)
def branch(s, q):
    b = s.fork(1)[0]
    b += q + sgl.gen("a", max_tokens=4)
    s["found"] = b["a"]
"""


@pytest.fixture
def world(tmp_path: Path, smollm2_dir: Path) -> World:
    return World(folder=tmp_path, model=smollm2_dir)


def values(world: World) -> list[tuple[Any, Any]]:
    return [(row["thought"], row["answer"]) for row in world.output()]


def test_rows_come_out_in_input_order_and_are_counted(world: World) -> None:
    world.questions(range(30))
    ended = world.run()
    assert ended.exit_code == 0 and not ended.unchanged
    report = ended.report
    assert (report.rows, report.rows_done, report.rows_failed) == (30, 30, 0)
    assert (report.requests, report.calls_reused, report.calls_collapsed) == (60, 0, 0)
    assert set(report.seconds) == {"read", "plan", "load", "run", "write"}
    first = f" {sum(b'Question: number 3?' + bytes([10]) + b'Thought:')}"
    assert world.output()[3]["thought"] == first
    assert len({answer for _, answer in values(world)}) > 10
    assert Report.load(world.paths.report) == report


def test_garbage_is_collected_as_before_once_rows_have_run_or_been_planned(world: World) -> None:
    before = gc.get_threshold()
    world.questions(range(3))
    commands.plan(world.config(output=None), save=None, as_json=False)
    assert gc.get_threshold() == before
    during = []
    world.on_request = lambda _: during.append(gc.get_threshold())
    world.run()
    assert during and before not in during
    assert gc.get_threshold() == before


def test_a_finished_job_run_again_does_nothing(world: World) -> None:
    world.questions(range(5))
    world.run()
    before = world.paths.output.stat()
    ended = world.run(kv_tokens=99)  # the size of the memory is no part of a job's identity
    assert ended.unchanged and ended.exit_code == 0 and world.backend is None
    assert world.paths.output.stat() == before


def test_a_finished_job_with_failures_gives_its_code_again(world: World) -> None:
    world.questions(range(5))
    world.failing = ("number 2?",)
    assert world.run().exit_code == 1
    again = world.run()
    assert again.unchanged and again.exit_code == 1
    assert world.run(max_failures=MaxFailures(value=1)).exit_code == 0
    assert world.run(max_failures=MaxFailures(value=19, percent=True)).exit_code == 1


def test_failed_rows_are_tried_again_under_other_conditions(world: World) -> None:
    world.questions(range(5))
    world.failing = ("number 2?",)
    assert world.run(kv_tokens=64).exit_code == 1
    world.failing = ()
    assert world.run(kv_tokens=64, max_failures=MaxFailures(value=1)).unchanged
    report = world.run(kv_tokens=100).report
    assert (report.exit_code, report.requests, report.calls_reused) == (0, 2, 8)
    assert world.run(kv_tokens=200).unchanged, "nothing failed, so there is nothing to mend"


def test_a_missing_output_is_written_again_without_a_call(world: World) -> None:
    world.questions(range(5))
    world.run()
    before = world.paths.output.read_bytes()
    world.paths.output.unlink()
    report = world.run().report
    assert world.backend is None and report.requests == 0 and report.calls_reused == 10
    assert world.paths.output.read_bytes() == before
    assert world.stderr.getvalue().count("it is written anew") == 1


def test_the_first_row_of_an_error_is_the_first_of_the_input(world: World) -> None:
    world.write_template(RAISES)
    world.failing = ("number 1",)
    world.write_rows([{"q": "number 1?"}, "not JSON", {"q": "bad"}, "nor this"])
    errors = {group.code: (group.first_row, group.count) for group in world.run().report.errors}
    assert errors == {"scripted": (1, 1), "bad-json": (2, 2), "program-error": (3, 1)}


def test_answers_cut_in_a_branch_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the branch is never joined, so that no variable of the row tells."""

    class Cutting(ScriptedBackend):
        def step(self) -> list[Result]:
            return [replace(result, finish_reason="length") for result in super().step()]

    monkeypatch.setattr(world, "_load", lambda model, tokenizer, config: Cutting(tokenizer, lambda *_: " cut"))
    world.write_template(IN_BRANCH)
    world.questions([1, 2])
    report = world.run().report
    assert world.output()[0]["found"] == " cut" and world.output()[0]["_finish"] is None
    assert report.rows_hit_max_tokens == 2 and "2 rows hit max_tokens: their answers are cut" in report.warnings
    world.paths.output.unlink()
    assert world.run().report.rows_hit_max_tokens == 2, "answers from the journal are counted as well"


def test_appended_rows_and_an_edited_last_gen_run_exactly_those_calls(world: World) -> None:
    world.questions(range(40))
    world.run()
    before = values(world)
    world.questions(range(42))
    report = world.run().report
    assert (report.requests, report.calls_reused) == (4, 80)
    assert values(world)[:40] == before

    world.write_template(TWO_GENS.replace("Answer:", "Final answer:"))
    report = world.run().report
    assert (report.requests, report.calls_reused) == (42, 42)
    assert [thought for thought, _ in values(world)[:40]] == [thought for thought, _ in before]
    assert "template: its source changed" in world.stderr.getvalue()


def test_shuffled_and_dropped_rows_make_no_call(world: World) -> None:
    world.questions(range(10))
    world.run()
    before = values(world)
    world.questions([7, 3, 1])
    report = world.run().report
    assert (report.requests, report.rows, report.rows_gone) == (0, 3, 7)
    assert values(world) == [before[7], before[3], before[1]]


def test_equal_rows_share_their_calls_and_keep_their_rows(world: World) -> None:
    world.questions([1, 1, 1])
    report = world.run().report
    assert (report.requests, report.calls_collapsed, report.rows_done) == (2, 4, 3)
    assert len(set(values(world))) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_stop_keeps_what_is_done(world: World, number: int, code: int) -> None:
    world.questions(range(40))

    def stop_at_20(count: int) -> None:
        if count == 20:
            world.stop.receive(number, None)

    world.on_request = stop_at_20
    ended = world.run()
    assert ended.exit_code == code and ended.report.state == "stopped"
    assert not world.paths.output.exists()
    status = read_status(world.paths)
    assert status.state == "stopped" and status.holder is None and status.calls == 24

    world.on_request = None
    report = world.run().report
    assert report.exit_code == 0 and report.requests == 80 - 24 and report.calls_reused == 24


class HoldingBackend(ScriptedBackend):
    """Hands on one of the answers that it has with every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held: list[Result] = []

    def step(self) -> list[Result]:
        self.held += super().step()
        return [self.held.pop()]

    def drain(self, seconds: float) -> list[Result]:
        held, self.held = self.held, []
        return held


def test_a_stop_keeps_what_a_backend_holds_back(world: World) -> None:
    world.questions(range(40))
    world.make_backend = HoldingBackend
    world.on_request = lambda count: world.stop.receive(signal.SIGTERM, None) if count == 20 else None
    assert world.run().exit_code == 143
    assert read_status(world.paths).calls == 24
    world.on_request = None
    report = world.run().report
    assert (report.requests, report.calls_reused, report.rows_done) == (80 - 24, 24, 40)


def test_a_time_limit_is_a_resumable_stop(world: World) -> None:
    world.questions(range(3))
    ended = world.run(time_limit_s=1e-9)
    assert ended.exit_code == 75 and ended.report.state == "stopped"
    assert world.run().report.rows_done == 3


@pytest.mark.parametrize("bad", [{"q": "bad"}, "no json"])
def test_the_breaker_stops_when_the_first_200_rows_fail(world: World, bad: Any) -> None:
    world.write_template(RAISES)
    world.write_rows([bad] * 250 + [{"q": "good"}] * 50)
    ended = world.run()
    assert ended.exit_code == 75 and ended.report.rows_failed == 200
    assert world.backend is None, "the model is never loaded"
    assert "the first 200 rows all failed" in world.stderr.getvalue()


def test_fewer_rows_that_all_fail_are_finished_normally(world: World) -> None:
    world.write_template(RAISES)
    world.write_rows([{"q": "bad"}] * 199)
    ended = world.run()
    assert ended.exit_code == 1 and ended.report.state == "finished" and len(world.output()) == 199
    assert ended.report.errors[0].count == 199


def test_one_good_row_keeps_the_breaker_closed(world: World) -> None:
    world.write_template(RAISES)
    world.write_rows([{"q": "good"}] * 3 + [{"q": "bad"}] * 300)
    ended = world.run(keep=("q",))
    assert ended.exit_code in (1, 75)


def test_failed_rows_alone_are_retried(world: World) -> None:
    world.questions(range(20))
    world.failing = ("number 4?", "number 11?")
    assert world.run(seed=5, keep=("all",)).exit_code == 1
    before = world.output()
    assert [i for i, row in enumerate(before) if row["_error"]] == [4, 11]
    assert before[4]["_error"] == {"code": "scripted", "message": "as the script says", "call": "thought"}

    world.failing = ("number 11?",)
    report = world.retry().report
    assert (report.exit_code, report.rows_kept, report.rows_failed, report.requests) == (1, 18, 1, 3)
    world.failing = ()
    report = world.retry().report
    assert (report.exit_code, report.rows_kept, report.rows_done, report.requests) == (0, 19, 20, 2)
    after = world.output()
    assert [row for i, row in enumerate(after) if i not in (4, 11)] == [
        row for i, row in enumerate(before) if i not in (4, 11)
    ]
    assert all(row["_error"] is None and row["answer"] for row in after)
    assert world.run(seed=5, keep=("all",)).unchanged
    assert world.retry().unchanged


LONG = {"q": "word " * 100}


def test_a_pool_that_holds_no_row_is_an_error_before_the_model_is_loaded(world: World) -> None:
    world.write_rows([LONG, {"q": "again " * 150}])
    with pytest.raises(SglbatchError, match="no row fits a KV pool of 64 tokens") as caught:
        world.run(kv_tokens=64)
    assert caught.value.code == "kv-too-small" and world.backend is None and not world.paths.folder.exists()
    enough = int(str(caught.value.hint).split()[1])
    world.write_rows([{"q": "again " * 150}])
    with pytest.raises(SglbatchError, match="no row fits"):
        world.run(kv_tokens=enough - 1)
    assert world.run(kv_tokens=enough).exit_code == 0


def test_calls_that_do_not_fit_the_pool_are_told_of_with_the_plan(world: World) -> None:
    world.write_rows([{"q": "short"}, LONG])
    world.run(kv_tokens=64)
    assert "warning: 1 call of 2 will fail" in world.stderr.getvalue()
    assert world.num_requests == 4, "the scripted backend has no pool: the rows are tried all the same"


def test_a_template_that_asks_nothing_says_so(world: World) -> None:
    world.write_template('import sglbatch as sgl\n\n@sgl.function\ndef f(s, q):\n    s += "Question: " + q\n')
    world.questions(range(2))
    assert world.run().exit_code == 0
    assert "warning: no row asks the model anything" in world.stderr.getvalue()
    world.write_template(TWO_GENS)
    world.stderr.truncate(0)
    world.run()
    world.paths.output.unlink()
    world.run()
    assert "asks the model" not in world.stderr.getvalue()


def test_a_misspelled_argument_ends_the_job_before_it_starts(world: World) -> None:
    world.write_template(TWO_GENS.replace('"answer", max_tokens=8', '"answer", max_token=8'))
    world.questions(range(3))
    with pytest.raises(SglbatchError) as caught:
        world.run()
    error = caught.value
    assert (error.code, error.message) == ("unknown-argument", "gen has no argument 'max_token'")
    assert (error.where, error.hint) == ("two.py:7", "gen(max_tokens=...)")
    assert world.backend is None and not world.paths.folder.exists()


CANCELS = """
import asyncio
import sglbatch as sgl

@sgl.function(temperature=0)
def picky(s, q):
    if q.startswith("bad"):
        raise asyncio.CancelledError("not an Exception")
    s += q + sgl.gen("a", max_tokens=4)
"""


def test_whatever_a_row_raises_is_that_row_s_error(world: World) -> None:
    world.write_template(CANCELS)
    world.write_rows([{"q": "good"}, {"q": "bad"}])
    assert world.run().exit_code == 1
    assert [row["_error"] and row["_error"]["message"] for row in world.output()] == [
        None,
        "CancelledError: not an Exception (two.py:8)",
    ]


def test_nothing_to_export_says_what_to_do(world: World, tmp_path: Path) -> None:
    world.questions(range(3))
    world.on_request = lambda count: world.stop.receive(signal.SIGTERM, None)
    world.batch = 1
    assert world.run().exit_code == 143
    with pytest.raises(SglbatchError, match="no row is finished yet") as caught:
        export_rows(world.paths, tmp_path / "partial.jsonl")
    assert caught.value.hint == "the same `sglbatch run` command continues it"


@pytest.mark.parametrize("restart", [False, True])
def test_a_file_in_the_place_of_the_folder_is_left_alone(world: World, restart: bool) -> None:
    world.questions(range(2))
    world.paths.folder.write_text("mine")
    with pytest.raises(SglbatchError, match="a file lies where the job's folder has to be") as caught:
        world.run(restart=restart)
    assert caught.value.exit_code == 2 and world.paths.folder.read_text() == "mine"


def test_failed_rows_are_retried_under_other_options(world: World) -> None:
    world.questions(range(3))
    world.failing = ("number 1?",)
    world.run(kv_tokens=64, keep=("q",))
    world.failing = ()
    assert world.retry(kv_tokens=640, device="cpu").exit_code == 0
    config = Manifest.load(world.paths.manifest).config
    assert (config.kv_tokens, config.device, config.keep) == (640, "cpu", ("q",))


def test_retrying_refuses_other_inputs_and_unfinished_jobs(world: World) -> None:
    world.questions(range(4))
    world.failing = ("number 1?",)
    world.run()
    world.write_template(TWO_GENS.replace("Answer", "A"))
    with pytest.raises(SglbatchError) as caught:
        world.retry()
    assert caught.value.code == "inputs-changed"
    world.failing = ()
    world.on_request = lambda count: world.stop.receive(signal.SIGTERM, None) if count == 9 else None
    assert world.run().exit_code == 143
    with pytest.raises(SglbatchError) as caught:
        world.retry()
    assert caught.value.code == "not-finished"


def test_status_and_export_work_while_the_job_runs(world: World, tmp_path: Path) -> None:
    world.questions(range(40))
    seen: dict[str, Any] = {}

    def look(count: int) -> None:
        if count == 75:
            seen["status"] = read_status(world.paths)
            seen["export"] = export_rows(world.paths, tmp_path / "partial.jsonl")

    world.on_request = look
    world.run(keep=("q",))
    status = seen["status"]
    assert status.state == "running" and status.rows == 40 and 0 < status.rows_done < 40
    assert seen["export"].num_rows == status.rows_done
    partial = (tmp_path / "partial.jsonl").read_text().splitlines()
    assert set(partial) < set(world.paths.output.read_text().splitlines())
    assert read_status(world.paths).state == "finished"
    export_rows(world.paths, tmp_path / "whole.jsonl")
    assert (tmp_path / "whole.jsonl").read_text() == world.paths.output.read_text()
    with pytest.raises(SglbatchError, match="own output"):
        export_rows(world.paths, world.paths.output)


def test_retrying_notices_that_finished_rows_are_gone(world: World) -> None:
    world.questions(range(3))
    world.failing = ("number 1?",)
    world.run()
    (file,) = numbered_files(world.paths.rows)
    for spoil in (lambda: file.write_bytes(file.read_bytes().splitlines(keepends=True)[0]), file.unlink):
        spoil()
        with pytest.raises(SglbatchError, match="of 3 finished rows") as caught:
            world.retry()
        assert caught.value.code == "job-damaged"
    world.paths.output.unlink()
    report = world.run().report
    assert (report.rows_failed, report.requests, report.calls_reused) == (1, 1, 4)


def test_restart_moves_the_old_job_aside(world: World) -> None:
    world.questions(range(3))
    world.run()
    old = world.paths.output.read_bytes()
    report = world.run(restart=True).report
    assert (report.requests, report.calls_reused) == (6, 0)
    [aside] = world.folder.glob("out.jsonl.job.old-*")
    assert (aside / "out.jsonl").read_bytes() == old and (aside / "manifest.json").exists()


def test_a_job_that_runs_is_refused(world: World) -> None:
    world.questions(range(3))
    world.run()
    world.questions(range(4))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(world.paths.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        for restart in (False, True):
            with pytest.raises(SglbatchError, match=f"process {process.pid} on .* is running this job"):
                world.run(restart=restart)
        process.kill()
    assert world.run().report.rows_done == 4


def test_a_damaged_call_is_made_again_and_counted(world: World) -> None:
    world.questions(range(10))
    world.run()
    before = values(world)
    [segment] = numbered_files(world.paths.journal)
    lines = segment.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"text":" ', b'"text":"x')
    segment.write_bytes(b"".join(lines)[:-10])
    world.paths.output.unlink()
    report = world.run().report
    assert report.requests == 2 and report.journal["corrupt"] == 1 and report.journal["torn"] == 1
    assert any("1 damaged line left out" in warning for warning in report.warnings)
    assert values(world) == before


def test_mistakes_leave_nothing_behind(world: World) -> None:
    world.write_rows([{"q": "a", "id": 1}, {"q": "b", "id": 1}])
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"id_column": "id"}, "duplicate-id"),
        ({"id_column": "none"}, "unknown-column"),
        ({"keep": ("none",)}, "unknown-column"),
        ({"mapping": {"q": "none"}}, "unknown-column"),
        ({"output": world.folder / "none" / "out.jsonl"}, "cannot-write"),
        ({"output": world.data}, "output-is-input"),
        ({"model": str(world.folder)}, "not-a-model"),
    ]
    files = sorted(world.folder.iterdir())
    for options, code in mistakes:
        with pytest.raises(SglbatchError) as caught:
            world.run(**options)
        assert caught.value.code == code
        assert [p for p in sorted(world.folder.iterdir()) if p.name != "__pycache__"] == files


def test_somebody_elses_output_is_not_overwritten(world: World) -> None:
    world.questions(range(2))
    world.paths.output.write_text("precious")
    with pytest.raises(SglbatchError) as caught:
        world.run()
    assert caught.value.code == "output-exists" and world.paths.output.read_text() == "precious"


def test_kept_columns_and_transcripts(world: World) -> None:
    world.write_rows([{"q": "a", "answer": 1}, "bad line", {"q": "b", "answer": 2}])
    with pytest.raises(SglbatchError) as caught:
        world.run(keep=("all",))
    assert caught.value.code == "column-collision"
    world.run(keep=("all",), keep_prefix="in_", save=("transcript",))
    rows = world.output()
    assert [row["in_answer"] for row in rows] == [1, None, 2]
    assert rows[0]["_transcript"].startswith("Question: a\nThought: ")
    assert rows[1]["_error"]["code"]


def test_ids_name_the_rows(world: World) -> None:
    world.write_rows([{"q": f"number {i}?", "name": f"row {i}"} for i in range(3)])
    world.run(id_column="name")
    store_keys = [line for line in numbered_files(world.paths.rows)[0].read_text().splitlines() if "id:row 1" in line]
    assert len(store_keys) == 1


def test_a_bug_leaves_a_trace_and_a_job_that_goes_on(world: World) -> None:
    world.questions(range(20))

    def explode(count: int) -> None:
        if count == 17:
            raise RuntimeError("boom")

    world.on_request = explode
    with pytest.raises(RuntimeError):
        world.run()
    assert "RuntimeError: boom" in world.paths.crash.read_text()
    world.on_request = None
    report = world.run().report
    assert report.calls_reused == 16 and report.rows_done == 20


def test_the_manifest_says_what_was_done(world: World) -> None:
    world.questions(range(2))
    world.run(temperature=0.5, params={})
    manifest = Manifest.load(world.paths.manifest)
    assert manifest.config.temperature == 0.5 and manifest.finished is not None and manifest.num_rows == 2


def test_a_full_disk_ends_the_run_and_keeps_what_was_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglbatch.job import records

    world.questions(range(20))
    write: Callable[[int, Any], int] = records.os.write

    def full(fd: int, data: Any) -> int:
        if world.num_requests >= 16:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "write", full)
        with pytest.raises(OSError, match="No space left") as caught:
            world.run()
    assert str(world.paths.folder) in str(caught.value.filename), "the user can see which disk"
    report = world.run().report
    assert report.calls_reused >= 8 and report.rows_done == 20
