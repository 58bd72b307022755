"""One run of a job in its folder: plan, load, run, write, report."""

from __future__ import annotations

import importlib.metadata
import platform
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from sglbatch.api_spec.backend import ApiBackend
from sglbatch.data import Row, WriteReport
from sglbatch.errors import SglbatchError
from sglbatch.job.constraints import unenforced_parts
from sglbatch.job.execution import Execution, Surroundings, hit_rate
from sglbatch.job.folder import JobFolder
from sglbatch.job.manifest import Finished, Manifest
from sglbatch.job.paths import JobPaths
from sglbatch.job.planning import journal_lines, plan_job, plan_line, silence_lines, unenforced_lines
from sglbatch.job.pool import pool_lines
from sglbatch.job.prepare import Prepared
from sglbatch.job.records import ReadCounts, numbered_files
from sglbatch.job.report import Report
from sglbatch.job.rows import FinishedRow, RowStore, remove_older
from sglbatch.job.signals import Stopped
from sglbatch.job.tally import Tally
from sglbatch.job.writing import write_rows
from sglbatch.lang.calls import PendingCall
from sglbatch.lang.row_program import RowKey
from sglbatch.planner import Plan, counted
from sglbatch.types import Backend, BackendStats
from sglbatch.version import __version__

_LIBRARIES: Final = ("torch", "transformers", "tokenizers", "pyarrow", "numpy")
_STAGES: Final = ("read", "plan", "load", "run", "write")


class Job:
    """``run`` is called once.

    Args:
        manifest: of this run; saved when planning has succeeded.
    """

    def __init__(self, ready: Prepared, folder: JobFolder, manifest: Manifest, surroundings: Surroundings) -> None:
        self._ready = ready
        self._folder = folder
        self._paths = folder.paths
        self._manifest = manifest
        self._surroundings = surroundings
        self._progress = surroundings.progress
        self._tally = Tally()
        self._started = time.time()
        self._plan: Plan | None = None
        self._unenforced: tuple[str, ...] = ()
        self._rows_gone = 0
        self._write_warnings: tuple[str, ...] = ()
        self._driver = ready.driver(memo=folder.journal)

    def run(self, rows: Iterable[tuple[Row, RowKey | None]], *, num_new: int, kept: Iterable[FinishedRow]) -> Report:
        """Runs ``rows`` (with their keys where known) and writes them and the ``kept`` rows of an earlier run."""
        if self._folder.previous is None:
            self._manifest.save(self._paths.manifest)
        self._store = RowStore.create(self._paths.rows, num_rows=self._manifest.num_rows)
        self._execution = Execution(
            self._ready,
            self._driver,
            self._surroundings,
            on_finished=self._take,
            after_step=self._flush,
            on_planned=self._planned,
            with_transcript="transcript" in self._ready.config.save,
            any_known=len(self._folder.journal) > 0,
        )
        try:
            for row in kept:
                self._tally.keep(row)
                self._store.put(row)
            with self._progress.stage("plan", label="planning", total=num_new):
                self._execution.start_rows(rows)
                self._manifest.save(self._paths.manifest)
                self._execution.prepare()
            self._execution.run()
            report = self._write()
        except Stopped as stopped:
            self._progress.note(f"{stopped.reason}; the same command continues this job")
            report = self._report(state="stopped", exit_code=stopped.exit_code)
        except (SglbatchError, OSError):
            raise
        except Exception:
            self._paths.crash.write_text(traceback.format_exc())
            raise
        finally:
            self._store.close()
            self._execution.close()
        report.save(self._paths.report)
        return report

    # --- stages ---

    def _planned(self, calls: Sequence[PendingCall]) -> None:
        self._plan, summary, _ = plan_job(
            calls, self._ready, errors=self._tally.error_infos, calls_reused=self._driver.calls_reused
        )
        self._plan.save(self._paths.plan)
        self._unenforced = tuple(unenforced_parts(calls, self._ready))
        remarks = [*silence_lines(summary), *pool_lines(calls, self._ready), *unenforced_lines(self._unenforced)]
        for line in [plan_line(summary), *remarks]:
            self._progress.note(line)

    def _write(self) -> Report:
        with self._progress.stage("write", label="writing", total=None):
            assert self._store.num_finished == self._manifest.num_rows, "a row is missing"
            written = write_rows(self._paths.output, self._store, inputs=self._ready.inputs, config=self._ready.config)
            self._store.sync()
            self._rows_gone = self._count_rows_gone()
        self._write_warnings = written.warnings
        exit_code = self._ready.config.max_failures.exit_code(written.num_failed, written.num_rows)
        report = self._report(state="finished", exit_code=exit_code)
        report.save(self._paths.report)
        finish(self._manifest, self._store, written, self._paths)
        return report

    # --- rows and numbers ---

    def _take(self, row: FinishedRow) -> None:
        self._store.put(row)
        self._tally.count(row)
        self._tally.check()

    def _flush(self) -> None:
        self._folder.journal.flush()
        self._store.flush()
        self._folder.heartbeat.check()

    def _count_rows_gone(self) -> int:
        """Rows of the run before that the input no longer has; 0 where the program now reads other columns, since then
        no row is comparable."""
        previous = self._folder.previous
        older = [path for path in numbered_files(self._paths.rows) if path != self._store.path]
        if previous is None or not older or previous.data == self._manifest.data:
            return 0
        before = {row.key for row in RowStore.open(older[-1], num_rows=previous.num_rows) if row.key}
        gone = before - {row.key for row in self._store}
        return len(gone) if len(gone) < len(before) else 0

    def _report(self, *, state: str, exit_code: int) -> Report:
        ready, tally = self._ready, self._tally
        backend = self._execution.backend
        stats = backend.stats() if backend is not None else BackendStats()
        counts = self._folder.journal.counts
        return Report(
            state=state,
            exit_code=exit_code,
            rows=self._manifest.num_rows,
            rows_done=tally.num_done,
            rows_failed=tally.num_failed,
            rows_hit_max_tokens=tally.num_hit_max_tokens,
            rows_invalid=tally.num_invalid,
            unenforced=self._unenforced,
            rows_kept=tally.num_kept,
            rows_gone=self._rows_gone,
            requests=stats.requests,
            calls_reused=self._driver.calls_reused,
            calls_collapsed=self._driver.calls_collapsed,
            prompt_tokens=stats.prompt_tokens,
            computed_prompt_tokens=stats.computed_prompt_tokens,
            unique_prompt_tokens=self._plan.unique_tokens if self._plan else 0,
            recomputed_tokens=stats.recomputed_tokens,
            out_of_memory=stats.out_of_memory,
            hit_rate=round(hit_rate(stats), 6),
            best_hit_rate=round(self._plan.best_hit_rate, 6) if self._plan else 0.0,
            generated_tokens=stats.generated_tokens,
            steps=stats.steps,
            seconds={stage: round(self._progress.seconds.get(stage, 0.0), 3) for stage in _STAGES},
            errors=tally.errors,
            warnings=tuple(self._warnings()),
            notes=dict(self._execution.notes),
            journal=asdict(counts),
            output=str(self._paths.output),
            api=self._api_facts(backend),
            model={"name": ready.model.name, "identity": ready.model.identity, "dtype": ready.config.dtype},
            versions={
                "sglbatch": __version__,
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in _LIBRARIES},
            },
            started=self._started,
        )

    def _api_facts(self, backend: Backend | None) -> dict[str, Any]:
        if not isinstance(backend, ApiBackend):
            return {}
        return {**backend.facts(), "calls_ahead": self._driver.calls_ahead}

    def _warnings(self) -> list[str]:
        return [
            *change_warnings(self._tally, self._execution.notes, self._folder.journal.counts),
            *self._write_warnings,
        ]


def change_warnings(tally: Tally, notes: Mapping[str, int], counts: ReadCounts) -> list[str]:
    """Nothing is cut, changed or left out silently."""
    cut = tally.num_hit_max_tokens
    lines = [f"{counted(cut, 'row')} hit max_tokens: their answers are cut"] if cut else []
    lines += [f"{count:,} {note}" for note, count in sorted(notes.items())]
    return [*lines, *journal_lines(replace(counts, torn=0))]


def finish(manifest: Manifest, store: RowStore, written: WriteReport, paths: JobPaths) -> None:
    """From here on the same command finds nothing to do."""
    finished = Finished(
        rows_file=store.path.name,
        num_rows=written.num_rows,
        num_failed=written.num_failed,
        output_stat=paths.output_stat(),
    )
    replace(manifest, finished=finished).save(paths.manifest)
    remove_older(paths.rows, store.path)
