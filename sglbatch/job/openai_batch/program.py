"""The program that answers one line of a Batch API file; its parameters are the line's members."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from sglbatch.errors import CallError
from sglbatch.lang.function import function
from sglbatch.lang.primitives import gen, role
from sglbatch.lang.state import ProgramState

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "n", "stop")

_WITHOUT_EFFECT: Final = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier"})
"""They say something about the request and change no answer. (``seed``: every row has its own, from the job's.)"""

_NEUTRAL: Final[Mapping[str, Any]] = {"stream": False, "logprobs": False, "echo": False, "best_of": 1, "suffix": None}
"""What else may be given as long as it asks for nothing."""


@function
def answer(s: ProgramState, method: Any = "POST", url: Any = None, body: Any = None) -> str:
    """The line's answers as a JSON list of texts."""
    if method != "POST":
        raise CallError("invalid_method", f"method must be POST, not {method!r}")
    if not isinstance(body, dict):
        raise CallError("invalid_body", "body must be an object")
    if url == CHAT:
        sampling = _sampling(body, {"messages", "max_completion_tokens", "response_format"})
        for message in _messages(body):
            s += role(*message)
        s += role("assistant", gen("answer", **sampling))
    elif url == COMPLETIONS:
        sampling = _sampling(body, {"prompt"})
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise CallError("invalid_prompt", "prompt must be a text that is not empty")
        s += prompt
        s += gen("answer", **sampling)
    else:
        raise CallError("unsupported_endpoint", f"url must be {CHAT} or {COMPLETIONS}, not {url!r}")
    found = s["answer"]
    return json.dumps(found if isinstance(found, list) else [found])


def _sampling(body: dict[str, Any], others: set[str]) -> dict[str, Any]:
    """Arguments of ``gen``; whatever cannot be honoured is refused."""
    given = {name: value for name, value in body.items() if value is not None}
    known = {*_SAMPLING, *_WITHOUT_EFFECT, "seed", "max_tokens", *others}
    for name, value in given.items():
        if name not in known and not (name in _NEUTRAL and _NEUTRAL[name] == value):
            raise CallError("unsupported_parameter", f"the parameter {name}={value!r} is not supported here")
    sampling: dict[str, Any] = {name: given[name] for name in _SAMPLING if name in given}
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    sampling |= {} if most is None else {"max_tokens": most}
    if "response_format" in others and "response_format" in given:
        sampling |= _format(given["response_format"])
    return sampling


def _format(response_format: Any) -> dict[str, Any]:
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": json.dumps({"type": "object"})}
    if kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if isinstance(schema, dict):
            return {"json_schema": json.dumps(schema)}
    raise CallError("invalid_response_format", f"response_format is not understood: {str(response_format)[:200]}")


def _messages(body: dict[str, Any]) -> list[tuple[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CallError("invalid_messages", "messages must be a list that is not empty")
    return [_message(message) for message in messages]


def _message(message: Any) -> tuple[str, str]:
    name = message.get("role") if isinstance(message, dict) else None
    if name not in _ROLES:
        raise CallError("invalid_messages", f"a message has the role {name!r}; known are {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, str):
        return _ROLES[name], content
    if not isinstance(content, list):
        raise CallError("invalid_messages", "a message's content must be a text or a list of parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise CallError("unsupported_content", f"a message has a part of type {kind!r}; only text is supported")
        texts.append(part["text"])
    return _ROLES[name], "".join(texts)
