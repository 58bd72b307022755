"""What a job has spent on an API model, over all of its runs: a line on disk for every answer, as it comes.

A folder of checksummed lines, a new file for every process, as the journal is. Answers are paid for whether or not they
were of use, so this is more than what the journal's calls cost.
"""

from __future__ import annotations

import time
from decimal import Decimal
from pathlib import Path
from typing import Final

from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.prices import Prices
from sglbatch.job.records import AppendFile, ReadCounts, encode_record, next_numbered, numbered_files, read_records

SYNC_S: Final = 2.0


class Spending:
    """Args:
    folder: made when the first answer is recorded.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: AppendFile | None = None
        self._synced_at = time.monotonic()
        self.counts = ReadCounts()
        """Of ``earlier``: damaged lines are dollars that are not counted."""

    def earlier(self, prices: Prices) -> Decimal:
        """Dollars of the runs before. What had no price then is counted at the price of now."""
        total = Decimal(0)
        for path in numbered_files(self._folder):
            for _, _, record in read_records(path, self.counts):
                if record["dollars"] is not None:
                    total += Decimal(record["dollars"])
                    continue
                tokens = Tokens(prompt=record["prompt"], generated=record["generated"], cached=record["cached"])
                total += prices.cost(tokens, batch=record["batch"]) or Decimal(0)
        return total

    def add(self, tokens: Tokens, dollars: Decimal | None, *, batch: bool) -> None:
        """Records an answer; safe from a kill at once, from a crash of the machine after ``SYNC_S``."""
        if self._file is None:
            self._file = self._new_file()
        counted = {"prompt": tokens.prompt, "cached": tokens.cached, "generated": tokens.generated}
        paid = {"dollars": None if dollars is None else str(dollars), "batch": batch}
        self._file.append(encode_record({**counted, **paid}))
        self._file.flush()
        if time.monotonic() - self._synced_at > SYNC_S:
            self._file.sync()
            self._synced_at = time.monotonic()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _new_file(self) -> AppendFile:
        self._folder.mkdir(parents=True, exist_ok=True)
        return AppendFile(next_numbered(self._folder))
