"""Looking at a job from outside, also while another process runs it: ``status`` and ``export``."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglbatch.data import Rows, WriteReport, check_writable, open_rows
from sglbatch.errors import SglbatchError
from sglbatch.job.journal import Journal
from sglbatch.job.lock import Holder, read_holder
from sglbatch.job.manifest import Manifest
from sglbatch.job.paths import JobPaths
from sglbatch.job.records import numbered_files
from sglbatch.job.rows import RowStore
from sglbatch.job.shards import piece_places
from sglbatch.job.writing import write_rows


@dataclass(frozen=True, kw_only=True)
class Status:
    """How far a job is.

    Args:
        state: running, finished, or stopped (the same command continues it).
        calls: recorded in the journal.
    """

    state: str
    holder: Holder | None
    rows: int
    rows_done: int
    rows_failed: int
    calls: int
    updated: float

    def to_json(self) -> dict[str, Any]:
        held_by = {"host": self.holder.host, "pid": self.holder.pid} if self.holder else None
        return {**vars(self), "holder": held_by}

    def render(self) -> str:
        who = f" by {self.holder.describe()}" if self.holder else ""
        lines = [
            f"{'state':<10}{self.state}{who}",
            f"{'rows':<10}{self.rows_done:,} of {self.rows:,} done, {self.rows_failed:,} failed",
            f"{'calls':<10}{self.calls:,} recorded",
        ]
        if self.next_step and self.state != "running":
            lines.append(f"{'next':<10}{self.next_step}")
        return "\n".join(lines)

    @property
    def next_step(self) -> str:
        """What brings the job on; "" when nothing is left to do."""
        if self.state == "running":
            return "wait for it, or export again later"
        if self.state == "stopped":
            return "the same `sglbatch run` command continues it"
        return "`sglbatch retry-failed` runs the failed rows again" if self.rows_failed else ""


def read_status(paths: JobPaths) -> Status:
    """Reads the job's files and changes nothing."""
    manifest = Manifest.load(paths.manifest)
    holder = _live_holder(paths)
    store = _rows(paths, manifest, holder)
    journal = Journal(paths.journal)
    num_calls = len(journal)
    journal.close()
    return Status(
        state="running" if holder else "finished" if manifest.finished else "stopped",
        holder=holder,
        rows=manifest.num_rows,
        rows_done=store.num_finished if store else 0,
        rows_failed=sum(row.error is not None for row in store) if store else 0,
        calls=num_calls,
        updated=manifest.updated,
    )


def export_rows(paths: JobPaths, target: Path) -> WriteReport:
    """Writes the rows finished so far to ``target``.

    Raises:
        SglbatchError: ``nothing-finished``; ``target-is-output``; ``cannot-write``; where kept columns are wanted
            also ``stdin-gone`` and ``data-changed`` (the input is no longer what it was).
    """
    check_writable(target)
    if target.resolve() == paths.output.resolve():
        raise SglbatchError(
            "target-is-output", "this is the job's own output", where=str(target), hint="name another file with -o"
        )
    manifest = Manifest.load(paths.manifest)
    store = _rows(paths, manifest, _live_holder(paths))
    if store is None or not store.num_finished:
        hint = read_status(paths).next_step
        raise SglbatchError("nothing-finished", "no row is finished yet", where=str(paths.output), hint=hint)
    with ExitStack() as stack:
        return write_rows(target, store, inputs=kept_inputs(manifest, paths, stack), config=manifest.config)


def kept_inputs(manifest: Manifest, paths: JobPaths, stack: ExitStack) -> Rows | None:
    """The job's input, for its kept columns; None where it keeps none.

    Raises:
        SglbatchError: ``stdin-gone``, ``data-changed``; of a piece ``job-damaged``.
    """
    config = manifest.config
    if not config.keep:
        return None
    if "-" in config.data:
        raise SglbatchError(
            "stdin-gone",
            "the kept columns came from standard input, which cannot be read again",
            where=str(paths.output),
            hint="wait for the job's own output, or run it without --keep",
        )
    inputs = stack.enter_context(open_rows(config.data, limit=config.limit))
    if inputs.identity != manifest.data:
        raise SglbatchError(
            "data-changed",
            "the kept columns cannot be read: the input is not what it was when the job was started",
            where=str(paths.output),
            hint="put the input back as it was, or run the `sglbatch run` command again",
        )
    if manifest.piece is None:
        return inputs
    return inputs.select(piece_places(paths, manifest).tolist())


def _live_holder(paths: JobPaths) -> Holder | None:
    holder = read_holder(paths.lock)
    return holder if holder is not None and holder.is_live(time.time()) else None


def _rows(paths: JobPaths, manifest: Manifest, holder: Holder | None) -> RowStore | None:
    """The rows of the run that is going on, or of the last one that came to its end, or of the last one."""
    files = numbered_files(paths.rows)
    if not files:
        return None
    path = paths.rows / manifest.finished.rows_file if manifest.finished and not holder else files[-1]
    return RowStore.open(path, num_rows=manifest.num_rows)
