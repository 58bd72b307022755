"""Requests about files and batches, each tried again where that may help."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from sglbatch.api_spec.client import Endpoint, Traffic, http_client
from sglbatch.api_spec.failures import Failure, backoff_s, of_status, redact
from sglbatch.api_spec.limits import retry_after_s
from sglbatch.errors import EXIT_RESUMABLE, BackendStopped

T = TypeVar("T")


class BatchEndpoint:
    """A provider's /v1/files and /v1/batches. Used inside one event loop only.

    Every request raises SglbatchError where trying again does not help.
    """

    def __init__(self, endpoint: Endpoint, traffic: Traffic) -> None:
        self._endpoint = endpoint
        self._traffic = traffic
        self._key = endpoint.model.key()
        self._http = http_client(endpoint.model, self._key, endpoint.timeout_s, bounded=False)
        self._rng = random.Random()

    async def upload(self, name: str, data: bytes) -> str:
        """The new file's id."""
        uploaded = await self._tried(lambda: self._http.files.create(file=(name, data), purpose="batch"))
        return str(uploaded.id)

    async def submit(self, file_id: str, path: str, metadata: dict[str, str]) -> str:
        """The new batch's id.

        Args:
            path: the endpoint that its requests are for.
        """
        batch = await self._tried(
            lambda: self._http.batches.create(
                input_file_id=file_id, endpoint=path, completion_window="24h", metadata=metadata
            )
        )
        return str(batch.id)

    async def batch(self, batch_id: str | None) -> dict[str, Any]:
        """A batch as it stands."""
        found = await self._tried(partial(self._http.batches.retrieve, batch_id))
        value: dict[str, Any] = found.to_dict()
        return value

    async def batches(self) -> list[dict[str, Any]]:
        """All that the provider has."""

        async def every() -> list[dict[str, Any]]:
            return [batch.to_dict() async for batch in self._http.batches.list(limit=100)]

        return await self._tried(every)

    async def content(self, file_id: str) -> bytes:
        """A file's."""
        found = await self._tried(partial(self._http.files.content, file_id))
        data: bytes = found.content
        return data

    async def close(self) -> None:
        await self._http.close()

    async def _tried(self, request: Callable[[], Awaitable[T]]) -> T:
        """Tried again where that may help."""
        import openai

        tries: Counter[str] = Counter()
        while True:
            try:
                return await asyncio.wait_for(request(), self._endpoint.timeout_s)
            except openai.APIStatusError as error:
                wait_s = retry_after_s(error.response.headers)
                failure = of_status(error.status_code, error.response.text, retry_after_s=wait_s, key=self._key)
            except (TimeoutError, openai.APIConnectionError) as error:
                reason = redact(str(error.__cause__ or error) or "no answer in time", self._key)
                failure = Failure(what="again", code="connection", message=reason)
            if failure.what in ("job", "row"):
                raise failure.error()
            tries[failure.what] += 1
            self._traffic.retries[failure.code] += 1
            if tries[failure.what] >= self._endpoint.max_tries:
                raise BackendStopped(
                    "endpoint-down",
                    f"the Batch API does not answer: {failure.message}",
                    hint="run the same command again later: the batches go on meanwhile",
                    exit_code=EXIT_RESUMABLE,
                )
            await asyncio.sleep(self._endpoint.backoff_scale * backoff_s(tries[failure.what], failure, self._rng))
