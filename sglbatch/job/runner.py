"""``run`` and ``retry-failed``: a job from its options to its output."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from sglbatch.data import Row
from sglbatch.errors import EXIT_DONE, SglbatchError
from sglbatch.job.config import MAY_MEND, RunConfig
from sglbatch.job.execution import Surroundings
from sglbatch.job.folder import JobFolder
from sglbatch.job.foreseeing import check_kept, check_reorder
from sglbatch.job.job import Job
from sglbatch.job.manifest import Finished, Manifest, changes
from sglbatch.job.paths import JobPaths
from sglbatch.job.planning import change_lines, journal_lines
from sglbatch.job.prepare import Prepared, prepared
from sglbatch.job.report import Report
from sglbatch.job.rows import RowStore
from sglbatch.planner import counted


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command that runs a job ended. ``unchanged``: there was nothing to do."""

    report: Report
    exit_code: int
    unchanged: bool = False


def run_job(config: RunConfig, surroundings: Surroundings, *, restart: bool = False) -> Ended:
    """Runs or continues the job of ``config.output``.

    Raises:
        SglbatchError: before any work is done; or a full disk or a lost lock, and then what was done is kept.
    """
    assert config.output is not None
    paths = JobPaths(output=config.output)
    progress = surroundings.progress
    with ExitStack() as stack:
        with progress.stage("read", label="reading template, data and model"):
            ready = stack.enter_context(prepared(config, tell=progress.note))
            check_no_stranger(paths, restart)
            check_reorder(ready)
            check_kept(ready)
            manifest = ready.manifest()
        folder = stack.enter_context(JobFolder(paths, restart=restart, progress=progress))
        if ready.piece is not None:
            ready.piece.save_rows(paths)
        if folder.previous is not None:
            unchanged = _unchanged(folder.previous, manifest, paths)
            if unchanged is not None:
                return unchanged
            manifest = replace(manifest, created=folder.previous.created)
            if folder.previous.finished is not None and not _output_untouched(folder.previous.finished, paths):
                progress.note("the output is not there, or not as the last run left it: it is written anew")
        for line in [*change_lines(folder.previous, manifest), *journal_lines(folder.journal.counts)]:
            progress.note(line)
        job = Job(ready, folder, manifest, surroundings)
        report = job.run(ready.keyed_rows(), num_new=len(ready.rows), kept=())
        return Ended(report=report, exit_code=report.exit_code)


def retry_job(output: JobPaths, surroundings: Surroundings, *, changed: Mapping[str, Any]) -> Ended:
    """Runs the failed rows of a finished job again; keeps the others as they are.

    Args:
        changed: options that are no part of the job's identity and not as they were.

    Raises:
        SglbatchError: as ``run_job``; ``not-finished``; ``inputs-changed``.
    """
    progress = surroundings.progress
    config = _finished_config(output, changed)
    with ExitStack() as stack:
        with progress.stage("read", label="reading template, data and model"):
            ready = stack.enter_context(prepared(config, tell=progress.note))
            manifest = ready.manifest()
        folder = stack.enter_context(JobFolder(output, restart=False, progress=progress))
        previous = folder.previous
        assert previous is not None and previous.finished is not None
        _check_same(previous, manifest, output)
        before = finished_rows(output, previous, previous.finished)
        failed = [(row.index, row.key) for row in before if row.error is not None]
        if not failed:
            progress.note("no row has failed: nothing to do")
            report = Report.load(output.report)
            return Ended(report=report, exit_code=EXIT_DONE, unchanged=True)
        manifest = replace(manifest, created=previous.created, finished=previous.finished)
        job = Job(ready, folder, manifest, surroundings)
        report = job.run(
            _rows_again(ready, failed), num_new=len(failed), kept=(row for row in before if row.error is None)
        )
        return Ended(report=report, exit_code=report.exit_code)


def check_no_stranger(paths: JobPaths, restart: bool) -> None:
    """An output without a job was not made by us, or its job was moved: not ours to overwrite."""
    if paths.output.exists() and not paths.folder.exists() and not restart:
        raise SglbatchError(
            "output-exists",
            f"this file is there, but no job ({paths.folder.name}) that made it",
            where=str(paths.output),
            hint="choose another output with -o, or move the file away",
        )


def _unchanged(previous: Manifest, new: Manifest, paths: JobPaths) -> Ended | None:
    """The end of the run before, when this one would be the same; None when there is something to do."""
    finished = previous.finished
    if finished is None or previous.identity() != new.identity() or not paths.report.exists():
        return None
    if not _output_untouched(finished, paths) or (finished.num_failed and _may_mend(previous.config, new.config)):
        return None
    exit_code = new.config.max_failures.exit_code(finished.num_failed, finished.num_rows)
    return Ended(report=Report.load(paths.report), exit_code=exit_code, unchanged=True)


def _may_mend(before: RunConfig, now: RunConfig) -> bool:
    """A larger pool, say: rows that failed are worth another try, though no result would change."""
    old, new = before.to_json(), now.to_json()
    return any(old[name] != new[name] for name in MAY_MEND)


def _output_untouched(finished: Finished, paths: JobPaths) -> bool:
    return paths.output.exists() and paths.output_stat() == finished.output_stat


def _finished_config(output: JobPaths, changed: Mapping[str, Any]) -> RunConfig:
    manifest = Manifest.load(output.manifest)
    if manifest.finished is None:
        raise SglbatchError(
            "not-finished",
            "this job has not come to its end yet",
            where=str(output.output),
            hint="run the same `sglbatch run` command again: it continues, and tries failed rows again as well",
        )
    if "-" in manifest.config.data and sys.stdin.isatty():
        raise SglbatchError(
            "stdin-gone",
            "this job's data came from standard input",
            where=str(output.output),
            hint="pipe the same data in again: sglbatch retry-failed OUT < data.jsonl",
        )
    return replace(manifest.config, output=output.output, **changed)


def _check_same(previous: Manifest, new: Manifest, output: JobPaths) -> None:
    if previous.identity() != new.identity():
        raise SglbatchError(
            "inputs-changed",
            "the finished rows were made from something else: " + "; ".join(changes(previous, new)),
            where=str(output.output),
            hint="run the `sglbatch run` command again: calls that are the same are not repeated",
        )


def finished_rows(output: JobPaths, previous: Manifest, finished: Finished) -> RowStore:
    """All rows of a finished job. Raises SglbatchError: ``job-damaged``."""
    path = output.rows / finished.rows_file
    store = RowStore.open(path, num_rows=previous.num_rows) if path.exists() else None
    if store is None or store.num_finished < finished.num_rows:
        raise SglbatchError(
            "job-damaged",
            f"of {counted(finished.num_rows, 'finished row')} {store.num_finished if store else 0:,} can still be read",
            where=str(path),
            hint="move the output away and run the `sglbatch run` command again: it repeats no call of the journal",
        )
    return store


def _rows_again(ready: Prepared, failed: list[tuple[int, str]]) -> Iterator[tuple[Row, str | None]]:
    for index, key in failed:
        yield ready.rows.get(index), key
