"""A thread that does small regular duties (fsync, lease) while the main thread is busy in a long step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from sglbatch.errors import SglbatchError


class Heartbeat:
    """Calls every duty each ``period_s`` seconds. The first failure ends the thread; ``check`` raises it in the caller.

    Duties may raise OSError (a full disk) or SglbatchError (a lost lock).
    """

    def __init__(self, duties: Sequence[Callable[[], None]], *, period_s: float = 1.0) -> None:
        self._duties = duties
        self._period_s = period_s
        self._over = threading.Event()
        self._failure: OSError | SglbatchError | None = None
        self._thread = threading.Thread(target=self._beat, name="sglbatch-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _beat(self) -> None:
        while not self._over.wait(self._period_s):
            try:
                for duty in self._duties:
                    duty()
            except (OSError, SglbatchError) as failure:
                self._failure = failure
                return
