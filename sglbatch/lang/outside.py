"""``sgl.call``: outside Python in a bounded number of threads."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TypeAlias

from sglbatch.lang.calls import OutsideAnswer, OutsideCall
from sglbatch.lang.guard import GUARD
from sglbatch.types import CallPath, ErrorInfo

Waiter: TypeAlias = tuple[int, CallPath]
"""Program id and call path."""


class OutsidePool:
    """Runs at most ``max_running`` calls at a time, each in a daemon thread of its own.

    A call that runs past its timeout is given up: its thread cannot be stopped, but it holds no place and does not
    keep the process alive. Waiting for a place does not count towards the timeout.
    """

    def __init__(self, max_running: int = 8) -> None:
        self._max_running = max_running
        self._queued: deque[tuple[Waiter, OutsideCall]] = deque()
        self._running: dict[Waiter, tuple[OutsideCall, float]] = {}
        self._results: SimpleQueue[tuple[Waiter, OutsideAnswer]] = SimpleQueue()

    @property
    def pending(self) -> bool:
        return bool(self._queued or self._running)

    def submit(self, key: Waiter, call: OutsideCall) -> None:
        self._queued.append((key, call))
        self._start()

    def poll(self, timeout_s: float) -> list[tuple[Waiter, OutsideAnswer]]:
        """Calls that have ended, failed or run out of time; waits up to ``timeout_s`` for the first."""
        done = []
        item = self._next(timeout_s)
        while item is not None:
            key, answer = item
            if self._running.pop(key, None) is not None:
                done.append((key, answer))
            item = self._next(0)
        done += self._expired()
        self._start()
        return done

    def _next(self, timeout_s: float) -> tuple[Waiter, OutsideAnswer] | None:
        try:
            return self._results.get(timeout=timeout_s) if timeout_s else self._results.get_nowait()
        except Empty:
            return None

    def _expired(self) -> list[tuple[Waiter, OutsideAnswer]]:
        now = time.monotonic()
        late = [(key, call) for key, (call, start) in self._running.items() if now - start > call.timeout_s]
        for key, _ in late:
            del self._running[key]
        return [(key, _failed(call, "call-timeout", f"no answer within {call.timeout_s:g} s")) for key, call in late]

    def _start(self) -> None:
        while self._queued and len(self._running) < self._max_running:
            key, call = self._queued.popleft()
            self._running[key] = (call, time.monotonic())
            threading.Thread(target=self._work, args=(key, call), daemon=True, name=call.name).start()

    def _work(self, key: Waiter, call: OutsideCall) -> None:
        self._results.put((key, _execute(call)))


def _execute(call: OutsideCall) -> OutsideAnswer:
    try:
        value = call.function(*call.args)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the author's code may raise anything; it is the call's error
        return _failed(call, "call-failed", f"{type(error).__name__}: {error}")
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return _failed(call, "call-result", f"the result is not a JSON value: {error}")
    if GUARD in text or "\\ue0f0" in text:
        return _failed(call, "guard-character", "the result contains the character U+E0F0, which is reserved")
    return OutsideAnswer(json.loads(text))


def _failed(call: OutsideCall, code: str, message: str) -> OutsideAnswer:
    return OutsideAnswer(error=ErrorInfo(code=code, message=message, call=call.name))
