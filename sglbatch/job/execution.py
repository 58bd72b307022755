"""Rows become programs, programs become calls, calls are answered, programs end: the heart of a run."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final

from sglbatch.api_spec import ApiModel
from sglbatch.data import Row
from sglbatch.data.values import normalise
from sglbatch.errors import BackendStopped, ConstraintError
from sglbatch.job.config import RunConfig
from sglbatch.job.constraints import check_constraints
from sglbatch.job.feed import Feed
from sglbatch.job.identity import RowKeys
from sglbatch.job.loading import Loading
from sglbatch.job.pool import check_pool, too_large
from sglbatch.job.prepare import Prepared
from sglbatch.job.progress import Progress
from sglbatch.job.rows import FinishedRow
from sglbatch.job.signals import Stopped, StopRequest
from sglbatch.lang.calls import PendingCall
from sglbatch.lang.driver import Driver
from sglbatch.lang.environment import KeepsAnswers
from sglbatch.lang.meta_info import kept_logprobs
from sglbatch.lang.row_program import RowKey, RowProgram
from sglbatch.lang.variables import Variable
from sglbatch.models import LocalModel
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Backend, BackendStats

CHUNK_ROWS: Final = 1024

DRAIN_S: Final = 10.0
"""How long a run that is stopped waits for the answers of calls that are under way: they have to be paid for."""

COLLECT_AFTER: Final = 50_000
"""New objects after which garbage is looked for: a step makes thousands, and hardly any that only that would free."""

STEPS_AHEAD: Final = 2
"""A backend has as many requests before it as it has begun in so many steps, if there are so many."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a run needs of the outside: where to show progress, who may stop it, where its backend comes from."""

    progress: Progress
    stop: StopRequest
    load_backend: Callable[[LocalModel | ApiModel, Tokenizer | None, RunConfig], Backend]


class Execution:
    """The programs of a job over one driver: ``start_rows``, ``prepare``, ``run``; or ``plan_rows`` alone.

    A backend is loaded in another thread, from the first rows on; ``close`` waits for it. Until then the process looks
    for garbage less often.

    Args:
        on_finished: takes every row as it ends, in no particular order, each once; may raise Stopped.
        after_step: called when results have come in and rows have ended (the journal and the rows are flushed there).
        on_planned: takes all first calls in input order, once they are tokenised and a step has been begun behind the
            last of them, or the run ends.
        with_transcript: finished rows carry the program's whole text.
        any_known: an earlier run may have answered everything, so a backend is loaded only for a call that is new.
    """

    def __init__(
        self,
        prepared: Prepared,
        driver: Driver,
        surroundings: Surroundings,
        *,
        on_finished: Callable[[FinishedRow], None],
        after_step: Callable[[], None],
        on_planned: Callable[[Sequence[PendingCall]], None] = lambda _: None,
        with_transcript: bool,
        any_known: bool = False,
    ) -> None:
        self._prepared = prepared
        self._driver = driver
        self._feed = Feed(driver, in_slabs=isinstance(prepared.model, LocalModel))
        self._loading = Loading(lambda: surroundings.load_backend(prepared.model, prepared.tokenizer, prepared.config))
        self._on_planned = on_planned
        self._any_known = any_known
        self._ready: list[PendingCall] = []
        self._is_planned = False
        self._num_placed = 0
        self._num_fitting = 0
        self._num_waiting = 0
        self._progress = surroundings.progress
        self._stop = surroundings.stop
        self._on_finished = on_finished
        self._after_step = after_step
        self._with_transcript = with_transcript
        self._live: dict[int, RowProgram] = {}
        self._gc_threshold = gc.get_threshold()
        self.notes: Counter[str] = Counter()
        """What had to be changed in rows' values to keep them, by kind."""

    def plan_rows(self, rows: Iterable[tuple[Row, RowKey | None]]) -> list[PendingCall]:
        """Starts every row's program and answers what is known; makes no calls, outside or to a model.

        Args:
            rows: with their keys where they are known already.

        Returns:
            The first calls that have to be made.

        Raises:
            SglbatchError: ``duplicate-id``; TemplateError.
        """
        calls: list[PendingCall] = []
        for _ in self._started(rows):
            calls += self._driver.collect()
            self._take_ended(self._driver.take_finished())
        return calls

    def start_rows(self, rows: Iterable[tuple[Row, RowKey | None]]) -> None:
        """Starts every row's program, and makes the outside calls that programs begin with.

        Args:
            rows: with their keys where they are known already.

        Raises:
            SglbatchError: ``duplicate-id``; TemplateError; ConstraintError as ``check_constraints``; what loading the
                backend raises.
        """
        gc.set_threshold(COLLECT_AFTER, *self._gc_threshold[1:])
        for _ in self._started(rows):
            self._load_early()
            self._driver.park()
            self._after_step()
            _freeze()
        self._driver.settle_outside()
        self._take_ended(self._driver.take_finished())
        check_constraints((question.call for question in self._driver.asked), self._prepared)

    def prepare(self) -> None:
        """Tokenises in the plan's order: up to the first slab with a call to make, and on while the model loads.

        Raises:
            SglbatchError: ``kv-too-small``; what loading the backend raises.
        """
        while not self._feed.is_done and (not self._num_fitting or self._loading.is_under_way):
            self._stop.check()
            self._loading.check()
            self._resolve_slab()
            if self._num_fitting:
                self._loading.start()
        if self._feed.is_done:
            check_pool(self._feed.all_calls, self._prepared)
        self._plan_once()

    def run(self) -> None:
        """Makes the calls in the plan's order, and whatever follows from them, until every program has ended."""
        if not self._driver.unfinished:
            return
        with self._progress.stage("load", label="loading the model"):
            backend = self._loading.wait(self._stop)
        self._driver.attach(backend)
        self._driver.expect_more(not self._feed.is_done)
        with self._progress.stage("run", label="running", total=self.num_live):
            start = time.monotonic()
            try:
                while self._driver.unfinished:
                    self._stop.check()
                    num_ended = self._supply()
                    num_ended += self._take_ended(self._step())
                    self._after_step()
                    self._plan_once()  # on a GPU beside a step
                    self._progress.advance(num_ended, **_numbers(backend.stats(), time.monotonic() - start))
                if not self._feed.is_done:  # programs have ended whose questions were still to be looked for
                    self._resolve_slab()
            except Stopped:
                self._drain(backend)
                self._plan_once()
                raise
            self._plan_once()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def backend(self) -> Backend | None:
        """Once it is loaded."""
        return self._loading.backend

    def close(self) -> None:
        """Waits for the backend, if it is being loaded, and closes it."""
        if self._loading.is_under_way:
            self._progress.note("waiting until the model is loaded, which cannot be interrupted")
        self._loading.close()
        gc.unfreeze()
        gc.set_threshold(*self._gc_threshold)

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _drain(self, backend: Backend) -> None:
        """Keeps the last answers of a run that ends early: those that are paid for, or computed."""
        if isinstance(backend, KeepsAnswers):
            self._take_ended(self._driver.keep(backend.drain(DRAIN_S)))
            self._after_step()

    # --- in the plan's order ---

    def _load_early(self) -> None:
        """Starts loading as soon as it is certain that there is something to compute, and likely that it can be."""
        self._loading.check()
        if self._any_known or self._loading.is_started or not self._driver.asked:
            return  # once it is started, a look at all questions with every chunk of rows would be for nothing
        if self._prepared.config.kv_tokens is not None or self.num_live < CHUNK_ROWS:
            return  # what does not fit the pool or the context is known when it is tokenised, for few rows at once
        try:
            check_constraints((question.call for question in self._driver.asked), self._prepared)
        except ConstraintError:
            return  # whether the template is to blame is known when all rows have been seen
        self._loading.start()

    def _supply(self) -> int:
        """Submits what is tokenised, and tokenises on while the backend computes; returns how many rows ended by it.

        That is a slab with every step, and more only where steps begin more: the backend shall not wait for this.
        """
        num_ended, num_begun = 0, self._num_waiting - self._driver.num_waiting
        if self._ready:  # the backend has nothing to do yet
            self._submit()
        else:
            while not self._feed.is_done:
                num_ended += self._resolve_slab()
                self._submit()
                if self._driver.num_waiting >= STEPS_AHEAD * num_begun:
                    break
        self._num_waiting = self._driver.num_waiting
        return num_ended

    def _submit(self) -> None:
        calls, self._ready = self._ready, []
        self._driver.submit(calls, range(self._num_placed, self._num_placed + len(calls)))
        self._num_placed += len(calls)

    def _resolve_slab(self) -> int:
        """Tokenises the next slab and answers what of it is known; returns how many rows ended by that."""
        slab = self._feed.next_slab()
        self._ready += slab
        self._num_fitting += len(slab) - len(too_large(slab, self._prepared))
        num_ended = self._take_ended(self._driver.take_finished())
        self._after_step()
        _freeze()
        if self._feed.is_done:
            self._driver.expect_more(False)
        return num_ended

    def _plan_once(self) -> None:
        """Hands on all first calls, once they are known."""
        if self._feed.is_done and not self._is_planned:
            self._is_planned = True
            self._on_planned(self._feed.all_calls)

    def _step(self) -> list[RowProgram]:
        try:
            return self._driver.step()
        except BackendStopped as stopped:
            raise Stopped(stopped.exit_code, stopped.render()) from stopped

    # --- rows ---

    def _started(self, rows: Iterable[tuple[Row, RowKey | None]]) -> Iterator[None]:
        """Starts the rows' programs; stops here and there, so that what they ask can be looked at, and at the end."""
        keys = RowKeys(self._prepared.config.id_column)
        for number, (row, key) in enumerate(rows, start=1):
            self._stop.check()
            self._start(row, key, keys)
            self._take_ended(self._driver.take_finished())
            self._progress.advance()
            if number % CHUNK_ROWS == 0:
                yield
        keys.check()
        yield

    def _start(self, row: Row, key: RowKey | None, keys: RowKeys) -> None:
        if row.values is None:
            assert row.error is not None
            error = replace(row.error, message=f"{row.where}: {row.error.message}")
            self._on_finished(FinishedRow(index=row.index, key="", error=error))
            return
        if key is None:
            key = keys.later(row.values, self._prepared.binding.arguments(row.values), where=row.where)
        program = self._prepared.program(row.values, program_id=row.index, row_key=key)
        self._live[row.index] = program
        self._driver.add(program)

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
            logprobs=self._kept_logprobs(outcome.variables) if "logprobs" in self._prepared.config.save else {},
            answer_spans=outcome.answer_spans if self._with_transcript else (),
        )

    def _kept_logprobs(self, variables: Mapping[str, Variable]) -> dict[str, Any]:
        token_text = self._prepared.environment.token_text
        found = {name: kept_logprobs(variable, token_text) for name, variable in variables.items()}
        return {name: logprobs for name, logprobs in found.items() if logprobs is not None}


def _freeze() -> None:
    """Programs and calls live long: full collections would look at each of them again and again.

    ``Execution.close`` thaws them, since libraries complain at exit about what is never collected.
    """
    gc.freeze()


def _numbers(stats: BackendStats, seconds: float) -> dict[str, str]:
    numbers = {"hits": f"{hit_rate(stats):.1%}"}
    if seconds > 0:
        numbers["tokens/s"] = f"{(stats.generated_tokens + stats.prompt_tokens) / seconds:,.0f}"
    return numbers


def hit_rate(stats: BackendStats) -> float:
    """Share of the requests' prompt tokens that were not computed; recomputation can make it negative."""
    return 1 - stats.computed_prompt_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
