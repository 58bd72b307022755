"""The plan of a job's first calls, and what it says to a user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglbatch.job.manifest import Manifest, changes
from sglbatch.job.prepare import Prepared
from sglbatch.job.records import ReadCounts
from sglbatch.lang.calls import PendingCall
from sglbatch.planner import JobFacts, Plan, Summary, Tree, counted, kv_bytes_per_token, plan_calls
from sglbatch.types import ErrorInfo

BYTES_PER_VALUE: Final = {"bfloat16": 2, "float32": 4}


def plan_job(
    calls: Sequence[PendingCall],
    ready: Prepared,
    *,
    errors: Sequence[ErrorInfo],
    calls_reused: int,
    rows_outside: int = 0,
) -> tuple[Plan, Summary, Tree]:
    """``planner.plan_calls`` with what the job knows."""
    facts = JobFacts(
        num_rows=len(ready.rows),
        context_len=ready.model.context_len,
        errors=errors,
        calls_reused=calls_reused,
        rows_outside=rows_outside,
        kv_bytes_per_token=_kv_bytes(ready),
    )
    return plan_calls(calls, facts)


def _kv_bytes(ready: Prepared) -> dict[str, int]:
    """Of one token, for each dtype that the run may have: ``auto`` is decided where the model is loaded."""
    dtype = ready.config.dtype
    sizes = {
        name: kv_bytes_per_token(ready.model.config, bytes_per_value=num_bytes)
        for name, num_bytes in BYTES_PER_VALUE.items()
        if dtype in ("auto", name)
    }
    return {name: size for name, size in sizes.items() if size is not None}


def plan_line(summary: Summary, *, with_tokens: bool = True) -> str:
    """The plan in one line."""
    answered = f", {summary.calls_reused:,} answered already" if summary.calls_reused else ""
    equal = f", {summary.num_equal_calls:,} equal to another" if summary.num_equal_calls else ""
    tokens = ""
    if summary.num_requests and with_tokens:
        tokens = (
            f"; {summary.prompt_tokens:,} prompt tokens, {summary.unique_tokens:,} of them unique: "
            f"best hit rate {summary.best_hit_rate:.1%}"
        )
    rows, calls = counted(summary.num_rows, "row"), counted(summary.num_requests, "first call")
    return f"plan: {rows}, {calls} to make{answered}{equal}{tokens}"


def silence_lines(summary: Summary) -> list[str]:
    """Says so where no row asks the model anything, although some could."""
    asked = summary.num_requests or summary.calls_reused or summary.rows_outside
    if asked or summary.num_failed_rows == summary.num_rows:
        return []
    return ['warning: no row asks the model anything; a template does with s += sgl.gen("answer") or sgl.select(...)']


def unenforced_lines(parts: Sequence[str]) -> list[str]:
    """What ``constraints.unenforced_parts`` found, for people."""
    return [f"only validated afterwards: {part}" for part in parts]


def change_lines(previous: Manifest | None, new: Manifest) -> list[str]:
    """What is different from the last run of the job, for people; [] for a new job."""
    if previous is None:
        return []
    found = changes(previous, new)
    if not found:
        return ["continuing: nothing changed since last time"]
    return ["changed since last time:", *(f"  {line}" for line in found)]


def journal_lines(counts: ReadCounts) -> list[str]:
    """What was wrong with the journal's lines."""
    lines = []
    if counts.torn:
        lines.append(
            f"journal: {counted(counts.torn, 'line')} cut short when a run was killed; those calls are made again"
        )
    if counts.corrupt:
        lines.append(f"journal: {counted(counts.corrupt, 'damaged line')} left out; those calls are made again")
    return lines
