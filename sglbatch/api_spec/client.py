"""One endpoint: posts a request until it is answered, its own error is certain, or the job has to end."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sglbatch.api_spec.answers import Answer, Garbled, Tokens, read_answer
from sglbatch.api_spec.bodies import Outgoing
from sglbatch.api_spec.budget import Budget
from sglbatch.api_spec.failures import Failure, backoff_s, of_status, redact
from sglbatch.api_spec.limits import Limits, retry_after_s
from sglbatch.api_spec.model import OPENAI_URL, ApiModel
from sglbatch.api_spec.prices import UnknownPrices
from sglbatch.errors import EXIT_RESUMABLE, BackendStopped, CallError

MAX_TRIES: Final = 6
MAX_LIMIT_TRIES: Final = 100
BREAKER_FAILURES: Final = 20
BUDGET_WAIT_S: Final = 0.05


@dataclass(kw_only=True)
class Endpoint:
    """Where calls go, and how hard.

    Args:
        timeout_s: of one try, from sending it to the last byte of its answer.
        budget: what may be spent.
        backoff_scale: multiplies every wait after a failure.
        breaker_failures: tries that fail one after the other, with no answer between, before the job stops.
    """

    model: ApiModel
    limits: Limits
    budget: Budget = field(default_factory=lambda: Budget(UnknownPrices()))
    timeout_s: float = 120.0
    max_tries: int = MAX_TRIES
    backoff_scale: float = 1.0
    breaker_failures: int = BREAKER_FAILURES


@dataclass(kw_only=True)
class Traffic:
    """Counts of HTTP requests. ``retries``: by the code of what went wrong."""

    sent: int = 0
    answered: int = 0
    without_usage: int = 0
    retries: Counter[str] = field(default_factory=Counter)


class Client:
    """Used inside one event loop only."""

    def __init__(self, endpoint: Endpoint, traffic: Traffic) -> None:
        self._endpoint = endpoint
        self._limits = endpoint.limits
        self._traffic = traffic
        self._key = endpoint.model.key()
        self._http = http_client(endpoint.model, self._key, endpoint.timeout_s)
        self._gate = asyncio.Lock()
        self._rng = random.Random()
        self._failures_in_a_row = 0

    async def post(self, outgoing: Outgoing, *, prompt_tokens: int, most_prompt_tokens: int) -> Answer:
        """Posts until there is an answer.

        Args:
            prompt_tokens: an estimate, for the limit on tokens.
            most_prompt_tokens: what the prompt cannot exceed, for the cap on costs.

        Raises:
            CallError: the call's own failure, after its retries.
            SglbatchError: the job has to end: a refused key, an exhausted quota, nothing but failures.
        """
        tokens = prompt_tokens + outgoing.max_tokens
        most = Tokens(prompt=most_prompt_tokens, generated=outgoing.max_tokens)
        tries = limit_tries = 0
        while True:
            found = await self._paid_try(outgoing, tokens, most)
            if isinstance(found, Answer):
                self._failures_in_a_row = 0
                self._traffic.answered += 1
                self._traffic.without_usage += found.tokens is None
                return found
            if found.what == "job":
                raise found.error()
            if found.what == "row":
                self._failures_in_a_row = 0
                raise CallError(found.code, found.message)
            self._traffic.retries[found.code] += 1
            if found.what == "limit":
                limit_tries += 1
                self._limits.pause(
                    time.monotonic() + self._endpoint.backoff_scale * backoff_s(limit_tries, found, self._rng)
                )
            else:
                tries += 1
                self._count_failure(found)
                if tries < self._endpoint.max_tries:
                    await asyncio.sleep(self._endpoint.backoff_scale * backoff_s(tries, found, self._rng))
            if tries >= self._endpoint.max_tries or limit_tries >= MAX_LIMIT_TRIES:
                raise CallError(found.code, f"{found.message} (given up after {tries + limit_tries} tries)")

    async def _paid_try(self, outgoing: Outgoing, tokens: int, most: Tokens) -> Answer | Failure:
        await self._turn(tokens)
        return await paid(self._endpoint.budget, most, partial(self._try, outgoing, tokens))

    async def close(self) -> None:
        await self._http.close()

    async def _turn(self, tokens: float) -> None:
        """Wait until the limits let a call go; one after the other, so that none overtakes."""
        async with self._gate:
            while (wait_s := self._limits.wait_s(time.monotonic(), tokens)) > 0:
                await asyncio.sleep(wait_s)
            self._limits.start(time.monotonic(), tokens)

    async def _try(self, outgoing: Outgoing, tokens: float) -> Answer | Failure:
        import httpx2
        import openai

        self._traffic.sent += 1
        posted = self._http.post(outgoing.path, cast_to=httpx2.Response, body=outgoing.body)
        try:
            response = await asyncio.wait_for(posted, self._endpoint.timeout_s)
        except (TimeoutError, openai.APITimeoutError):
            return Failure(what="again", code="timeout", message=f"no answer within {self._endpoint.timeout_s:g} s")
        except openai.APIStatusError as error:
            self._limits.learn(time.monotonic(), error.response.headers)
            wait_s = retry_after_s(error.response.headers)
            return of_status(error.status_code, error.response.text, retry_after_s=wait_s, key=self._key)
        except (openai.APIConnectionError, httpx2.HTTPError) as error:
            reason = redact(str(error.__cause__ or error), self._key)
            return Failure(what="again", code="connection", message=f"the connection failed: {reason}")
        return self._read(response.content, response.headers, tokens)

    def _read(self, content: bytes, headers: Mapping[str, str], tokens: float) -> Answer | Failure:
        self._limits.learn(time.monotonic(), headers)
        try:
            answer = read_answer(content)
        except Garbled as error:
            return Failure(what="again", code="garbled", message=str(error))
        if answer.tokens is not None:
            self._limits.settle(time.monotonic(), tokens, answer.tokens.prompt + answer.tokens.generated)
        return answer

    def _count_failure(self, failure: Failure) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._endpoint.breaker_failures:
            raise BackendStopped(
                "endpoint-down",
                f"{self._failures_in_a_row} tries failed one after the other, the last with {failure.code}: "
                f"{failure.message}",
                hint="see that the endpoint is up, then run the same command again: everything answered so far is kept",
                exit_code=EXIT_RESUMABLE,
            )


async def paid(budget: Budget, most: Tokens, ask: Callable[[], Awaitable[Answer | Failure]]) -> Answer | Failure:
    """Asks within the budget, once there is room for what it can cost at most.

    Raises:
        BackendStopped: ``cost-cap``.
    """
    while (reserved := budget.reserve(most)) is None:
        await asyncio.sleep(BUDGET_WAIT_S)
    try:
        found = await ask()
    except BaseException:
        budget.release(reserved)
        raise
    if isinstance(found, Answer):
        budget.settle(reserved, most, found.tokens)
    else:
        budget.release(reserved)
    return found


def http_client(model: ApiModel, key: str | None, timeout_s: float, *, bounded: bool = True) -> Any:
    """The openai library's client without its own retries. No redirects: a key goes nowhere but to its endpoint.

    Args:
        bounded: answers have a limit; the files of batches have none.
    """
    import httpx2
    import openai

    from sglbatch.api_spec.bounded import bound

    async def only_what_belongs(request: httpx2.Request) -> None:
        if key is None:
            request.headers.pop("authorization", None)
        if model.base_url != OPENAI_URL:
            for name in ("openai-organization", "openai-project"):
                request.headers.pop(name, None)

    hooks: dict[str, list[Callable[..., Any]]] = {
        "request": [only_what_belongs],
        "response": [bound] if bounded else [],
    }
    return openai.AsyncOpenAI(
        api_key=key or "none",
        base_url=model.base_url,
        max_retries=0,
        timeout=timeout_s,
        http_client=openai.DefaultAsyncHttpxClient(
            event_hooks=hooks,
            follow_redirects=False,
            timeout=timeout_s,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=256),
        ),
    )
