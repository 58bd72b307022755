"""Turns sampled tokens into text as they come, and finds where it stops."""

from __future__ import annotations

import re
from collections.abc import Sequence


class TextBuffer:
    """Bytes of a generation so far.

    Args:
        token_bytes: the bytes of each token id.
        ids: the tokens, which the caller adds to.
        stop: stop strings; the text ends before the first one that appears.
        stop_regex: patterns; the text ends before the first match. Bytes that are no UTF-8 yet match nothing.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], ids: list[int], stop: tuple[str, ...], stop_regex: tuple[str, ...] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._ids = ids
        self._stops = [s.encode() for s in stop]
        self._patterns = [re.compile(pattern) for pattern in stop_regex]
        self._reach = max((len(s) for s in self._stops), default=1) - 1
        self.never_stops = not stop and not stop_regex
        self._data = bytearray()
        self._ends: list[int] = []

    def stops(self, *, may_stop: bool = True) -> bool:
        """Looks at a token that was added: True if the text now stops, and is cut.

        Where it may not stop, what it ends with never will.
        """
        if self.never_stops:
            return False
        begin = max(0, len(self._data) - self._reach)
        self._spell()
        if not may_stop:
            return False
        found = [at for at in (self._data.find(s, begin) for s in self._stops) if at >= 0]
        found += self._matches()
        if found:
            del self._data[min(found) :]
        return bool(found)

    def _spell(self) -> None:
        """Brings the bytes up to the tokens."""
        for token_id in self._ids[len(self._ends) :]:
            self._data += self._token_bytes[token_id]
            self._ends.append(len(self._data))

    def _matches(self) -> list[int]:
        """Byte offsets at which the patterns match."""
        if not self._patterns:
            return []
        text = self._data.decode("utf-8", "surrogateescape")
        matches = [match for match in (pattern.search(text) for pattern in self._patterns) if match is not None]
        return [len(text[: match.start()].encode("utf-8", "surrogateescape")) for match in matches]

    def certain_text(self) -> str:
        """What will stay whatever comes: without the beginning of a stop string and of a character at the end."""
        self._spell()
        held = max((n for s in self._stops for n in range(1, len(s)) if self._data.endswith(s[:n])), default=0)
        return self._data[: len(self._data) - held].decode("utf-8", "ignore")

    def result(self) -> tuple[str, tuple[int, ...], str]:
        """The text, the ids that lie wholly inside it, and the rest of the text after them."""
        if self.never_stops:
            data = b"".join([self._token_bytes[token_id] for token_id in self._ids])
            return data.decode("utf-8", "replace"), tuple(self._ids), ""
        self._spell()
        num_whole = sum(1 for end in self._ends if end <= len(self._data))
        end = self._ends[num_whole - 1] if num_whole else 0
        tail = self._data[end:].decode("utf-8", "replace")
        return self._data.decode("utf-8", "replace"), tuple(self._ids[:num_whole]), tail
