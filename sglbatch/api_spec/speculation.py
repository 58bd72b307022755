"""Whether it pays to let one call go on into the values behind its own. No clock, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from sglbatch.types import Generate, NextAsk, TextCall, TextChoices

PROBES: Final = 4
"""Calls that may go ahead before the first of them has shown what it brings."""

WINDOW: Final = 16

OUTPUT_WEIGHT: Final = 4.0
"""What a generated token costs, in prompt tokens, where prices are not known."""


@dataclass(slots=True)
class Record:
    """What has been seen at one place of a template.

    Args:
        gains: of the latest calls, in prompt tokens' worth; below 0 is a loss.
        most_used: the most tokens that a call generated beyond its own value and that were of use.
    """

    started: int = 0
    gains: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    most_used: int = 0
    off: bool = False


class Speculation:
    """Decides for each place of a template by what its rows have shown. State is kept by place, never across places.

    Args:
        output_weight: the price of a generated token over that of a prompt token.
        probes: see ``PROBES``.
    """

    def __init__(self, output_weight: float = OUTPUT_WEIGHT, *, probes: int = PROBES) -> None:
        self._probes = probes
        self._output_weight = output_weight
        self._records: dict[Hashable, Record] = {}
        self.saved_prompt_tokens = 0
        """Prompt tokens of the calls that did not have to be made."""
        self.used_tokens = 0
        """Generated ahead and used as values."""
        self.wasted_tokens = 0
        """Generated ahead and not used as values; the template's own text among it."""

    def begin(self, place: Hashable) -> bool:
        """Whether a call at this place should go ahead now."""
        record = self._records.setdefault(place, Record())
        if record.off or (record.started >= self._probes and (not record.gains or sum(record.gains) < 0)):
            return False
        record.started += 1
        return True

    def budget(self, place: Hashable, most: int) -> int:
        """Tokens to generate ahead: ``most``, or what has been of use until now with some room."""
        record = self._records.setdefault(place, Record())
        if len(record.gains) < PROBES or not record.most_used:
            return most
        return room_ahead(most, record.most_used)

    def is_open(self, place: Hashable) -> bool:
        """As many calls as may have gone ahead, and not all of them have shown what it brings: the next may wait."""
        record = self._records.get(place, Record())
        return record.started >= self._probes and len(record.gains) < min(self._probes, WINDOW) and not record.off

    def record(
        self, place: Hashable, *, saved_prompt_tokens: int, used_tokens: int, reach: int, wasted_tokens: int
    ) -> None:
        """What one call has brought.

        Args:
            saved_prompt_tokens: of calls not needed any more; negative where one had to be made again.
            used_tokens: tokens of the values taken ahead.
            reach: tokens generated beyond the first value up to the end of the last one taken.
            wasted_tokens: generated beyond the first value and no part of a value.
        """
        record = self._records.setdefault(place, Record())
        record.gains.append(saved_prompt_tokens - self._output_weight * wasted_tokens)
        record.most_used = max(record.most_used, reach)
        if len(record.gains) >= PROBES and sum(record.gains) < 0:
            record.off = True
        self.saved_prompt_tokens += max(0, saved_prompt_tokens)
        self.used_tokens += used_tokens
        self.wasted_tokens += wasted_tokens

    @property
    def num_off(self) -> int:
        """Places where it did not pay."""
        return sum(record.off for record in self._records.values())


def room_ahead(most: int, used: int) -> int:
    """Tokens to ask for ahead where ``used`` have been of use."""
    return min(most, used + used // 4 + 4)


def place_of(call: TextCall) -> Hashable:
    """Calls of different rows at the same place of a template are equal in this: what is asked, not the texts."""
    behind = tuple(_shape(part.name, part.question) for part in call.following if isinstance(part, NextAsk))
    return (call.chat, len(call.messages), _shape(call.name, call.question), behind)


def _shape(name: str, question: Generate | TextChoices) -> Hashable:
    return (name, question.max_tokens if isinstance(question, Generate) else None)
