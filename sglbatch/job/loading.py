"""The backend, made in a thread of its own while rows are read and planned."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from sglbatch.job.signals import StopRequest
from sglbatch.types import Backend

_WAIT_S: Final = 0.1
"""How long a wait takes before signals are looked at."""


class Loading:
    """Starts making a backend at most once; what that raises is raised where the backend is asked for.

    Args:
        load: makes the backend; runs in another thread.
    """

    def __init__(self, load: Callable[[], Backend]) -> None:
        self._load = load
        self._future: Future[Backend] | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sglbatch-load")

    def start(self) -> None:
        if self._future is None:
            self._future = self._pool.submit(self._load)

    @property
    def is_started(self) -> bool:
        return self._future is not None

    @property
    def is_under_way(self) -> bool:
        return self._future is not None and not self._future.done()

    def check(self) -> None:
        """Raises whatever making it has raised."""
        if self._future is not None and self._future.done():
            self._future.result()

    @property
    def backend(self) -> Backend | None:
        """Once it is there."""
        future = self._future
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def wait(self, stop: StopRequest) -> Backend:
        """The backend; starts making it where that has not been done.

        Raises:
            Stopped, or whatever making it has raised.
        """
        self.start()
        assert self._future is not None
        while not wait([self._future], timeout=_WAIT_S).done:
            stop.check()
        return self._future.result()

    def close(self) -> None:
        """Waits for the thread, which cannot be stopped, and closes the backend."""
        self._pool.shutdown(wait=True)
        if self.backend is not None:
            self.backend.close()
