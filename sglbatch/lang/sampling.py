"""Sampling parameters and how a call's own, the function's and the run's combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sglbatch.errors import SglbatchError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Resolved sampling parameters: the defaults of a run, and what each gen ends up with.

    ``temperature == 0`` is greedy; ``top_k <= 0`` is off; ``stop`` strings end the text and are not part of it.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def updated(self, override: SamplingOverride) -> Sampling:
        """These, with every value that ``override`` sets."""
        return replace(self, **override.given())


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

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens)
        _check_int("top_k", self.top_k)
        _check("max_tokens", self.max_tokens, 1, None)
        _check("temperature", self.temperature, 0, None)
        _check("top_p", self.top_p, 0, 1, open_low=True)
        _check("min_p", self.min_p, 0, 1)

    def given(self) -> dict[str, Any]:
        """Only the values that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, base: SamplingOverride) -> SamplingOverride:
        """``base`` with every value that is set here."""
        return replace(base, **self.given())


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


def _check_int(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise SglbatchError("invalid-argument", f"{name} must be a whole number, not {value!r}")
