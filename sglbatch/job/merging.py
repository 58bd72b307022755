"""One finished job out of the finished pieces of a plan."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from sglbatch.data import check_writable
from sglbatch.errors import SglbatchError
from sglbatch.job.execution import hit_rate
from sglbatch.job.folder import JobFolder
from sglbatch.job.heartbeat import Heartbeat
from sglbatch.job.job import change_warnings, finish
from sglbatch.job.lock import JobLock
from sglbatch.job.manifest import Finished, Manifest, differences
from sglbatch.job.paths import JobPaths, sync_folder
from sglbatch.job.prepare import check_no_input
from sglbatch.job.progress import Progress
from sglbatch.job.records import ReadCounts, next_numbered, numbered_files
from sglbatch.job.report import Report
from sglbatch.job.rows import RowStore
from sglbatch.job.runner import Ended, check_no_stranger, finished_rows
from sglbatch.job.shards import Shard, around_number, piece_places
from sglbatch.job.status import kept_inputs
from sglbatch.job.tally import Tally
from sglbatch.job.writing import write_rows
from sglbatch.planner import counted
from sglbatch.types import BackendStats

_SUMS: Final = (
    *("requests", "calls_reused", "calls_collapsed", "prompt_tokens", "computed_prompt_tokens"),
    *("unique_prompt_tokens", "recomputed_tokens", "out_of_memory", "generated_tokens", "steps"),
)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A piece's job on disk."""

    paths: JobPaths
    manifest: Manifest
    shard: Shard

    @property
    def piece(self) -> dict[str, Any]:
        assert self.manifest.piece is not None
        return dict(self.manifest.piece)

    @property
    def finished(self) -> Finished:
        assert self.manifest.finished is not None
        return self.manifest.finished

    @property
    def whole_identity(self) -> dict[str, Any]:
        """Of the job that it is a piece of."""
        return replace(self.manifest, piece=None).identity()


def merge(output: Path, progress: Progress, *, restart: bool) -> Ended:
    """Makes the job of ``output`` from its pieces, which stay as they are.

    Its journal has all their calls, and what they have spent, so that ``run`` and ``retry-failed`` go on from there.

    Raises:
        SglbatchError: ``no-pieces``, ``pieces-missing``, ``pieces-unfinished``, ``pieces-differ``; ``job-exists``; as
            ``write_rows``. ``job-locked`` where a piece runs; ``job-damaged``; ``output-exists``, ``output-is-input``.
    """
    paths = JobPaths(output=output)
    check_writable(output)
    with ExitStack() as stack:
        locks: list[JobLock] = []  # no process may run a piece while it is read
        for part in _parts(output):
            locks.append(JobLock.acquire(part.paths.lock))
            stack.callback(locks[-1].release)
        held = stack.enter_context(Heartbeat([lock.renew for lock in locks]))
        return _merge(_parts(output), paths, progress, held, restart=restart)


def _merge(parts: Sequence[_Part], paths: JobPaths, progress: Progress, held: Heartbeat, *, restart: bool) -> Ended:
    output = paths.output
    first = parts[0].manifest
    max_costs = [part.manifest.config.max_cost for part in parts]
    max_cost = None if None in max_costs else sum(cost for cost in max_costs if cost is not None)
    config = replace(first.config, output=output, shard=None, plan=None, max_cost=max_cost)
    check_no_input(output, config, hint="move the input away, or the pieces")
    check_no_stranger(paths, restart)
    manifest = replace(
        first,
        config=config,
        num_rows=parts[0].piece["num_rows"],
        created=min(part.manifest.created for part in parts),
        finished=None,
        piece=None,
    )
    with ExitStack() as stack:  # what can be wrong is found before an old job is moved aside
        inputs = kept_inputs(manifest, paths, stack)
        places = [piece_places(part.paths, part.manifest) for part in parts]
        rows = [finished_rows(part.paths, part.manifest, part.finished) for part in parts]
        reports = [Report.load(part.paths.report) for part in parts]
        if not np.array_equal(np.sort(np.concatenate(places)), np.arange(manifest.num_rows)):
            raise SglbatchError(
                "pieces-differ",
                "the pieces do not make up the whole: a row is in two of them, or in none",
                where=str(output),
                hint="were they cut by different versions of sglbatch? run them again with one, and with --restart",
            )
        cut_short = paths.folder.is_dir() and not paths.manifest.exists()
        if paths.folder.exists() and not restart and not cut_short:
            raise SglbatchError(
                "job-exists",
                "this output has a job already",
                where=str(output),
                hint="--restart moves it aside and merges anew; nothing is deleted",
            )
        folder = stack.enter_context(JobFolder(paths, restart=restart or cut_short, progress=progress))
        with progress.stage("write", label="merging", total=len(parts)):
            store = RowStore.create(paths.rows, num_rows=manifest.num_rows)
            stack.callback(store.close)
            tally = Tally()
            for part, its_places, its_rows in zip(parts, places, rows, strict=True):
                for row in its_rows:
                    placed = replace(row, index=int(its_places[row.index]))
                    store.put(placed)
                    tally.count(placed)
                _link_files(part.paths.journal, paths.journal)
                _link_files(part.paths.spending, paths.spending)
                folder.heartbeat.check()
                held.check()
                progress.advance()
            written = write_rows(output, store, inputs=inputs, config=config)
            store.sync()
        exit_code = config.max_failures.exit_code(written.num_failed, written.num_rows)
        report = _report(reports, tally, paths=paths, exit_code=exit_code)
        lines = change_warnings(tally, report.notes, ReadCounts(**report.journal))
        report = replace(report, warnings=(f"merged from {counted(len(parts), 'piece')}", *lines, *written.warnings))
        report.save(paths.report)
        finish(manifest, store, written, paths)
        return Ended(report=report, exit_code=report.exit_code)


def _parts(output: Path) -> list[_Part]:
    """All pieces of one plan, in their order."""
    found: list[_Part] = []
    for shard, place in Shard.outputs(output):
        paths = JobPaths(output=place)
        manifest = Manifest.load(paths.manifest)
        if manifest.piece is None or manifest.piece["shard"] != str(shard):
            what = "no piece" if manifest.piece is None else f"piece {manifest.piece['shard']}"
            raise SglbatchError(
                "pieces-differ",
                f"this folder has the name of piece {shard} and in it the job of {what}",
                where=str(paths.folder),
                hint="give it back its own name, or move it away",
            )
        found.append(_Part(paths=paths, manifest=manifest, shard=shard))
    if not found:
        name = "I-of-N".join(around_number(output))
        raise SglbatchError(
            "no-pieces",
            f"there are no pieces of this output ({name}.job)",
            where=str(output),
            hint="make them: sglbatch run ... -o OUT --plan FILE --shard 1/N, and so on to N/N",
        )
    found.sort(key=lambda part: (part.shard.count, part.shard.number))
    _check_same(found, output)
    count = found[0].shard.count
    missing = sorted(set(range(1, count + 1)) - {part.shard.number for part in found})
    if missing:
        raise SglbatchError(
            "pieces-missing",
            f"{len(missing)} of {count} pieces are not there: {_named(missing, count)}",
            where=str(output),
            hint="run them with the same --plan, then merge",
        )
    unfinished = [part.shard.number for part in found if part.manifest.finished is None]
    if unfinished:
        raise SglbatchError(
            "pieces-unfinished",
            f"{len(unfinished)} of {count} pieces have not come to their end: {_named(unfinished, count)}",
            where=str(output),
            hint="the same `sglbatch run` commands continue them; then merge",
        )
    return found


def _check_same(parts: Sequence[_Part], output: Path) -> None:
    first = parts[0]
    for part in parts[1:]:
        different = differences(first.whole_identity, part.whole_identity)
        if part.piece["plan"] != first.piece["plan"]:
            different.insert(0, "another plan")
        if part.shard.count != first.shard.count:
            different.insert(0, f"{first.shard.count} pieces -> {part.shard.count} pieces")
        if different:
            raise SglbatchError(
                "pieces-differ",
                f"{first.paths.folder.name} and {part.paths.folder.name} are no pieces of one job: "
                f"{'; '.join(different)}",
                where=str(output),
                hint="run those again that are older, with the same plan and options, or move their folders away",
            )


def _named(numbers: Sequence[int], count: int) -> str:
    more = ", ..." if len(numbers) > 10 else ""
    return ", ".join(f"{number}/{count}" for number in numbers[:10]) + more


def _link_files(source: Path, target: Path) -> None:
    """Adds the files of a journal, or of what was spent, to another; no process changes an older one's, so they may lie
    in both folders."""
    found = numbered_files(source)
    if not found:
        return
    target.mkdir(exist_ok=True)
    for segment in found:
        path = next_numbered(target)
        try:
            os.link(segment, path)
        except OSError:  # another file system, or one without links
            shutil.copyfile(segment, path)
    sync_folder(target)


def _report(reports: Sequence[Report], tally: Tally, *, paths: JobPaths, exit_code: int) -> Report:
    """The pieces' numbers together; of each stage the seconds of the piece that took longest."""
    sums = {name: sum(getattr(report, name) for report in reports) for name in _SUMS}
    tokens = sums["prompt_tokens"]
    stats = BackendStats(prompt_tokens=tokens, computed_prompt_tokens=sums["computed_prompt_tokens"])
    best = sum(report.best_hit_rate * report.prompt_tokens for report in reports)
    stages = {stage: max(r.seconds.get(stage, 0.0) for r in reports) for stage in reports[0].seconds}
    journal = {name: sum(report.journal.get(name, 0) for report in reports) for name in reports[0].journal}
    notes: Counter[str] = Counter()
    for report in reports:
        notes.update(report.notes)
    return replace(
        reports[0],
        **sums,
        state="finished",
        exit_code=exit_code,
        rows=tally.num_done,
        rows_done=tally.num_done,
        rows_failed=tally.num_failed,
        rows_hit_max_tokens=tally.num_hit_max_tokens,
        rows_invalid=tally.num_invalid,
        rows_kept=0,
        rows_gone=0,
        unenforced=tuple(dict.fromkeys(part for report in reports for part in report.unenforced)),
        hit_rate=round(hit_rate(stats), 6),
        best_hit_rate=round(best / tokens, 6) if tokens else 0.0,
        seconds=stages,
        errors=tally.errors,
        journal=journal,
        notes=dict(notes),
        output=str(paths.output),
        api=_together([report.api for report in reports if report.api]),
        started=min(report.started for report in reports),
    )


def _together(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What endpoints were asked, together: counts and dollars added, unknown where one is; texts are the first's."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each[name] for each in facts if name in each]
        if isinstance(values[0], Mapping):
            found[name] = _together(values)
        elif isinstance(values[0], str):
            found[name] = values[0]
        else:
            found[name] = None if None in values else sum(values)
    return found
