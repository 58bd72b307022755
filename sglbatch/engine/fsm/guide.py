"""What the engine asks of a constraint, whatever it was compiled to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.bitmask import Bitmask, allowed_ids

MAX_HEALED_BYTES: Final = 128
"""How far before the end of a forced run a token may begin that spans the end: longer tokens are blanks or dashes."""


class Guide(Protocol):
    """Walks a constraint token by token. A state is one integer, so forking is free.

    Every state reached by allowed tokens has an allowed token of its own or is final.
    """

    start: int

    def mask(self, state: int) -> Bitmask:
        """The tokens allowed in ``state``; end-of-sequence tokens exactly when the text may end."""

    def advance(self, state: int, token_id: int) -> int:
        """The state after a token that stands for text; -1 when the token leaves the language."""

    def is_final(self, state: int) -> bool:
        """The text may end here and nothing can follow."""

    def may_end(self, state: int) -> bool: ...

    def row(self, state: int) -> npt.NDArray[np.int32]:
        """int32 [256], the state after each byte, -1 for none."""

    def cost(self, state: int) -> int:
        """Bytes of the shortest way to an end; where a length is limited beside a pattern, maybe a few too little."""

    def free_text(self, state: int) -> bool:
        """Inside a string that the constraint does not bound."""

    def completing_mask(self, state: int) -> Bitmask:
        """Those tokens of ``mask`` that lie on a shortest way to the end; all of them where none does."""

    def bytes_of(self, token_id: int) -> bytes: ...


class Followed(NamedTuple):
    """What a run of tokens does to a state.

    Attributes:
        state: the one after it.
        is_free: all of it goes on with the free string that the text before it ends with, if it does.
        free_len: bytes of a free string that it ends with, see ``Guide.free_text``.
    """

    state: int
    is_free: bool
    free_len: int


class Forced:
    """What must follow a state of one guide, as bytes and as tokens. Remembered by state.

    Args:
        encode: text to the tokenizer's canonical tokens.
    """

    def __init__(self, guide: Guide, encode: Callable[[str], list[int]]) -> None:
        self._guide = guide
        self._encode = encode
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._followed: dict[tuple[int, tuple[int, ...]], Followed] = {}

    def tokens(self, state: int) -> tuple[int, ...]:
        """The canonical tokens of the forced run, healed: from the first token on that a longer legal token could
        begin before and end behind the run's end, the choice is the model's."""
        if state not in self._tokens:
            self._tokens[state] = self._healed(state)
        return self._tokens[state]

    def follow(self, state: int, run: tuple[int, ...]) -> Followed:
        """``follow`` of the guide, remembered."""
        key = state, run
        if key not in self._followed:
            self._followed[key] = follow(self._guide, state, run)
        return self._followed[key]

    def text(self, state: int) -> str:
        """Everything that must follow, in whole characters."""
        return whole_characters(forced_bytes(self._guide, state)).decode()

    def completion(self, state: int) -> tuple[int, ...]:
        """Tokens of a shortest way to an end: a begun character byte by byte, then canonical ones."""
        data = shortest_completion(self._guide, state)
        tokens: list[int] = []
        while data and 0x80 <= data[0] <= 0xBF:
            ids = allowed_ids(self._guide.mask(state)).tolist()
            tokens.append(next(i for i in ids if self._guide.bytes_of(i) == data[:1]))
            state, data = self._guide.advance(state, tokens[-1]), data[1:]
        return (*tokens, *self._encode(data.decode()))

    def _healed(self, state: int) -> tuple[int, ...]:
        run = forced_bytes(self._guide, state)
        data = whole_characters(run)
        if not data:
            return ()
        tokens = self._encode(data.decode())
        if b"".join(map(self._guide.bytes_of, tokens)) != data:
            return ()  # the tokenizer alters this text: it is left to the model, byte for byte
        states = [state]
        for token in tokens:
            states.append(self._guide.advance(states[-1], token))
        ends = self._guide.is_final(states[-1])
        if ends:
            return tuple(tokens)
        left = len(run) - len(data)
        keep = len(tokens)
        for i in range(len(tokens) - 1, -1, -1):
            left += len(self._guide.bytes_of(tokens[i]))
            if left > MAX_HEALED_BYTES:
                break
            if self._spans(states[i], left):
                keep = i
        return tuple(tokens[:keep])

    def _spans(self, state: int, num_bytes: int) -> bool:
        """A token is legal here that goes on behind the next ``num_bytes``."""
        ids = allowed_ids(self._guide.mask(state))
        return any(len(self._guide.bytes_of(i)) > num_bytes for i in ids.tolist())


def follow(guide: Guide, state: int, run: tuple[int, ...]) -> Followed:
    """Where tokens lead from a state that allows them."""
    is_free, free_len = True, 0
    for token in run:
        state, data = guide.advance(state, token), guide.bytes_of(token)
        if not guide.free_text(state):
            is_free, free_len = False, 0
        elif b'"' in data:
            is_free, free_len = False, len(data)
        else:
            free_len += len(data)
    return Followed(state, is_free, free_len)


def forced_bytes(guide: Guide, state: int) -> bytes:
    """The bytes that must follow ``state``."""
    found = bytearray()
    while not guide.may_end(state):
        row = guide.row(state)
        live = np.flatnonzero(row >= 0)
        if len(live) != 1:
            break
        byte = int(live[0])
        found.append(byte)
        state = int(row[byte])
    return bytes(found)


def shortest_completion(guide: Guide, state: int) -> bytes:
    """The bytes of a shortest way to an end."""
    found = bytearray()
    while guide.cost(state):
        row = guide.row(state)
        live = np.flatnonzero(row >= 0).tolist()
        byte = min(live, key=lambda b: guide.cost(int(row[b])))
        found.append(byte)
        state = int(row[byte])
    return bytes(found)


def whole_characters(data: bytes) -> bytes:
    """The beginning of ``data`` that is UTF-8; nothing where a character is cut at its start."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start]
    return data
