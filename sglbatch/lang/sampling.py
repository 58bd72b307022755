"""Sampling parameters and how a call's own, the function's and the run's combine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Final

from sglbatch.errors import SglbatchError

CHOICE_DECODING: Final = ("exact", "token")
"""How a constraint's choice among few texts is decided: by whole texts, or token by token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Resolved sampling parameters: the defaults of a run, and what each gen ends up with.

    ``temperature == 0`` is greedy; ``top_k <= 0`` is off; ``stop`` strings end the text and are not part of it;
    ``logprob_start_len < 0`` asks for no log-probabilities of the prompt. The others: ``types.Generate``.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    complete: bool = False
    allow_unenforced: bool = False
    choice_decoding: str = "exact"

    def updated(self, override: SamplingOverride) -> Sampling:
        """These, with every value that ``override`` sets."""
        return _updated(self, override)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOverride:
    """A partial set of sampling parameters; None leaves the outer value.

    Raises:
        SglbatchError: ``invalid-argument``, naming the value that cannot be.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    complete: bool | None = None
    allow_unenforced: bool | None = None
    choice_decoding: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "min_tokens", "n", "logprob_start_len", "top_logprobs_num"):
            _check_int(name, getattr(self, name))
        for name in ("ignore_eos", "return_logprob", "return_text_in_logprobs", "complete", "allow_unenforced"):
            _check_bool(name, getattr(self, name))
        _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check("n", self.n, 1, None)
        _check("top_logprobs_num", self.top_logprobs_num, 0, None)
        _check("frequency_penalty", self.frequency_penalty, -2, 2)
        _check("presence_penalty", self.presence_penalty, -2, 2)
        _check("max_tokens", self.max_tokens, 1, None)
        _check("temperature", self.temperature, 0, None)
        _check("top_p", self.top_p, 0, 1, open_low=True)
        _check("min_p", self.min_p, 0, 1)
        if self.choice_decoding not in (None, *CHOICE_DECODING):
            raise SglbatchError(
                "invalid-argument",
                f"choice_decoding must be one of {', '.join(CHOICE_DECODING)}, not {self.choice_decoding!r}",
            )

    def given(self) -> dict[str, Any]:
        """Only the values that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, base: SamplingOverride) -> SamplingOverride:
        """``base`` with every value that is set here."""
        return replace(base, **self.given())


@lru_cache(maxsize=1024)
def _updated(sampling: Sampling, override: SamplingOverride) -> Sampling:
    """Remembered: every row of a template makes the same few."""
    return replace(sampling, **override.given())


OPTIONS: Final = {
    "max_new_tokens": "max_tokens",
    **{field.name: field.name for field in fields(SamplingOverride) if field.name != "max_tokens"},
}
"""What ``@function``, ``run`` and ``run_batch`` take for their gens, and under which name it is kept here."""


def override_of(options: Mapping[str, Any]) -> SamplingOverride:
    """The override that some of ``OPTIONS`` make.

    Raises:
        SglbatchError: ``invalid-argument``.
    """
    values = {OPTIONS[name]: value for name, value in options.items()}
    values["stop"] = stop_strings(values.get("stop"))
    values["stop_token_ids"] = token_ids(values.get("stop_token_ids"))
    values["stop_regex"] = patterns(values.get("stop_regex"))
    return SamplingOverride(**values)


def token_ids(value: Sequence[int] | None) -> tuple[int, ...] | None:
    """A ``stop_token_ids`` argument as a tuple, the caller's list copied."""
    if value is None:
        return None
    for token_id in value:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise SglbatchError("invalid-argument", f"stop_token_ids must be token ids, not {token_id!r}")
    return tuple(sorted(set(value)))


def patterns(value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """A ``stop_regex`` argument as a tuple of patterns that compile and need at least one character."""
    if value is None:
        return None
    found = (value,) if isinstance(value, str) else tuple(value)
    for pattern in found:
        try:
            empty = re.compile(pattern).search("") is not None
        except (re.error, TypeError) as error:
            raise SglbatchError("invalid-argument", f"stop_regex {pattern!r} is no pattern: {error}") from error
        if empty:
            raise SglbatchError(
                "invalid-argument", f"stop_regex {pattern!r} matches the empty text, so every answer would be empty"
            )
    return found


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """A ``stop`` argument as a tuple of non-empty strings; the caller's list is copied, never kept."""
    if stop is None:
        return None
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise SglbatchError(
                "invalid-argument",
                f"stop must be a non-empty string or a list of them, not {string!r}",
                hint="leave stop out to generate until the end of the sequence",
            )
    return strings


def _check(name: str, value: float | None, low: float, high: float | None, *, open_low: bool = False) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    above = number and (value > low if open_low else value >= low)
    if above and (high is None or value <= high):
        return
    bound = f"{'above' if open_low else 'at least'} {low}" + ("" if high is None else f" and at most {high}")
    raise SglbatchError("invalid-argument", f"{name} must be {bound}, not {value!r}")


def _check_bool(name: str, value: bool | None) -> None:
    if value is not None and not isinstance(value, bool):
        raise SglbatchError("invalid-argument", f"{name} must be True or False, not {value!r}")


def _check_int(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise SglbatchError("invalid-argument", f"{name} must be a whole number, not {value!r}")
