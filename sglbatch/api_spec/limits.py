"""How fast calls may go: requests and tokens a minute, and pauses that the endpoint asks for. No clock in here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

BURST_S: Final = 1.0
"""What may go at once is what the rate allows in this time: a minute then holds at most 1/60 more than its limit."""


@dataclass(slots=True)
class Bucket:
    """A rate that is spent evenly: a token bucket. ``per_min`` None is no limit."""

    per_min: float | None = None
    level: float = 0.0
    at: float = 0.0

    def set_rate(self, per_min: float, now: float) -> None:
        """Take over the limit that the endpoint or the user names."""
        if self.per_min is None:
            self.level, self.at = self._burst(per_min), now
        self.per_min = per_min

    def wait_s(self, now: float, amount: float) -> float:
        """Seconds until ``amount`` may be spent; an amount above the burst waits for a full bucket and overdraws it."""
        if self.per_min is None:
            return 0.0
        self._fill(now)
        missing = min(amount, self._burst(self.per_min)) - self.level
        return max(0.0, missing * 60 / self.per_min)

    def spend(self, now: float, amount: float) -> None:
        if self.per_min is not None:
            self._fill(now)
            self.level -= amount

    def _fill(self, now: float) -> None:
        assert self.per_min is not None
        self.level = min(self._burst(self.per_min), self.level + (now - self.at) * self.per_min / 60)
        self.at = now

    @staticmethod
    def _burst(per_min: float) -> float:
        return max(1.0, per_min * BURST_S / 60)


class Limits:
    """What the endpoint allows. Every method takes the time, in seconds of any one clock.

    Args:
        requests_per_min, tokens_per_min: the user's own limits; the endpoint's count where they are lower.
    """

    def __init__(self, *, requests_per_min: float | None = None, tokens_per_min: float | None = None) -> None:
        self._user = {"requests": requests_per_min, "tokens": tokens_per_min}
        self._buckets = {"requests": Bucket(), "tokens": Bucket()}
        self._paused_until = 0.0
        for name, limit in self._user.items():
            if limit is not None:
                self._buckets[name].set_rate(limit, 0.0)

    def wait_s(self, now: float, tokens: float) -> float:
        """Seconds until a call of so many tokens may start; 0 when it may now."""
        waits = [self._buckets["requests"].wait_s(now, 1), self._buckets["tokens"].wait_s(now, tokens)]
        return max(self._paused_until - now, *waits, 0.0)

    def start(self, now: float, tokens: float) -> None:
        """A call of so many tokens starts."""
        self._buckets["requests"].spend(now, 1)
        self._buckets["tokens"].spend(now, tokens)

    def settle(self, now: float, estimated: float, used: float) -> None:
        """A call has used other than the estimated tokens."""
        self._buckets["tokens"].spend(now, used - estimated)

    def pause(self, until: float) -> None:
        """No call starts before."""
        self._paused_until = max(self._paused_until, until)

    def learn(self, now: float, headers: Mapping[str, str]) -> None:
        """Takes in the ``x-ratelimit-*`` headers of an answer. What cannot be read is left out."""
        for name, bucket in self._buckets.items():
            limit = _number(headers.get(f"x-ratelimit-limit-{name}"))
            if limit:
                own = self._user[name]
                bucket.set_rate(limit if own is None else min(own, limit), now)
            remaining = _number(headers.get(f"x-ratelimit-remaining-{name}"))
            reset_s = duration_s(headers.get(f"x-ratelimit-reset-{name}", ""))
            if remaining is not None and remaining < 1 and reset_s is not None:
                self.pause(now + min(reset_s, 60.0))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """What ``retry-after-ms`` or ``retry-after`` (in seconds) asks for."""
    millis = _number(headers.get("retry-after-ms"))
    if millis is not None:
        return millis / 1000
    return _number(headers.get("retry-after"))


def duration_s(text: str) -> float | None:
    """``6m0s``, ``1.5s``, ``20ms``, ``1h2m`` or plain seconds, in seconds."""
    if (plain := _number(text)) is not None:
        return plain
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    if not re.fullmatch(r"(\d+(\.\d+)?(ms|h|m|s))+", text):
        return None
    return sum(float(number) * units[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)(ms|h|m|s)", text))


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch(r"\d{1,12}(\.\d+)?", text) else None
