"""What went wrong with one attempt, and what follows from it. Messages never carry a key."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

from sglbatch.errors import EXIT_MODEL, SglbatchError
from sglbatch.types import ErrorInfo

MAX_MESSAGE: Final = 300
FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 60.0

_KEY_LIKE: Final = re.compile(r"\b(sk|pk|rk|sess|key)-[A-Za-z0-9_*-]{6,}|Bearer\s+\S+")
_QUOTA: Final = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Args:
    what: ``limit`` and ``again`` are tried again, ``row`` is the call's error, ``job`` ends the job.
    retry_after_s: what the endpoint asked to wait.
    """

    what: Literal["limit", "again", "row", "job"]
    code: str
    message: str
    retry_after_s: float | None = None

    def info(self) -> ErrorInfo:
        return ErrorInfo(code=self.code, message=self.message)

    def error(self) -> SglbatchError:
        """For ``job``."""
        return SglbatchError(self.code, self.message, hint=_HINTS.get(self.code), exit_code=EXIT_MODEL)


_HINTS: Final = {
    "bad-api-key": "check the key in the environment variable (--api-key-env); everything answered so far is kept",
    "no-quota": "add credit with the provider and run the same command again: everything answered so far is kept",
    "unknown-api-model": "check --model and --base-url",
}


def of_status(status: int, body: str, *, retry_after_s: float | None, key: str | None) -> Failure:
    """The failure of an HTTP answer that is not 200."""
    error = _error_object(body)
    code = str(error.get("code") or error.get("type") or "")
    message = redact(str(error.get("message") or f"HTTP {status}: {_plain(body)}"), key)
    if status in (401, 403):
        failure = Failure(what="job", code="bad-api-key", message=f"the endpoint refuses the key: {message}")
    elif code in _QUOTA:
        failure = Failure(what="job", code="no-quota", message=f"the provider's quota is exhausted: {message}")
    elif status == 429:
        failure = Failure(what="limit", code="rate-limit", message=message, retry_after_s=retry_after_s)
    elif status == 404:
        failure = Failure(what="job", code="unknown-api-model", message=f"the endpoint does not know this: {message}")
    elif status in (408, 409, 425) or status >= 500:
        failure = Failure(what="again", code="server-error", message=message, retry_after_s=retry_after_s)
    else:
        failure = Failure(what="row", code=_row_code(code, body, message), message=message)
    return failure


def _row_code(code: str, body: str, message: str) -> str:
    if "content_filter" in (code, *body.split('"')):
        return "content-filter"
    if code in ("context_length_exceeded", "exceed_context_size_error") or "exceeds the available context" in message:
        return "prompt-too-long"
    return "refused-request"


def redact(text: str, key: str | None) -> str:
    """``text`` on one line, shortened, without the key or anything that looks like one."""
    text = " ".join(text.split())
    if key:
        text = text.replace(key, "[key]")
    text = _KEY_LIKE.sub("[key]", text)
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def backoff_s(attempt: int, failure: Failure, rng: random.Random) -> float:
    """Seconds to wait after the ``attempt``-th failed try (from 1): what the endpoint asks, else doubling; with jitter
    so that calls that failed together do not come back together."""
    if failure.retry_after_s is not None:
        return failure.retry_after_s * (1 + 0.1 * rng.random())
    return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempt - 1)) * (0.5 + 0.5 * rng.random()))


def _error_object(body: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    error = value.get("error", value) if isinstance(value, dict) else None
    return error if isinstance(error, dict) else {}


def _plain(body: str) -> str:
    """The words of a body that may be an HTML page."""
    return re.sub(r"<[^>]*>", " ", body[:2000])
