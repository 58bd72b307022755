"""What a run did, in numbers: ``OUT.job/report.json`` and the same for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from sglbatch.api_spec.summary import api_lines
from sglbatch.errors import SglbatchError
from sglbatch.job.paths import write_atomically
from sglbatch.planner.render import escape_controls

REPORT_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class ErrorGroup:
    """Failed rows with the same error code; ``sample`` is the message of the first, row ``first_row`` (from 1)."""

    code: str
    count: int
    first_row: int
    sample: str

    def render(self) -> str:
        text = f"{self.count:,} x {self.code}, first in row {self.first_row:,}: {self.sample}"
        return f"{'error':<10}{escape_controls(text)}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of a job (the latest). Token counts are of this run's requests, not of calls answered by the journal.

    Args:
        state: finished, or stopped (resumable).
        rows, rows_done, rows_failed: input rows; those with an outcome; those whose outcome is an error.
        rows_hit_max_tokens: rows with a variable that was cut by max_tokens.
        rows_invalid: rows that failed because a finished value did not satisfy its schema.
        unenforced: parts of the job's own schemas that this run only validated.
        rows_kept: finished rows taken over as they were (``retry-failed`` only).
        rows_gone: rows of the run before that are no longer in the input.
        requests: calls made by the backend in this run.
        calls_reused: calls answered by the journal.
        calls_collapsed: calls answered by an equal call of this run.
        prompt_tokens: prompt tokens of the requests.
        computed_prompt_tokens: those that went through the model, recomputed ones included.
        recomputed_tokens: those that went through it again after their memory had been given up.
        out_of_memory: how often a step did not fit the device's memory; it was run in smaller ones.
        unique_prompt_tokens: those of the planned first requests when every shared beginning counts once.
        hit_rate: 1 - computed_prompt_tokens / prompt_tokens, over all requests of this run, follow-up calls included.
        best_hit_rate: 1 - unique / all prompt tokens of the planned first requests: the most that first requests allow.
            Follow-up calls, which extend prompts already computed, can carry hit_rate above it.
        seconds: wall time by stage.
        notes: how often what had to be changed in rows' values to keep them; also among the warnings.
        api: what an API model's endpoint was asked, what speculation saved and wasted, and what it cost.
    """

    state: str
    exit_code: int
    rows: int
    rows_done: int
    rows_failed: int
    rows_hit_max_tokens: int = 0
    rows_invalid: int = 0
    unenforced: tuple[str, ...] = ()
    rows_kept: int = 0
    rows_gone: int = 0
    requests: int = 0
    calls_reused: int = 0
    calls_collapsed: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    unique_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    out_of_memory: int = 0
    hit_rate: float = 0.0
    best_hit_rate: float = 0.0
    generated_tokens: int = 0
    steps: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    errors: tuple[ErrorGroup, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: Mapping[str, int] = field(default_factory=dict)
    journal: Mapping[str, int] = field(default_factory=dict)
    output: str | None = None
    model: Mapping[str, str] = field(default_factory=dict)
    api: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    started: float = 0.0
    version: int = REPORT_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: Path) -> None:
        write_atomically(
            path, json.dumps(self.to_json(), indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        )

    @staticmethod
    def load(path: Path) -> Report:
        """Raises SglbatchError: ``no-report`` when there is none yet, ``job-damaged`` when it cannot be read."""
        try:
            value = json.loads(path.read_bytes())
            errors = tuple(ErrorGroup(**group) for group in value.pop("errors"))
            texts = {name: tuple(value.get(name, ())) for name in ("warnings", "unenforced")}
            return Report(**{**value, **texts, "errors": errors})
        except FileNotFoundError:
            raise SglbatchError(
                "no-report",
                "this job has no report yet: none of its runs has come to an end",
                where=str(path),
                hint="see `sglbatch status`, or run the job again",
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise SglbatchError(
                "job-damaged",
                f"the report cannot be read ({error})",
                where=str(path),
                hint="run the job again: a finished one writes it anew when the file is removed",
            ) from error

    def render(self) -> str:
        """The report for people."""
        lines = [
            f"{'rows':<10}{self.rows_done:,} of {self.rows:,} done, {self.rows_failed:,} failed" + self._rows_notes(),
            f"{'calls':<10}{self.requests:,} made, {self.calls_reused:,} answered already"
            + (f", {self.calls_collapsed:,} equal to another" if self.calls_collapsed else ""),
            f"{'prompts':<10}{self.prompt_tokens:,} tokens, {self.computed_prompt_tokens:,} computed: "
            f"hit rate {self.hit_rate:.1%} (first requests alone allow {self.best_hit_rate:.1%})",
            f"{'answers':<10}{self.generated_tokens:,} tokens in {self.steps:,} steps" + self._rate(),
            f"{'seconds':<10}" + ", ".join(f"{stage} {value:.1f}" for stage, value in self.seconds.items()),
        ]
        if self.recomputed_tokens:
            lines.insert(3, f"{'':<10}{self.recomputed_tokens:,} tokens computed again after their memory was given up")
        if self.out_of_memory:
            lines.append(
                f"{'memory':<10}{self.out_of_memory:,} times a step did not fit the device and was run in parts; "
                "a smaller --kv-tokens leaves more for steps"
            )
        if self.unenforced or self.rows_invalid:
            only = f"; only validated: {', '.join(self.unenforced)}" if self.unenforced else ""
            lines.append(f"{'schemas':<10}{self.rows_invalid:,} rows failed validation{escape_controls(only)}")
        lines += api_lines(self.api)
        if self.output:
            lines.append(f"{'output':<10}{escape_controls(self.output)}")
        lines += [group.render() for group in self.errors]
        lines += [f"{'warning':<10}{escape_controls(warning)}" for warning in self.warnings]
        if self.state != "finished":
            lines.append(f"{'state':<10}{self.state}: the same command continues it")
        return "\n".join(lines)

    def _rows_notes(self) -> str:
        notes = f", {self.rows_kept:,} kept from before" if self.rows_kept else ""
        return notes + (f", {self.rows_gone:,} gone from the input" if self.rows_gone else "")

    def _rate(self) -> str:
        run_s = self.seconds.get("run", 0.0)
        return f", {self.generated_tokens / run_s:,.0f} a second" if run_s > 0 and self.generated_tokens else ""
