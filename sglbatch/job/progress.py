"""What a user sees while a job runs: every stage by name, and never half a minute of silence.

On a terminal a bar; elsewhere a line at every stage and every 30 s. Everything goes to one stream (stderr).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

from tqdm import tqdm

from sglbatch.planner.render import escape_controls

LINE_EVERY_S: Final = 30.0


class Progress:
    """One at a time: ``stage`` opens one, ``advance`` moves it. Also keeps the seconds of every stage.

    Args:
        stream: where to write; a bar is drawn only on a terminal, for a stage with a known total.
        line_every_s: seconds between lines where there is no terminal.
    """

    def __init__(self, stream: TextIO, *, line_every_s: float = LINE_EVERY_S) -> None:
        self._stream = stream
        self._line_every_s = line_every_s
        self._bar: tqdm[Any] | None = None
        self._stage = ""
        self._total: int | None = None
        self._done = 0
        self._unit = ""
        self._last_line = 0.0
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, *, label: str, total: int | None = None, unit: str = "row") -> Iterator[None]:
        """A stage. ``name`` is the report's key in ``seconds`` (stages may share one), ``label`` is shown."""
        self._stage, self._total, self._done, self._unit = label, total, 0, unit
        start = self._last_line = time.monotonic()
        if total is not None and self._stream.isatty():
            self._bar = tqdm(desc=label, total=total, unit=unit, file=self._stream, dynamic_ncols=True, leave=False)
        else:
            self._write(f"{label} ...")
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
            if self._bar is not None:
                self._bar.close()
                self._bar = None
            self._stage = ""

    def advance(self, count: int = 1, **numbers: str) -> None:
        """``count`` more units are done; ``numbers`` are shown beside (hit rate, tokens/s)."""
        self._done += count
        if self._bar is not None:
            if numbers:
                self._bar.set_postfix(numbers, refresh=False)
            self._bar.update(count)
            return
        now = time.monotonic()
        if now - self._last_line >= self._line_every_s:
            self._last_line = now
            of = f" of {self._total:,}" if self._total is not None else ""
            rest = "".join(f", {name} {value}" for name, value in numbers.items())
            self._write(f"{self._stage}: {self._done:,}{of} {self._unit}s{rest}")

    def note(self, text: str) -> None:
        """A line of its own, above the bar if there is one; control characters are escaped."""
        self._write("\n".join(escape_controls(line) for line in text.split("\n")))

    def _write(self, line: str) -> None:
        if self._bar is not None:
            tqdm.write(line, file=self._stream)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()
