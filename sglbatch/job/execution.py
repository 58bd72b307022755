"""Rows become programs, programs become calls, calls are answered, programs end: the heart of a run."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from sglbatch.api_spec import ApiModel
from sglbatch.api_spec.backend import ApiBackend
from sglbatch.data import Row
from sglbatch.data.values import normalise
from sglbatch.errors import BackendStopped
from sglbatch.job.config import RunConfig
from sglbatch.job.identity import RowKeys
from sglbatch.job.prepare import Prepared
from sglbatch.job.progress import Progress
from sglbatch.job.rows import FinishedRow
from sglbatch.job.signals import Stopped, StopRequest
from sglbatch.lang.calls import PendingCall
from sglbatch.lang.driver import Driver
from sglbatch.lang.row_program import RowProgram
from sglbatch.models import LocalModel
from sglbatch.planner import Plan
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Backend, BackendStats

CHUNK_ROWS: Final = 1024

DRAIN_S: Final = 10.0
"""How long a run that is stopped waits for the answers of calls that are under way: they have to be paid for."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a run needs of the outside: where to show progress, who may stop it, where its backend comes from."""

    progress: Progress
    stop: StopRequest
    load_backend: Callable[[LocalModel | ApiModel, Tokenizer | None, RunConfig], Backend]


class Execution:
    """The programs of a job over one driver.

    Args:
        on_finished: takes every row as it ends, in no particular order, each once; may raise Stopped.
        after_step: called when results have come in and rows have ended (the journal and the rows are flushed there).
        with_transcript: finished rows carry the program's whole text.
    """

    def __init__(
        self,
        prepared: Prepared,
        driver: Driver,
        surroundings: Surroundings,
        *,
        on_finished: Callable[[FinishedRow], None],
        after_step: Callable[[], None],
        with_transcript: bool,
    ) -> None:
        self._prepared = prepared
        self._driver = driver
        self._progress = surroundings.progress
        self._stop = surroundings.stop
        self._on_finished = on_finished
        self._after_step = after_step
        self._with_transcript = with_transcript
        self._live: dict[int, RowProgram] = {}
        self.notes: Counter[str] = Counter()
        """What had to be changed in rows' values to keep them, by kind."""

    def plan_rows(self, rows: Iterable[tuple[Row, str | None]], *, run_outside: bool) -> list[PendingCall]:
        """Starts every row's program and answers what is known.

        Args:
            rows: with their keys where they are known already.
            run_outside: see ``Driver.collect``.

        Returns:
            The first calls that have to be made.

        Raises:
            SglbatchError: ``duplicate-id``; TemplateError.
        """
        keys = RowKeys(self._prepared.config.id_column)
        calls: list[PendingCall] = []
        started: list[RowProgram] = []
        for row, key in rows:
            self._stop.check()
            program = self._start(row, key, keys)
            if program is not None:
                started.append(program)
            if len(started) >= CHUNK_ROWS:
                calls += self._collect(started, run_outside=False)
            self._progress.advance()
        calls += self._collect(started, run_outside=False)
        keys.check()
        if run_outside:
            calls += self._collect([], run_outside=True)
            self._take_ended(list(self._live.values()))
        return calls

    def run(self, calls: list[PendingCall], plan: Plan, backend: Backend) -> None:
        """Makes the calls in the plan's order, and whatever follows from them, until every program has ended."""
        self._driver.attach(backend)
        self._driver.submit([calls[i] for i in plan.order.tolist()], range(len(calls)))
        start = time.monotonic()
        try:
            with _frozen_heap():
                while self._driver.unfinished:
                    self._stop.check()
                    ended = self._step()
                    num_ended = self._take_ended(ended)
                    self._after_step()
                    self._progress.advance(num_ended, **_numbers(backend.stats(), time.monotonic() - start))
        except Stopped:
            self._drain(backend)
            raise

    def _drain(self, backend: Backend) -> None:
        """Keeps the last answers of a run that ends early, where they are paid for."""
        if isinstance(backend, ApiBackend):
            self._take_ended(self._driver.keep(backend.drain(DRAIN_S)))
            self._after_step()

    def _step(self) -> list[RowProgram]:
        try:
            return self._driver.step()
        except BackendStopped as stopped:
            raise Stopped(stopped.exit_code, stopped.render()) from stopped

    @property
    def num_live(self) -> int:
        return len(self._live)

    def _start(self, row: Row, key: str | None, keys: RowKeys) -> RowProgram | None:
        """The row's program, running; None when the row ended at once."""
        if row.values is None:
            assert row.error is not None
            error = replace(row.error, message=f"{row.where}: {row.error.message}")
            self._on_finished(FinishedRow(index=row.index, key="", error=error))
            return None
        if key is None:
            key = keys.key(row.values, self._prepared.binding.arguments(row.values), where=row.where)
        program = self._prepared.program(row.values, program_id=row.index, row_key=key)
        self._live[row.index] = program
        self._driver.add(program)
        return None if self._take_ended([program]) else program

    def _collect(self, started: list[RowProgram], *, run_outside: bool) -> list[PendingCall]:
        calls = self._driver.collect(run_outside=run_outside)
        self._take_ended(started)
        started.clear()
        self._after_step()
        return calls

    def _take_ended(self, programs: Iterable[RowProgram]) -> int:
        """Hands on those that have ended and were not handed on before; returns how many."""
        num_ended = 0
        for program in programs:
            if program.done and self._live.pop(program.program_id, None) is not None:
                num_ended += 1
                self._on_finished(self._finished_row(program))
        return num_ended

    def _finished_row(self, program: RowProgram) -> FinishedRow:
        outcome = program.outcome
        return FinishedRow(
            index=program.program_id,
            key=program.row_key,
            values={name: normalise(value, self.notes) for name, value in outcome.values.items()},
            returned=normalise(outcome.returned, self.notes),
            error=outcome.error,
            finish=outcome.finish,
            means=outcome.means,
            cut=outcome.cut,
            usage=outcome.usage,
            dtypes=outcome.dtypes,
            transcript=outcome.transcript if self._with_transcript else None,
            answer_spans=outcome.answer_spans if self._with_transcript else (),
        )


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Planned programs live long: full collections would look at each of them again and again.

    Thawed at the end, since libraries complain at exit about what is never collected.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _numbers(stats: BackendStats, seconds: float) -> dict[str, str]:
    numbers = {"hits": f"{hit_rate(stats):.1%}"}
    if seconds > 0:
        numbers["tokens/s"] = f"{(stats.generated_tokens + stats.prompt_tokens) / seconds:,.0f}"
    return numbers


def hit_rate(stats: BackendStats) -> float:
    """Share of the requests' prompt tokens that were not computed; recomputation can make it negative."""
    return 1 - stats.computed_prompt_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
