"""``run-batch``: a Batch API file as a job."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from sglbatch.errors import SglbatchError
from sglbatch.job.config import MaxFailures, RunConfig
from sglbatch.job.execution import Surroundings
from sglbatch.job.openai_batch import program
from sglbatch.job.openai_batch.output import count_failed, write_batch_output
from sglbatch.job.runner import run_job
from sglbatch.planner import counted

MAX_TOKENS: Final = 1024
"""For requests that name no limit, as the API lets them."""


def run_batch(config: RunConfig, surroundings: Surroundings, *, restart: bool) -> int:
    """Runs or continues the file of ``config.data`` and writes the answers to ``config.output``.

    The job itself is one over the file's lines, with an output of its own beside (``OUT.rows.jsonl``).

    Returns:
        The exit status; lines that failed count as failed rows.

    Raises:
        SglbatchError: as ``run_job``; ``bad-option``.
    """
    target = config.output
    assert target is not None and len(config.data) == 1
    requests = Path(config.data[0])
    if target.exists() and target.samefile(requests):
        raise SglbatchError("output-is-input", "the output would overwrite the requests", where=str(target))
    rows = target.with_name(f"{target.name}.rows.jsonl")
    ended = run_job(batch_config(config, rows), surroundings, restart=restart)
    if ended.report.state != "finished":
        return ended.exit_code
    if ended.unchanged and target.exists():
        print("finished before, and nothing has changed since: nothing to do", file=sys.stderr)
        num_failed = count_failed(target)
    else:
        num_failed = write_batch_output(
            requests, rows, target, model=config.model, created=int(time.time()), limit=config.limit
        )
    print(f"{counted(ended.report.rows, 'line')}, {num_failed:,} failed, in {target}")
    return config.max_failures.exit_code(num_failed, ended.report.rows)


def batch_config(config: RunConfig, rows: Path) -> RunConfig:
    """The job over the file's lines: whether lines fail is judged by the answers that are written."""
    return replace(
        config,
        template=Path(program.__file__),
        program="answer",
        output=rows,
        max_tokens=config.max_tokens or MAX_TOKENS,
        max_failures=MaxFailures(value=100, percent=True),
    )
