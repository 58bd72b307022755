"""How long answers may become, before anybody has given one: from their constraint, their limit, and the prompt itself.

A few-shot prompt shows what it wants: the values behind the same words ("Name: ") in its own examples. Models write
answers like those, so their lengths say more than ``max_tokens`` does. That is a guess, and the range is wide for it:
from half of the shortest example to twice the longest.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from sglbatch.api_spec.constraints import compiled, most_bytes
from sglbatch.api_spec.tokens import Counter
from sglbatch.engine.fsm.automaton import Automaton
from sglbatch.engine.fsm.schema import SchemaConstraint
from sglbatch.errors import ConstraintError
from sglbatch.types import Constraint, Following, Generate, TextChoices

MIN_EXAMPLES: Final = 2
MIN_CUE_CHARS: Final = 3
SHORT_SHARE: Final = 16
TYPICAL_SHARE: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of a value."""

    short: int
    typical: int
    long: int


def lengths(question: Generate | TextChoices, before: str, counter: Counter) -> Lengths:
    """How long an answer may be.

    Args:
        before: the text that it continues.
    """
    if isinstance(question, TextChoices):
        counts = sorted(counter.count(choice) for choice in question.choices)
        return Lengths(short=counts[0], typical=counts[len(counts) // 2], long=counts[-1])
    longest = None if question.constraint is None else most_bytes(question.constraint)
    most = question.max_tokens if longest is None else min(question.max_tokens, max(1, longest))
    least = 1 if question.constraint is None else max(1, min(most, counter.count(shortest(question.constraint))))
    shown = [counter.count(value) for value in example_values(before, question.stop)]
    if len(shown) >= MIN_EXAMPLES:
        short, typical, long = min(shown) // 2, sum(shown) // len(shown), 2 * max(shown)
    elif question.constraint is None:
        short, typical, long = most // SHORT_SHARE, most // TYPICAL_SHARE, most
    else:
        short, typical, long = least, 2 * least, most
    short = min(most, max(least, short))
    long = max(short, min(most, long))
    return Lengths(short=short, typical=min(long, max(short, typical)), long=long)


@lru_cache(maxsize=4096)
def example_values(before: str, stop: Sequence[str]) -> tuple[str, ...]:
    """What stands behind earlier lines that begin as the last one does, up to a stop string or the line's end."""
    *_, cue = before.rsplit("\n", 1)
    cue = "\n" + cue.rstrip()
    if len(cue) <= MIN_CUE_CHARS:
        return ()
    ends = tuple(stop) or ("\n",)
    values = []
    for rest in ("\n" + before).split(cue)[1:-1]:
        value = rest[: min((at for end in ends if (at := rest.find(end)) >= 0), default=len(rest))].strip()
        values += [value] if value else []
    return tuple(values)


def shows_how_it_goes_on(before: str, following: Following) -> bool:
    """Whether the prompt's own examples have the texts that follow, so that a model is likely to write them."""
    cues = [part.strip() for part in following if isinstance(part, str) and part.strip()]
    return bool(cues) and all(before.count(cue) >= MIN_EXAMPLES for cue in cues)


@lru_cache(maxsize=256)
def shortest(constraint: Constraint) -> str:
    """A shortest text that a constraint allows; "{}" where there is no telling."""
    if constraint.kind == "regex":
        return _shortest_match(compiled(constraint.source))
    try:
        return SchemaConstraint(json.loads(constraint.source), allow_unenforced=True).shortest()
    except ConstraintError:
        return "{}"  # the plan has its own check of constraints


def _shortest_match(automaton: Automaton) -> str:
    paths: dict[int, bytes] = {automaton.start: b""}
    queue = deque([automaton.start])
    while queue:
        state = queue.popleft()
        if automaton.accepting[state]:
            return paths[state].decode("utf-8", "ignore")
        # Letters and digits first: among equally short texts they read best.
        for byte in (*range(97, 123), *range(48, 58), *range(256)):
            target = int(automaton.table[state, byte])
            if target >= 0 and target not in paths:
                paths[target] = paths[state] + bytes([byte])
                queue.append(target)
    return ""
