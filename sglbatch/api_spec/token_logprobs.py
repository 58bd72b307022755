"""Log-probabilities as endpoints name them: tokens by their text, some also by their id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

MAX_ID: Final = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A token of an answer.

    Args:
        piece: its text as bytes; a token may end inside a character.
        token_id: where the endpoint names it.
        top: the likeliest tokens in its place, likeliest first.
    """

    piece: bytes
    logprob: float
    token_id: int | None = None
    top: tuple[Told, ...] = ()


def read_told(logprobs: Any) -> tuple[Told, ...]:
    """The tokens of a choice's ``logprobs``, in the form of chat completions or in that of the older completions.

    () where any of them is not of that form: half of an answer's log-probabilities would be taken for all.
    """
    if not isinstance(logprobs, dict):
        return ()
    entries = logprobs.get("content")
    told = [_told(entry) for entry in (entries if isinstance(entries, list) else _older(logprobs))]
    return tuple(token for token in told if token is not None) if None not in told else ()


def between(told: Sequence[Told], text: str, begin: int, end: int | None) -> tuple[Told, ...] | None:
    """The tokens that have a part of ``text[begin:end]``; without an end also those behind the text.

    None where the tokens do not spell ``text[:end]``.
    """
    wanted = text[:end].encode("utf-8", "replace")
    place = b"".join(token.piece for token in told).find(wanted)
    if place < 0:
        return None
    first = place + len(text[:begin].encode("utf-8", "replace"))
    last = None if end is None else place + len(wanted)
    found = []
    at = 0
    for token in told:
        if (last is None or at < last) and at + len(token.piece) > first:
            found.append(token)
        at += len(token.piece)
    return tuple(found)


def _told(entry: Any) -> Told | None:
    if not isinstance(entry, dict):
        return None
    token, logprob = entry.get("token"), entry.get("logprob")
    if not isinstance(token, str) or not isinstance(logprob, int | float) or isinstance(logprob, bool):
        return None
    if not isfinite(logprob):
        return None
    top = entry.get("top_logprobs")
    named = [_told(other) for other in top] if isinstance(top, list) else []
    likeliest = sorted((other for other in named if other is not None), key=lambda other: -other.logprob)
    token_id = entry.get("id")
    is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < MAX_ID
    return Told(
        piece=_piece(token, entry.get("bytes")),
        logprob=float(logprob),
        token_id=token_id if is_id else None,
        top=tuple(likeliest),
    )


def _piece(token: str, data: Any) -> bytes:
    """``token`` shows what is no character as something else, where ``data`` has the bytes."""
    if isinstance(data, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in data):
        return bytes(data)
    return token.encode("utf-8", "replace")


def _older(logprobs: Mapping[str, Any]) -> list[Any]:
    """The older form, lists of equal length, as entries of the newer one."""
    tokens, own, top = (logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
    if not isinstance(tokens, list) or not isinstance(own, list) or len(tokens) != len(own):
        return []
    tops = top if isinstance(top, list) and len(top) == len(tokens) else [None] * len(tokens)
    return [
        {"token": token, "logprob": logprob, "top_logprobs": _named(likeliest)}
        for token, logprob, likeliest in zip(tokens, own, tops, strict=True)
    ]


def _named(likeliest: Any) -> list[dict[str, Any]]:
    found = likeliest if isinstance(likeliest, dict) else {}
    return [{"token": token, "logprob": logprob} for token, logprob in found.items()]
