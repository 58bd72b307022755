"""Matching what a model wrote against what the template expects: pure, so that it can be tested against every text.

A model that was asked for one value may have gone on with the template's own text and the values behind it. Those are
taken as far as they are certain to be what further calls would have been asked for; the first doubt ends it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from sglbatch.api_spec.token_logprobs import Told
from sglbatch.types import FinishReason, Following, Generate, NextAsk, TextChoices

FirstTokens = Callable[[str, int], str | None]
"""(text, max_tokens) -> its beginning of at most so many tokens; None where that is not known."""

Longest = Callable[[Generate, str], str | None]
"""(question with a constraint, text) -> the longest beginning of the text that meets the constraint, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """One value found.

    Args:
        end: how much of the text has been read with it, a stop string that ends it not included.
        logprobs: of a select's choices.
        told: the tokens that it was generated with, where their log-probabilities were asked for.
    """

    text: str
    finish: FinishReason
    end: int
    choice: int | None = None
    logprobs: tuple[float, ...] | None = None
    told: tuple[Told, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Matcher:
    """Args:
    first_tokens: cuts a value to its ``max_tokens``.
    longest: cuts a constrained value.
    """

    first_tokens: FirstTokens
    longest: Longest

    def match(
        self, text: str, *, ended: bool, stopped: bool, first: Generate | TextChoices, following: Following
    ) -> list[Taken]:
        """The values of ``first`` and of the calls behind it, as far as ``text`` has them; [] when not even the first
        is certain.

        Args:
            ended: the model came to its own end.
            stopped: it did, or the endpoint ended the text at a stop string of the last question.
        """
        taken: list[Taken] = []
        at = 0
        parts: Following = (NextAsk(name="", question=first), *following)
        last = max(i for i, part in enumerate(parts) if isinstance(part, NextAsk))
        for i, part in enumerate(parts):
            if isinstance(part, str):
                if not text.startswith(part, at):
                    break
                at += len(part)
                continue
            found = self._value(text, at, part.question, stopped if i == last else ended, parts[i + 1 :])
            if found is None or (taken and not found.text):
                break  # an empty value that nobody asked for alone is asked for again
            taken.append(found)
            at = found.end
            if found.finish == "length":
                break  # asked alone, the next call would have had the template's text behind the cut value
        return taken

    def _value(
        self, text: str, at: int, question: Generate | TextChoices, ended: bool, behind: Following
    ) -> Taken | None:
        if isinstance(question, TextChoices):
            return _choice(text, at, question, ended, behind)
        if question.constraint is not None:
            return self._constrained(text, at, question, ended)
        return self._free(text, at, question, ended)

    def _constrained(self, text: str, at: int, question: Generate, ended: bool) -> Taken | None:
        rest = text[at:]
        value = self.longest(question, rest)
        if value is None or self.first_tokens(value, question.max_tokens) != value:
            return None
        if value == rest and not ended:
            return None  # more of it may have been to come
        return Taken(text=value, finish="constraint", end=at + len(value))

    def _free(self, text: str, at: int, question: Generate, ended: bool) -> Taken | None:
        rest = text[at:]
        cut = first_stop(rest, question)
        value = rest if cut is None else rest[:cut]
        within = self.first_tokens(value, question.max_tokens)
        if within is None:
            return None
        if within != value:
            return Taken(text=within, finish="length", end=at + len(within))
        if cut is None and not ended:
            return None
        return Taken(text=value, finish="stop", end=at + len(value))


def first_stop(text: str, question: Generate) -> int | None:
    """Where the first stop string or pattern begins."""
    span = first_stop_span(text, question)
    return None if span is None else span[0]


def first_stop_span(text: str, question: Generate) -> tuple[int, int] | None:
    """(begin, end) of the first stop string or pattern."""
    found = [(place, place + len(stop)) for stop in question.stop if (place := text.find(stop)) >= 0]
    found += [match.span() for pattern in question.stop_regex if (match := re.search(pattern, text))]
    return min(found, default=None)


def _choice(text: str, at: int, question: TextChoices, ended: bool, behind: Following) -> Taken | None:
    """The longest choice that stands here whole."""
    fitting = [choice for choice in question.choices if text.startswith(choice, at)]
    if not fitting:
        return None
    choice = max(fitting, key=len)
    end = at + len(choice)
    next_text = behind[0] if behind and isinstance(behind[0], str) else None
    if next_text is not None:
        whole = text.startswith(next_text, end)
    elif end == len(text):
        whole = ended
    else:
        whole = not (text[end - 1].isalnum() and text[end].isalnum())
    if not whole:
        return None
    return Taken(text=choice, finish="choice", end=end, choice=question.choices.index(choice))
