"""The journal: every finished call of a job, so that no call is ever made twice.

Segments ``NNNNNN.jsonl`` of checksummed lines {"key", "kind", "value", "crc"}. Every process starts a new segment and
never touches an older one; the index of all of them (key -> place on disk) is in memory, the values are not.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Final

from sglbatch.job.paths import sync_folder
from sglbatch.job.records import AppendFile, ReadCounts, decode_record, encode_record, numbered_files, read_records

SEGMENT_BYTES: Final = 256 * 2**20


class Journal:
    """A ``lang.CallMemo`` on disk. ``put`` may be called from any thread; one writer process a folder (the job's lock).

    Args:
        folder: made when the first call is recorded.
        segment_bytes: a new segment starts when the current one reaches this size.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._segments: list[Path] = []
        self._index: dict[str, tuple[int, int, int]] = {}  # key -> (segment, offset, length)
        self._readers: dict[int, int] = {}  # segment -> file descriptor
        self._current: AppendFile | None = None
        self._lock = threading.Lock()
        self.counts = ReadCounts()
        for path in numbered_files(folder):
            self._segments.append(path)
            for offset, length, record in read_records(path, self.counts):
                self._index[record["key"]] = (len(self._segments) - 1, offset, length)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: str) -> bool:
        return key in self._index

    def get(self, key: str) -> dict[str, Any] | None:
        """The recorded value, or None. A record damaged since it was read counts as not there."""
        with self._lock:
            place = self._index.get(key)
            if place is None:
                return None
            segment, offset, length = place
            if self._current is not None and segment == len(self._segments) - 1:
                self._current.flush()
            record = decode_record(os.pread(self._reader(segment), length, offset))
            if record is None:
                self.counts.corrupt += 1
                del self._index[key]
                return None
            value: dict[str, Any] = record["value"]
            return value

    def put(self, key: str, value: dict[str, Any], *, kind: str = "call") -> None:
        """Records a finished call; ``flush`` makes it safe from a kill, ``sync`` from a crash of the machine."""
        line = encode_record({"key": key, "kind": kind, "value": value})
        with self._lock:
            current = self._current
            if current is None or current.size >= self._segment_bytes:
                current = self._start_segment()
            offset = current.append(line)
            self._index[key] = (len(self._segments) - 1, offset, len(line) - 1)

    def flush(self) -> None:
        with self._lock:
            if self._current is not None:
                self._current.flush()

    def sync(self) -> None:
        with self._lock:
            if self._current is not None:
                self._current.flush()
                self._current.sync()

    def close(self) -> None:
        with self._lock:
            if self._current is not None:
                self._current.close()
                self._current = None
            for fd in self._readers.values():
                os.close(fd)
            self._readers.clear()

    def _start_segment(self) -> AppendFile:
        if self._current is not None:
            self._current.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        number = int(self._segments[-1].stem) + 1 if self._segments else 1
        path = self._folder / f"{number:06d}.jsonl"
        self._current = AppendFile(path)
        self._segments.append(path)
        sync_folder(self._folder)
        return self._current

    def _reader(self, segment: int) -> int:
        if segment not in self._readers:
            self._readers[segment] = os.open(self._segments[segment], os.O_RDONLY | os.O_CLOEXEC)
        return self._readers[segment]
