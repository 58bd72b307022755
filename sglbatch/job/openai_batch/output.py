"""Finished rows in the output format of the Batch API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglbatch.data import open_rows
from sglbatch.job.openai_batch.program import CHAT
from sglbatch.job.paths import write_atomically


def write_batch_output(
    requests: Path, rows: Path, target: Path, *, model: str, created: int, limit: int | None = None
) -> int:
    """Writes a line for each line of ``requests``: a response, or an error object. Returns how many are errors.

    Args:
        rows: the job's output, JSONL in the order of ``requests``.
        created: seconds since the epoch, for the responses.
        limit: only so many lines were run.
    """
    num_failed = 0
    lines: list[bytes] = []
    for value in _lines(requests, rows, model, created, limit):
        num_failed += value["error"] is not None
        lines.append(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    write_atomically(target, b"".join(lines))
    return num_failed


def count_failed(target: Path) -> int:
    """Error objects of an output."""
    return sum(json.loads(line)["error"] is not None for line in target.read_bytes().splitlines())


def _lines(requests: Path, rows: Path, model: str, created: int, limit: int | None) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    with open_rows((str(requests),), limit=limit) as asked, rows.open(encoding="utf-8") as answered:
        for number, (request, line) in enumerate(zip(asked, answered, strict=True), start=1):
            values = request.values or {}
            custom_id = values.get("custom_id")
            error = json.loads(line)["_error"]
            if not isinstance(custom_id, str) or not custom_id:
                error = error or {"code": "invalid_custom_id", "message": "custom_id must be a text that is not empty"}
                custom_id = None
            elif custom_id in seen:
                error = {"code": "duplicate_custom_id", "message": "an earlier line has the same custom_id"}
            else:
                seen.add(custom_id)
            name = f"batch_req_{number}"
            if error is not None:
                shown = {"code": error["code"], "message": error["message"]}
                yield {"id": name, "custom_id": custom_id, "response": None, "error": shown}
                continue
            body = _body(json.loads(line), str(values["url"]), name, model, created)
            response = {"status_code": 200, "request_id": name, "body": body}
            yield {"id": name, "custom_id": custom_id, "response": response, "error": None}


def _body(row: dict[str, Any], url: str, name: str, model: str, created: int) -> dict[str, Any]:
    finish = "length" if row["_finish"].get("answer") == "length" else "stop"
    usage = row["_usage"]
    choices: list[dict[str, Any]] = []
    for index, text in enumerate(json.loads(row["_return"])):
        content = {"message": {"role": "assistant", "content": text}} if url == CHAT else {"text": text}
        choices.append({"index": index, **content, "logprobs": None, "finish_reason": finish})
    return {
        "id": name,
        "object": "chat.completion" if url == CHAT else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["generated_tokens"],
            "total_tokens": usage["prompt_tokens"] + usage["generated_tokens"],
        },
    }
