"""An answer's bytes, up to a limit: a server that streams without end is to cost neither memory nor the whole timeout.

Imported where the client library is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import httpx2

MAX_ANSWER_BYTES: Final = 64 << 20


class BoundedStream(httpx2.AsyncByteStream):
    """Raises httpx2.ReadError once there is more than ``most`` bytes."""

    def __init__(self, stream: Any, most: int) -> None:
        self._stream = stream
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > self._most:
                raise httpx2.ReadError(f"the answer has more than {self._most >> 20} MiB")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()

    @property
    def elapsed(self) -> Any:
        """The time until it was closed, as the wrapped stream takes it."""
        return self._stream.elapsed


async def bound(response: httpx2.Response) -> None:
    """Holds a response to ``MAX_ANSWER_BYTES``: a hook of the client's."""
    response.stream = BoundedStream(response.stream, MAX_ANSWER_BYTES)
