"""A few calls try something out, and the others wait to see what comes of it. Used inside one event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Trials:
    """``under_way``: calls that are trying."""

    def __init__(self) -> None:
        self.under_way = 0
        self._ended = asyncio.Event()

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Within, a call tries; those that wait look again when it has ended, however it has."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self._ended.set()
            self._ended = asyncio.Event()

    async def settled(self, is_open: Callable[[], bool]) -> None:
        """Waits while it ``is_open`` what the calls that are trying will show."""
        while is_open() and self.under_way:
            await self._ended.wait()
