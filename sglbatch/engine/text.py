"""Turns sampled tokens into text as they come, and finds stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence


class TextBuffer:
    """Bytes of a generation so far.

    Args:
        token_bytes: the bytes of each token id.
        stop: stop strings; the text ends before the first one that appears.
    """

    def __init__(self, token_bytes: Sequence[bytes], stop: tuple[str, ...]) -> None:
        self._token_bytes = token_bytes
        self._stops = [s.encode() for s in stop]
        self._reach = max((len(s) for s in self._stops), default=1) - 1
        self._data = bytearray()
        self._ends: list[int] = []
        self._ids: list[int] = []

    def append(self, token_id: int) -> bool:
        """Adds a token; True if a stop string is now in the text, which is cut before it."""
        begin = max(0, len(self._data) - self._reach)
        self._data += self._token_bytes[token_id]
        self._ids.append(token_id)
        self._ends.append(len(self._data))
        found = [at for at in (self._data.find(s, begin) for s in self._stops) if at >= 0]
        if found:
            del self._data[min(found) :]
        return bool(found)

    def result(self) -> tuple[str, tuple[int, ...], str]:
        """The text, the ids that lie wholly inside it, and the rest of the text after them."""
        num_whole = sum(1 for end in self._ends if end <= len(self._data))
        end = self._ends[num_whole - 1] if num_whole else 0
        tail = self._data[end:].decode("utf-8", "replace")
        return self._data.decode("utf-8", "replace"), tuple(self._ids[:num_whole]), tail
