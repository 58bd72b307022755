"""Calls in batches: collected into files, submitted, waited for, and given back one by one.

A wave is everything that the programs wait for at a time; what follows from its answers is the next wave. Requests are
named by what they ask (custom_id), so a later process finds its answers in batches that an earlier one submitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sglbatch.api_spec.answers import Answer, Tokens
from sglbatch.api_spec.batch_endpoint import BatchEndpoint
from sglbatch.api_spec.batch_files import custom_id_of, files_of, read_outcomes
from sglbatch.api_spec.batchstore import BatchStore, Part
from sglbatch.api_spec.bodies import Outgoing
from sglbatch.api_spec.client import Endpoint, Traffic, paid
from sglbatch.api_spec.failures import Failure, redact
from sglbatch.errors import EXIT_MODEL, EXIT_RESUMABLE, BackendStopped, CallError, SglbatchError

ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
MAX_SUBMITS: Final = 4
"""How often one request goes into a batch before its row fails."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    outgoing: Outgoing
    future: asyncio.Future[Answer | Failure]


class BatchClient:
    """A ``Poster`` over the Batch API (/v1/files, /v1/batches). Used inside one event loop only."""

    def __init__(self, endpoint: Endpoint, traffic: Traffic, store: BatchStore) -> None:
        self._endpoint = endpoint
        self._traffic = traffic
        self._store = store
        self._key = endpoint.model.key()
        self._provider = BatchEndpoint(endpoint, traffic)
        self._waiting: dict[str, _Waiting] = {}
        self._found: dict[str, Answer | Failure] = {}
        self._taken_in: set[int] = set()  # numbers of parts that this process has read
        self._last_post = 0.0
        self._worker: asyncio.Task[None] | None = None

    async def post(self, outgoing: Outgoing, *, prompt_tokens: int, most_prompt_tokens: int) -> Answer:
        """The request's answer, once its batch has ended.

        Raises:
            CallError: the call's own failure. SglbatchError: the job has to end.
        """
        most = Tokens(prompt=most_prompt_tokens, generated=outgoing.max_tokens)
        failure: Failure | None = None
        for _ in range(MAX_SUBMITS):
            found = await paid(self._endpoint.budget, most, partial(self._answer, outgoing))
            if isinstance(found, Answer):
                self._traffic.answered += 1
                self._traffic.without_usage += found.tokens is None
                return found
            if found.what == "job":
                raise found.error()
            if found.what == "row":
                raise CallError(found.code, found.message)
            self._traffic.retries[found.code] += 1
            failure = found
        assert failure is not None
        raise CallError(failure.code, f"{failure.message} (given up after {MAX_SUBMITS} batches)")

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._provider.close()

    async def _answer(self, outgoing: Outgoing) -> Answer | Failure:
        loop = asyncio.get_running_loop()
        custom_id = custom_id_of(outgoing)
        assert custom_id not in self._waiting, "one request was asked twice at a time"
        waiting = _Waiting(outgoing, loop.create_future())
        self._waiting[custom_id] = waiting
        self._last_post = loop.time()
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await waiting.future

    # --- waves ---

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._settled()
                await self._adopt()
                await self._read_again()
                self._hand_over()
                await self._submit()
                await self._collect()
                self._hand_over()
        except Exception as error:  # noqa: BLE001  whatever it is, those who wait have to hear of it
            for waiting in self._waiting.values():
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            self._waiting.clear()

    async def _settled(self) -> None:
        """Until no further call has come for a while."""
        loop = asyncio.get_running_loop()
        while (left := self._last_post + self._store.settle_s - loop.time()) > 0:
            await asyncio.sleep(left)

    async def _adopt(self) -> None:
        """Find batches whose submission was not seen to succeed: they carry the job's name and their number."""
        lost = {part.number: part for part in self._store.parts if part.state == "intended"}
        if not lost:
            return
        for batch in await self._provider.batches():
            metadata = batch.get("metadata") or {}
            number = metadata.get("sglbatch_part", "")
            if metadata.get("sglbatch_job") == self._store.job and number.isdigit() and int(number) in lost:
                part = lost.pop(int(number))
                part.state, part.batch_id = "submitted", str(batch["id"])
        for part in lost.values():
            part.state, part.custom_ids = "collected", []  # it never reached the provider
        self._store.save()

    async def _read_again(self) -> None:
        """What an earlier process has collected and was killed before it was in the journal is not paid for twice."""
        for part in self._store.parts:
            wanted = {custom_id for custom_id in part.custom_ids if custom_id in self._waiting}
            if part.state != "collected" or part.batch_id is None or part.number in self._taken_in or not wanted:
                continue
            self._taken_in.add(part.number)
            try:
                batch = await self._provider.batch(part.batch_id)
                outcomes = await self._outcomes(batch, wanted)
            except SglbatchError as error:
                if error.code != "unknown-api-model":  # 404: the provider keeps files for a time only
                    raise
                continue
            # What failed then is asked for again now.
            self._found |= {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Answer)}

    def _hand_over(self) -> None:
        for custom_id in [c for c in self._waiting if c in self._found]:
            self._waiting.pop(custom_id).future.set_result(self._found.pop(custom_id))

    async def _submit(self) -> None:
        """Whatever waits and is in no batch that is under way goes into new ones."""
        under_way = {c for part in self._store.parts if part.state == "submitted" for c in part.custom_ids}
        waiting = [(name, waiting.outgoing) for name, waiting in self._waiting.items() if name not in under_way]
        for path, lines in files_of(waiting, max_requests=self._store.max_requests, max_bytes=self._store.max_bytes):
            part = self._store.add([custom_id for custom_id, _ in lines])
            await self._submit_part(part, path, b"".join(line for _, line in lines))
            self._traffic.sent += len(lines)

    async def _submit_part(self, part: Part, path: str, data: bytes) -> None:
        file_id = await self._provider.upload(f"sglbatch-{self._store.job}-{part.number}.jsonl", data)
        metadata = {"sglbatch_job": self._store.job, "sglbatch_part": str(part.number)}
        part.state, part.batch_id = "submitted", await self._provider.submit(file_id, path, metadata)
        self._store.save()

    async def _collect(self) -> None:
        """Wait until a batch has ended, and take in what it has answered."""
        under_way = [part for part in self._store.parts if part.state == "submitted"]
        ended = 0
        for part in under_way:
            batch = await self._provider.batch(part.batch_id)
            if batch.get("status") in ENDED:
                await self._take_in(part, batch)
                ended += 1
        if under_way and not ended:
            if self._store.detach:
                raise BackendStopped(
                    "detached",
                    f"{len(under_way)} batches are with the provider",
                    hint="run the same command again, whenever you like: it collects what has been answered",
                    exit_code=EXIT_RESUMABLE,
                )
            await asyncio.sleep(self._store.poll_s)

    async def _take_in(self, part: Part, batch: Mapping[str, Any]) -> None:
        self._taken_in.add(part.number)
        outcomes = await self._outcomes(batch, set(part.custom_ids))
        if batch.get("status") == "failed" and not outcomes:
            part.state = "collected"
            self._store.save()
            raise SglbatchError(
                "batch-failed",
                f"the provider refuses the batch {part.batch_id}: {redact(_batch_errors(batch), self._key)}",
                hint="run the same command again once the cause is mended; without --batch-api calls go one by one",
                exit_code=EXIT_MODEL,
            )
        message = f"the batch {part.batch_id} ended as {batch.get('status')} without this request's answer"
        missing = Failure(what="again", code="batch-incomplete", message=message)
        self._found |= {custom_id: outcomes.get(custom_id, missing) for custom_id in part.custom_ids}
        part.state = "collected"
        self._store.save()

    async def _outcomes(self, batch: Mapping[str, Any], wanted: set[str]) -> dict[str, Answer | Failure]:
        """What became of the wanted requests, from the batch's files."""
        outcomes: dict[str, Answer | Failure] = {}
        for name in ("output_file_id", "error_file_id"):
            if batch.get(name):
                content = await self._provider.content(str(batch[name]))
                outcomes = read_outcomes(content, wanted, key=self._key) | outcomes
        return outcomes


def _batch_errors(batch: Mapping[str, Any]) -> str:
    errors = (batch.get("errors") or {}).get("data") or []
    return "; ".join(str(error.get("message")) for error in errors) or "no reason given"
