"""The backend: calls run in an event loop in a thread of its own, programs stay synchronous."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from sglbatch.api_spec.asking import Asking, Used
from sglbatch.api_spec.batches import BatchClient
from sglbatch.api_spec.batchstore import BatchStore
from sglbatch.api_spec.client import Client, Endpoint, Traffic
from sglbatch.api_spec.dialect import ApiDialect
from sglbatch.api_spec.speculation import Speculation
from sglbatch.api_spec.tokens import Counter
from sglbatch.errors import CallError, ConstraintError, SglbatchError
from sglbatch.types import BackendStats, ErrorInfo, Priority, Request, Result

WAIT_S: Final = 0.2
"""How long a step waits for an answer: signals are looked at in between."""

DRAIN_POLL_S: Final = 0.05

CACHED_TOKENS: Final = 1024
"""A shared beginning of so many tokens is what providers cache: one call goes ahead of the others that have it."""


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    """Where a request stands in the queue: the planner's place, else the order of coming."""

    priority: Priority
    number: int


class ApiBackend:
    """A ``types.Backend`` over an endpoint.

    A failure that ends the job is raised by ``step`` once everything that was under way has come back.

    Args:
        concurrency: calls under way at a time.
        batches: calls go in batches, whose state is kept here; else one by one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        counter: Counter,
        *,
        concurrency: int,
        speculation: Speculation | None = None,
        batches: BatchStore | None = None,
    ) -> None:
        self._model = endpoint.model
        self._counter = counter
        self._concurrency = concurrency
        self._speculation = speculation or Speculation()
        self._traffic = Traffic()
        self._budget = endpoint.budget
        self._results: SimpleQueue[Result] = SimpleQueue()
        self._queue: list[tuple[_Place, Request]] = []
        self._held: dict[bytes, list[tuple[_Place, Request]]] = {}
        self._warm: set[bytes] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self._outstanding = 0
        self._fatal: BaseException | None = None
        self._draining = False
        self._used = Used()
        self._num_requests = 0
        self._steps = 0
        self._one_ahead = batches is None
        self._client: Client | BatchClient = (
            Client(endpoint, self._traffic) if batches is None else BatchClient(endpoint, self._traffic, batches)
        )
        self._asking = Asking(
            model=self._model,
            counter=counter,
            speculation=self._speculation,
            poster=self._client,
            has_logprobs=batches is None,  # where they do not tell, the next wave may be a day away
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglbatch-api", daemon=True)
        self._thread.start()

    @property
    def identity(self) -> str:
        return self._model.identity

    @property
    def dialect(self) -> ApiDialect:
        """How programs that run on this backend by themselves put their calls to it."""
        return ApiDialect(self._model, self._counter)

    @property
    def context_len(self) -> int:
        return self._model.context_len

    @property
    def has_unfinished(self) -> bool:
        return self._outstanding > 0

    def submit(self, requests: Sequence[Request]) -> None:
        self._outstanding += len(requests)
        self._loop.call_soon_threadsafe(self._enqueue, list(requests))

    def step(self) -> list[Result]:
        """What has been answered, after waiting a moment for the first.

        Raises:
            SglbatchError: the job has to end.
        """
        self._steps += 1
        results: list[Result] = []
        try:
            results.append(self._results.get(timeout=WAIT_S))
            while True:
                results.append(self._results.get_nowait())
        except Empty:
            pass
        if not results and self._fatal is not None and not self._tasks and self._results.empty():
            raise self._fatal
        return self._taken(results)

    def drain(self, seconds: float) -> list[Result]:
        """The answers of calls that are under way, as far as they come within so many seconds; no call starts any more.

        They are paid for, so a run that is stopped keeps them.
        """
        self._draining = True
        deadline = time.monotonic() + seconds
        while self._tasks and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)
        results: list[Result] = []
        while not self._results.empty():
            results.append(self._results.get())
        return self._taken(results)

    def _taken(self, results: list[Result]) -> list[Result]:
        self._outstanding -= len(results)
        self._num_requests += len(results)
        return results

    def finish_program(self, program_id: int) -> None:
        """Nothing is kept for a program: its state is its own."""

    def stats(self) -> BackendStats:
        return BackendStats(
            requests=self._num_requests,
            prompt_tokens=self._used.prompt,
            computed_prompt_tokens=self._used.prompt - self._used.cached,
            generated_tokens=self._used.generated,
            steps=self._steps,
        )

    def facts(self) -> dict[str, Any]:
        """What the report says of the endpoint."""
        speculation = self._speculation
        return {
            "endpoint": self._model.base_url,
            "http_requests": self._traffic.sent,
            "answers": self._traffic.answered,
            "answers_without_usage": self._traffic.without_usage,
            "retries": dict(self._traffic.retries),
            "methods": dict(self._asking.methods),
            "cost": {
                "dollars": float(self._budget.spent) if self._budget.known else None,
                "earlier_dollars": float(self._budget.earlier) if self._budget.known else None,
                "prices": self._budget.source,
            },
            "speculation": {
                "saved_prompt_tokens": speculation.saved_prompt_tokens,
                "used_tokens": speculation.used_tokens,
                "wasted_tokens": speculation.wasted_tokens,
                "places_off": speculation.num_off,
            },
        }

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
        self._budget.close()

    # --- inside the loop's thread ---

    def _enqueue(self, requests: list[Request]) -> None:
        for request in requests:
            self._number += 1
            place = _Place(request.priority or (self._number,), self._number)
            heapq.heappush(self._queue, (place, request))
        self._pump()

    def _pump(self) -> None:
        """Starts calls while there is room, one of a group ahead of the others."""
        while self._queue and len(self._tasks) < self._concurrency and self._fatal is None and not self._draining:
            place, request = heapq.heappop(self._queue)
            group = self._group(request)
            if group is not None and group not in self._warm:
                if group in self._held:
                    self._held[group].append((place, request))
                    continue
                self._held[group] = []
            task = self._loop.create_task(self._run(request))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, group))

    def _group(self, request: Request) -> bytes | None:
        """The beginning that providers cache, where the prompt is long enough."""
        ids = request.prompt_ids
        if not self._one_ahead or self._counter.num_tokens(ids) < CACHED_TOKENS:
            return None
        size = CACHED_TOKENS * len(ids) // self._counter.num_tokens(ids)
        return ids[:size].tobytes()

    def _ended(self, group: bytes | None, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._fatal is None:
            self._fatal = error
        if group is not None:
            self._warm.add(group)
            for item in self._held.pop(group, []):
                heapq.heappush(self._queue, item)
        self._pump()

    async def _run(self, request: Request) -> None:
        assert request.text is not None, "an API is asked with text"
        used = Used()
        try:
            result = await self._asking.answer(
                request.text, request_id=request.request_id, seed=request.seed, used=used
            )
        except (CallError, ConstraintError) as error:
            info = ErrorInfo(code=error.code, message=error.message)
            result = Result(request_id=request.request_id, error=info, usage=used.usage)
        finally:
            self._used.prompt += used.prompt
            self._used.cached += used.cached
            self._used.generated += used.generated
        self._results.put(result)

    async def _shut(self) -> None:
        tasks = list(self._tasks)
        self._fatal = self._fatal or SglbatchError("closed", "the backend was closed")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
