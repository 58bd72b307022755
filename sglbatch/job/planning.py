"""The plan of a job's first calls, and what it says to a user."""

from __future__ import annotations

from collections.abc import Sequence

from sglbatch.engine.fsm.regex import compile_regex
from sglbatch.errors import ConstraintError
from sglbatch.job.manifest import Manifest, changes
from sglbatch.job.prepare import Prepared
from sglbatch.job.records import ReadCounts
from sglbatch.lang.calls import PendingCall
from sglbatch.lang.template import Template
from sglbatch.planner import JobFacts, Plan, Summary, Tree, kv_bytes_per_token, plan_calls
from sglbatch.types import ErrorInfo, Generate


def plan_job(
    calls: Sequence[PendingCall],
    ready: Prepared,
    *,
    errors: Sequence[ErrorInfo],
    calls_reused: int,
) -> tuple[Plan, Summary, Tree]:
    """``planner.plan_calls`` with what the job knows; raises ConstraintError as ``check_constraints``."""
    check_constraints(calls, ready.template)
    bytes_per_value = 2 if ready.config.dtype == "bfloat16" else 4
    facts = JobFacts(
        num_rows=len(ready.rows),
        context_len=ready.model.context_len,
        errors=errors,
        calls_reused=calls_reused,
        kv_bytes_per_token=kv_bytes_per_token(ready.model.config, bytes_per_value=bytes_per_value),
    )
    return plan_calls(calls, facts)


def check_constraints(calls: Sequence[PendingCall], template: Template) -> None:
    """Compiles the regexes that the template's author wrote, so that a bad one ends the job before a model is loaded.

    One that is made from a row's values is that row's error, which the backend gives.

    Raises:
        ConstraintError: naming the template.
    """
    constraints = {call.operation.constraint for call in calls if isinstance(call.operation, Generate)}
    sources = {constraint.source for constraint in constraints if constraint is not None}
    for source in sorted(sources & template.function.strings()):
        try:
            compile_regex(source)
        except ConstraintError as error:
            raise ConstraintError(error.code, error.message, hint=error.hint, where=str(template.path)) from error


def plan_line(summary: Summary) -> str:
    """The plan in one line."""
    answered = f", {summary.calls_reused:,} answered already" if summary.calls_reused else ""
    equal = f", {summary.num_equal_calls:,} equal to another" if summary.num_equal_calls else ""
    tokens = ""
    if summary.num_requests:
        tokens = (
            f"; {summary.prompt_tokens:,} prompt tokens, {summary.unique_tokens:,} of them unique: "
            f"best hit rate {summary.best_hit_rate:.1%}"
        )
    return f"plan: {summary.num_rows:,} rows, {summary.num_requests:,} first calls to make{answered}{equal}{tokens}"


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
        lines.append(f"journal: {counts.torn:,} lines were cut short when a run was killed; those calls are made again")
    if counts.corrupt:
        lines.append(f"journal: {counts.corrupt:,} damaged lines are left out; those calls are made again")
    return lines
