"""Where a constraint leaves a choice among few texts, and which tokens those are.

In a state from which finitely many texts lead to one common state, the model's choice is among whole texts. Drawing
token by token under a mask takes the first token's probability for the text's, whatever the model thinks of the rest.
So where the texts are few, each is scored as a whole, up to what ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np

from sglbatch.engine.fsm.bitmask import Bitmask, allowed_ids, pack_ids
from sglbatch.engine.fsm.guide import MAX_HEALED_BYTES, Guide, forced_bytes, whole_characters

MAX_ALTERNATIVES: Final = 64
MAX_SCORED_TOKENS: Final = 256
"""Tokens that enter the model to score a choice, at most."""
MAX_NUMBERS: Final = 10
MAX_CHARACTERS: Final = 8
"""More texts that differ in digits alone (days, minutes), or in one character (a digit, the last letter of a bounded
name) are left to the mask: there is little to correct, since a model that is to write an hour seldom thinks of 73, and
scoring all of them costs much."""
MAX_WALKED_BYTES: Final = 4096
"""Bytes of all texts together that are looked at."""

_DIGITS: Final = b"0123456789"

END: Final = -1
"""Stands for the end of the text among states."""

TokenRun: TypeAlias = tuple[int, ...]

_Run = TypeVar("_Run", bytes, TokenRun)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alternative:
    """One of the texts.

    Args:
        tokens: the tokenizer's canonical ones, at least one. With forced text behind the choice they end at the first
            token boundary at or behind the text's end; where the text's last token may be a longer one that goes on
            into what follows, before that token.
        then: the tokens that can come next and end the text, whose probability counts too; None where ``tokens`` say
            it all.
        is_open: the last token is not among ``tokens``: it has to be one of ``then``.
        stops: the answer ends behind it, though the constraint has longer ones.
    """

    tokens: TokenRun
    then: Bitmask | None = None
    is_open: bool = False
    stops: bool = False

    @property
    def head(self) -> TokenRun:
        """The tokens that have to enter the model to score all of it."""
        return self.tokens[:-1] if self.then is None else self.tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that it takes, the one that ends it included."""
        return len(self.tokens) + (self.then is not None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FiniteChoice:
    """What can follow a state: ``common`` and then one of ``alternatives``, of which there are at least two.

    Where alternatives are the beginning of others (only at the end of the answer), each stands for itself and none of
    the longer ones, as in a select.
    """

    common: TokenRun
    alternatives: tuple[Alternative, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that the longest way takes."""
        return len(self.common) + max(a.num_tokens for a in self.alternatives)

    @property
    def may_stop(self) -> bool:
        return any(a.stops for a in self.alternatives)


class FiniteChoices:
    """The finite choices of one guide, remembered by state.

    Args:
        encode: text to the tokenizer's canonical tokens.
    """

    def __init__(self, guide: Guide, encode: Callable[[str], list[int]]) -> None:
        self._guide = guide
        self._encode = encode
        self._found: dict[int, FiniteChoice | None] = {}

    def at(self, state: int) -> FiniteChoice | None:
        """The choice that begins in a state (and at a token boundary); None where the mask decides.

        The nearest common state counts that no token can skip: a token that begins in an alternative and ends behind
        what is sure to follow would make it another choice.
        """
        if state not in self._found:
            choices = (self._choice(state, texts, after) for texts, after in self._meetings(state))
            self._found[state] = next((choice for choice in choices if choice is not None), None)
        return self._found[state]

    def _meetings(self, state: int) -> Iterator[tuple[list[bytes], int]]:
        """The texts that lead from ``state`` to one common state, and that state; nearest first.

        All ways from a state lead through the common one, so the shortest way to the end does, and its cost is the
        lowest of all on the way: what costs most is followed first.
        """
        guide, num_walked = self._guide, 0
        frontier: dict[int, list[bytes]] = {state: [b""]}
        while True:
            if len(frontier) == 1:
                ((after, texts),) = frontier.items()
                if len(texts) > 1:
                    yield texts, after
            ahead = [s for s in frontier if s != END]
            if not ahead:
                return
            state = ahead[0] if len(ahead) == 1 else max(ahead, key=guide.cost)
            texts = frontier.pop(state)
            row = guide.row(state)
            live = np.flatnonzero(row >= 0).tolist()
            num_texts = sum(map(len, frontier.values())) + len(texts) * (len(live) + guide.may_end(state))
            num_walked += len(texts) * len(live)
            if num_texts > MAX_ALTERNATIVES or num_walked > MAX_WALKED_BYTES:
                return
            if guide.may_end(state):
                frontier.setdefault(END, []).extend(texts)
            for byte in live:
                frontier.setdefault(int(row[byte]), []).extend(text + bytes([byte]) for text in texts)

    def _choice(self, state: int, texts: list[bytes], after: int) -> FiniteChoice | None:
        """None where the tokens of some text are not sure."""
        if b"" in texts or _are_numbers(texts) or _are_characters(texts):
            return None
        follows = b"" if after == END else forced_bytes(self._guide, after)[:MAX_HEALED_BYTES]
        found = [self._alternative(state, text, after, follows) for text in sorted(texts)]
        alternatives = [a for a in found if a is not None]
        if len(alternatives) < len(found):
            return None
        runs = [a.tokens for a in alternatives]
        num_common = min(common_len(runs), min(map(len, runs)) - 1)
        rest = tuple(
            Alternative(tokens=a.tokens[num_common:], then=a.then, is_open=a.is_open, stops=a.stops)
            for a in alternatives
        )
        scored = {a.head[: i + 1] for a in rest for i in range(len(a.head))}
        if len(scored) > MAX_SCORED_TOKENS:
            return None
        return FiniteChoice(common=runs[0][:num_common], alternatives=rest)

    def _alternative(self, state: int, text: bytes, after: int, follows: bytes) -> Alternative | None:
        guide = self._guide
        data = whole_characters(text + follows)
        if len(data) < len(text):
            return None
        tokens = self._encode(data.decode())
        pieces = [guide.bytes_of(token) for token in tokens]
        if b"".join(pieces) != data:
            return None  # the tokenizer alters this text
        if after == END or guide.is_final(after):
            return Alternative(tokens=tuple(tokens), stops=not guide.is_final(_walk(guide, state, text)))
        # Where the answer may end behind the text, nobody knows what the program has there, as in a select.
        then = None if guide.may_end(after) else guide.mask(after)
        begin = 0
        for i, piece in enumerate(pieces):
            if begin >= len(text):
                return Alternative(tokens=tuple(tokens[:i]), then=then if begin == len(text) else None)
            if self._goes_on(state, (text + follows)[begin:]):
                is_last = begin + len(piece) >= len(text)
                return self._open_alternative(tokens[:i], state, text[begin:]) if i and is_last else None
            state = guide.advance(state, tokens[i])
            begin += len(piece)
        return Alternative(tokens=tuple(tokens), then=then if begin == len(text) else None)

    def _goes_on(self, state: int, data: bytes) -> bool:
        """A legal token begins with all of ``data`` and is longer."""
        if len(data) > MAX_HEALED_BYTES:
            return False
        pieces = map(self._guide.bytes_of, allowed_ids(self._guide.mask(state)).tolist())
        return any(len(piece) > len(data) and piece.startswith(data) for piece in pieces)

    def _open_alternative(self, tokens: list[int], state: int, rest: bytes) -> Alternative:
        """What is left of the text comes with the next token, which may go on behind it."""
        mask = self._guide.mask(state)
        ids = [i for i in allowed_ids(mask).tolist() if self._guide.bytes_of(i).startswith(rest)]
        return Alternative(tokens=tuple(tokens), then=pack_ids(ids, len(mask)), is_open=True)


def _walk(guide: Guide, state: int, data: bytes) -> int:
    for byte in data:
        state = int(guide.row(state)[byte])
    return state


def _are_numbers(texts: Sequence[bytes]) -> bool:
    """Many of the texts differ in digits alone."""
    alike: dict[bytes, list[bytes]] = {}
    for text in texts:
        alike.setdefault(text.translate(None, _DIGITS), []).append(text)
    most = max(alike.values(), key=len)
    return len(most) > MAX_NUMBERS


def _are_characters(texts: Sequence[bytes]) -> bool:
    """Many of the texts are of one length and differ in a single byte."""
    alike: dict[int, list[bytes]] = {}
    for text in texts:
        alike.setdefault(len(text), []).append(text)
    most = max(alike.values(), key=len)
    same = common_len(most) + common_len([text[::-1] for text in most])
    return len(most) > MAX_CHARACTERS and same >= len(most[0]) - 1


def common_len(runs: Sequence[_Run]) -> int:
    """The length of the longest common beginning."""
    first, last = min(runs), max(runs)
    shared = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(shared, min(len(first), len(last)))
