"""Stopping a run from outside: at the next safe place on the first signal, at once on the second."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from sglbatch.errors import EXIT_RESUMABLE

EXIT_CODES: Final = {
    signal.SIGINT: 128 + signal.SIGINT,
    signal.SIGTERM: 128 + signal.SIGTERM,
    signal.SIGUSR1: EXIT_RESUMABLE,
}


class Stopped(Exception):
    """The run ends here, resumable; not an error of anybody's."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.reason = reason


class StopRequest:
    """Remembers that somebody wants the run to end. ``check`` is called where stopping is safe.

    Args:
        time_limit_s: a stop of its own after so many seconds.
    """

    def __init__(self, *, time_limit_s: float | None = None) -> None:
        self._received: signal.Signals | None = None
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._time_limit_s = time_limit_s

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            os._exit(EXIT_CODES[signal.Signals(number)])
        self._received = signal.Signals(number)
        os.write(2, f"\n{self._received.name}: stopping after this step (again to stop at once)\n".encode())

    def check(self) -> None:
        """Raises Stopped when it is time to stop."""
        if self._received is not None:
            raise Stopped(EXIT_CODES[self._received], f"stopped by {self._received.name}")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise Stopped(EXIT_RESUMABLE, f"stopped by the time limit of {self._time_limit_s:g} s")


@contextmanager
def listening(stop: StopRequest) -> Iterator[None]:
    """Within, SIGINT, SIGTERM and SIGUSR1 go to ``stop``. Main thread only."""
    previous = {number: signal.signal(number, stop.receive) for number in EXIT_CODES}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
