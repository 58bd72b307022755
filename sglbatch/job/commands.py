"""What each command of the command line does: run it, print it, give its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TextIO

from sglbatch.api_spec import ApiModel
from sglbatch.errors import EXIT_DONE, EXIT_FAILED_ROWS, SglbatchError
from sglbatch.job.backends import load_backend
from sglbatch.job.config import MaxFailures, RunConfig, default_output
from sglbatch.job.constraints import check_constraints, unenforced_parts
from sglbatch.job.costing import estimate_cost
from sglbatch.job.execution import Execution, Surroundings
from sglbatch.job.foreseeing import check_reorder, foresee, graph_of, suggest
from sglbatch.job.journal import Journal
from sglbatch.job.manifest import Manifest
from sglbatch.job.merging import merge as merge_pieces
from sglbatch.job.paths import JobPaths, job_of
from sglbatch.job.planning import change_lines, journal_lines, plan_job, plan_line, silence_lines, unenforced_lines
from sglbatch.job.prepare import check_no_input, check_output, prepared
from sglbatch.job.progress import Progress
from sglbatch.job.report import Report
from sglbatch.job.rows import FinishedRow
from sglbatch.job.runner import Ended, retry_job, run_job
from sglbatch.job.shards import SavedPlan, Shard
from sglbatch.job.signals import Stopped, StopRequest, listening
from sglbatch.job.status import export_rows, read_status
from sglbatch.job.tally import Tally
from sglbatch.planner import counted, escape_controls, render_summary

ANSWER_MARKS: Final = ("\u27e6", "\u27e7")
"""White square brackets, which prompts hardly ever have."""


def run(config: RunConfig, *, restart: bool, as_json: bool) -> int:
    """Runs or continues a job and prints its report."""
    if config.output is None:
        config = replace(config, output=default_output(config.template, config.data))
    if config.shard is not None and config.output is not None:
        check_output(config.output, config)  # which `merge` will write
        config = replace(config, output=Shard.parse(config.shard).output(config.output))
    stop = StopRequest(time_limit_s=config.time_limit_s)
    with listening(stop), _printed_aside():
        ended = run_job(config, _surroundings(stop), restart=restart)
    return _print_ended(ended, as_json)


def run_batch(config: RunConfig, *, restart: bool) -> int:
    """Runs or continues a Batch API file."""
    from sglbatch.job.openai_batch.command import run_batch as run_file

    stop = StopRequest(time_limit_s=config.time_limit_s)
    with listening(stop):
        return run_file(config, _surroundings(stop), restart=restart)


def merge(output: Path, *, restart: bool, as_json: bool) -> int:
    """Makes one job of all pieces of a plan and prints its report."""
    return _print_ended(merge_pieces(output, Progress(sys.stderr), restart=restart), as_json)


def retry_failed(output: Path, *, changed: Mapping[str, Any], max_failures: str | None, as_json: bool) -> int:
    """Runs the failed rows of a finished job again and prints the report.

    Args:
        changed: options of ``MAY_MEND`` that are other than before.
    """
    allowed = {} if max_failures is None else {"max_failures": MaxFailures.parse(max_failures)}
    stop = StopRequest()
    with listening(stop), _printed_aside():
        ended = retry_job(job_of(output), _surroundings(stop), changed={**changed, **allowed})
    return _print_ended(ended, as_json)


def show(config: RunConfig, *, count: int) -> int:
    """Prints ``count`` rows' whole texts, markup and answers included; leaves nothing behind."""
    if count < 1:
        raise SglbatchError("bad-option", f"--show must be at least 1, not {count}", hint="for example --show 2")
    if config.shard is not None:
        raise SglbatchError(
            "bad-option",
            "--show answers the first rows of the data, not of a piece",
            hint="leave --shard and --plan out",
        )
    config = replace(config, output=None, limit=min(count, config.limit or count))
    stop = StopRequest()
    with listening(stop), _printed_aside():
        try:
            rows = _answer(config, _surroundings(stop))
        except Stopped as stopped:
            print(stopped.reason, file=sys.stderr)
            return stopped.exit_code
    for row in sorted(rows, key=lambda row: row.index):
        print(f"--- row {row.index + 1}, its answers in {ANSWER_MARKS[0]}{ANSWER_MARKS[1]} " + "-" * 40)
        print(_escaped(_marked(row)))
        if row.error is not None:
            print(f"error[{row.error.code}]: {_escaped(row.error.message)}")
    return EXIT_DONE


def _marked(row: FinishedRow) -> str:
    """The transcript with a mark before and behind every answer."""
    text = row.transcript or ""
    for first, end in reversed(row.answer_spans):
        text = text[:first] + ANSWER_MARKS[0] + text[first:end] + ANSWER_MARKS[1] + text[end:]
    return text


def plan(config: RunConfig, *, save: Path | None, as_json: bool, graph: str | None = None) -> int:
    """Plans as ``run`` does, against the existing job if there is one, and makes no job; 1 where every row fails.

    Args:
        save: where the plan goes; it is then of all first calls, whatever is answered already, since pieces have
            journals of their own, and get the same rows as before where the first calls are the same.
        graph: "text", "dot" or "json": print the program's graph in this form, and nothing else.
    """
    if graph is not None:
        return _print_graph(config, graph)
    progress = Progress(sys.stderr)
    if save is not None:
        check_no_input(save, config, hint="choose another file for --save")
    paths = _existing_job(config) if save is None else None
    tally = Tally()
    with _printed_aside(), prepared(replace(config, output=None), tell=progress.note) as ready:
        check_reorder(ready)
        journal = Journal(paths.journal) if paths else None
        driver = ready.driver(memo=journal)
        execution = Execution(
            ready,
            driver,
            Surroundings(progress=progress, stop=StopRequest(), load_backend=load_backend),
            on_finished=tally.count,
            after_step=lambda: None,
            with_transcript=False,
        )
        with progress.stage("plan", label="planning", total=len(ready.rows)):
            calls = execution.plan_rows((row, None) for row in ready.rows)
            check_constraints(calls, ready)
            unenforced = unenforced_parts(calls, ready)
            made, summary, tree = plan_job(
                calls,
                ready,
                errors=tally.error_infos,
                calls_reused=driver.calls_reused,
                rows_outside=driver.num_waiting_outside,
            )
            cost = estimate_cost(ready, calls, journal) if isinstance(ready.model, ApiModel) else None
            foresight = foresee(ready)
            movement = suggest(ready)
        lines = journal_lines(journal.counts) if journal else []
        if paths is not None and paths.manifest.is_file():
            lines += change_lines(Manifest.load(paths.manifest), ready.manifest())
        for line in silence_lines(summary):
            progress.note(line)
        if save is not None:
            SavedPlan.of(made, calls, ready.rows, binding=ready.binding, manifest=ready.manifest()).save(save)
    if as_json:
        value = {**summary.to_json(), "tree": tree.to_json(), "job": str(paths.output) if paths else None}
        value |= {"traced": foresight.to_json(), "movement": None if movement is None else movement.to_json()}
        value |= {"replayed": ready.scripts.to_json()}
        value |= {"errors": [asdict(group) for group in tally.errors], "unenforced": unenforced}
        _print_json({**value, "changes": lines, **({"cost": cost.to_json()} if cost else {})})
    elif cost is not None:
        before, after = map(escape_controls, lines), map(escape_controls, unenforced_lines(unenforced))
        print("\n".join([*before, plan_line(summary, with_tokens=False), *after, cost.render()]))
    else:
        behind = []
        if summary.num_requests or summary.rows_outside:
            behind = [
                *unenforced_lines(unenforced),
                *foresight.lines(),
                *ready.scripts.lines(),
                *([] if movement is None else movement.lines()),
            ]
        errors = [group.render() for group in tally.errors]
        before, after = map(escape_controls, lines), map(escape_controls, behind)
        print("\n".join([*before, render_summary(summary, tree), *after, *errors]))
    return EXIT_FAILED_ROWS if summary.num_failed_rows == summary.num_rows else EXIT_DONE


def _print_graph(config: RunConfig, form: str) -> int:
    """Prints the template's graph, as the model's chat template makes it."""
    with _printed_aside(), prepared(replace(config, output=None), tell=Progress(sys.stderr).note) as ready:
        check_reorder(ready)
        found = graph_of(ready)
    if form == "json":
        _print_json(found.to_json())
    elif form in ("text", "dot"):
        print(found.to_dot() if form == "dot" else _escaped(str(found)))
    else:
        raise SglbatchError("bad-option", f"--graph knows no {form!r}", hint="choose from: text, dot, json")
    return EXIT_DONE


def status(output: Path, *, as_json: bool) -> int:
    """Prints how far a job is."""
    found = read_status(job_of(output))
    _print_json(found.to_json()) if as_json else print(found.render())
    return EXIT_DONE


def export(output: Path, *, target: Path) -> int:
    """Writes the rows finished so far to ``target``."""
    written = export_rows(job_of(output), target)
    for warning in written.warnings:
        print(f"warning: {escape_controls(warning)}", file=sys.stderr)
    print(f"{counted(written.num_rows, 'finished row')} ({written.num_failed:,} failed) in {target}")
    now = read_status(job_of(output))
    if now.state != "finished":
        print(f"{counted(now.rows - written.num_rows, 'row')} still to come: {now.next_step}", file=sys.stderr)
    return EXIT_DONE


def report(output: Path, *, as_json: bool) -> int:
    """Prints the report of a job's latest run."""
    found = Report.load(job_of(output).report)
    _print_json(found.to_json()) if as_json else print(found.render())
    return EXIT_DONE


def doctor() -> int:
    """Prints the machine's state, a line for each thing; imports torch."""
    from sglbatch.engine.doctor import examine
    from sglbatch.models.cache import cache_dir

    for name, state in [*examine(), ("model cache", str(cache_dir()))]:
        print(f"{name:14} {state}")
    return EXIT_DONE


def models() -> int:
    """Prints a table of model names."""
    from sglbatch.models import list_models

    rows = [("NAME", "IS", "CACHED")]
    rows += [(entry.name, entry.resolves_to, str(entry.path or "no")) for entry in list_models()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, resolves_to, cached in rows:
        print(f"{name:<{widths[0]}}  {resolves_to:<{widths[1]}}  {cached}")
    return EXIT_DONE


def _surroundings(stop: StopRequest) -> Surroundings:
    return Surroundings(progress=Progress(sys.stderr), stop=stop, load_backend=load_backend)


def _answer(config: RunConfig, surroundings: Surroundings) -> list[FinishedRow]:
    """Runs the rows without a job."""
    progress = surroundings.progress
    rows: list[FinishedRow] = []
    with prepared(config, tell=progress.note) as ready:
        check_reorder(ready)
        execution = Execution(
            ready, ready.driver(), surroundings, on_finished=rows.append, after_step=lambda: None, with_transcript=True
        )
        with execution:
            execution.start_rows((row, None) for row in ready.rows)
            execution.prepare()
            execution.run()
    return rows


def _existing_job(config: RunConfig) -> JobPaths | None:
    """The job that a run with these options would continue; None when there is none, or no name for its output."""
    try:
        paths = JobPaths(output=config.output or default_output(config.template, config.data))
    except SglbatchError:
        return None
    return paths if paths.folder.is_dir() else None


def _print_ended(ended: Ended, as_json: bool) -> int:
    if ended.unchanged:
        print("finished before, and nothing has changed since: nothing to do", file=sys.stderr)
    if as_json:
        _print_json(ended.report.to_json())
    else:
        print(ended.report.render())
    return ended.exit_code


def _printed_aside() -> AbstractContextManager[TextIO]:
    """While a template runs: what it prints goes to stderr, since stdout is the command's answer."""
    return redirect_stdout(sys.stderr)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _escaped(text: str) -> str:
    return "\n".join(escape_controls(line) for line in text.split("\n"))
