"""The files of the Batch API: requests as lines within its limits, and what lines say became of them. No network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sglbatch.api_spec.answers import Answer, Garbled, read_answer
from sglbatch.api_spec.bodies import Outgoing
from sglbatch.api_spec.failures import Failure, of_status, redact

Lines = list[tuple[str, bytes]]
"""(custom_id, line) of each request."""


def custom_id_of(outgoing: Outgoing) -> str:
    """A name for a request of a row: the same in every process."""
    asked = json.dumps([outgoing.path, outgoing.body, outgoing.seed], sort_keys=True)
    return hashlib.blake2b(asked.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def files_of(requests: Iterable[tuple[str, Outgoing]], *, max_requests: int, max_bytes: int) -> list[tuple[str, Lines]]:
    """(endpoint, its lines) of each file, within the limits; a line that is longer than a file may be goes alone.

    Args:
        requests: with their custom_id.
    """
    files: list[tuple[str, Lines]] = []
    sizes: list[int] = []
    for custom_id, outgoing in requests:
        path = f"/v1{outgoing.path}"
        request = {"custom_id": custom_id, "method": "POST", "url": path, "body": outgoing.body}
        line = json.dumps(request, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        room = [
            i
            for i, (other, lines) in enumerate(files)
            if other == path and len(lines) < max_requests and sizes[i] + len(line) <= max_bytes
        ]
        if not room:
            files.append((path, []))
            sizes.append(0)
            room = [len(files) - 1]
        files[room[-1]][1].append((custom_id, line))
        sizes[room[-1]] += len(line)
    return files


def read_outcomes(content: bytes, wanted: Collection[str], *, key: str | None) -> dict[str, Answer | Failure]:
    """What became of the wanted requests, in whatever order; of several lines the first.

    Args:
        key: is taken out of messages.
    """
    outcomes: dict[str, Answer | Failure] = {}
    for line in content.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the request is then missing, and is asked again
        custom_id = value.get("custom_id") if isinstance(value, dict) else None
        if isinstance(custom_id, str) and custom_id in wanted and custom_id not in outcomes:
            outcomes[custom_id] = _outcome(value, key)
    return outcomes


def _outcome(value: Mapping[str, Any], key: str | None) -> Answer | Failure:
    response = value.get("response")
    if not isinstance(response, dict):
        error = value.get("error")
        error = error if isinstance(error, dict) else {}
        message = redact(str(error.get("message", "no answer")), key)
        return Failure(what="again", code=str(error.get("code") or "batch-error"), message=message)
    body = json.dumps(response.get("body"))
    status = response.get("status_code")
    if status != 200:
        return of_status(status if isinstance(status, int) else 500, body, retry_after_s=None, key=key)
    try:
        return read_answer(body.encode())
    except Garbled as error:
        return Failure(what="again", code="garbled", message=str(error))
