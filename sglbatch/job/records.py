"""Checksummed JSON lines: appended whole, read back line by line.

A line is one JSON object whose last member is ``"crc":"8 hex digits"``: the CRC-32 of the same object's bytes
without that member. Any JSON tool reads the lines and may ignore the checksum.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CRC_LEN = len(',"crc":"00000000"}')


def encode_record(record: dict[str, Any]) -> bytes:
    """One line, newline included. ``record`` has at least one member, none of them named ``crc``."""
    assert record and "crc" not in record
    body = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b'%s,"crc":"%08x"}\n' % (body[:-1], zlib.crc32(body))


def decode_record(line: bytes) -> dict[str, Any] | None:
    """The record of a line (without its newline), or None when the line does not match its checksum."""
    body, tail = line[:-_CRC_LEN] + b"}", line[-_CRC_LEN:]
    if tail != b',"crc":"%08x"}' % zlib.crc32(body):
        return None
    record: dict[str, Any] = json.loads(body.decode("utf-8", "surrogatepass"))
    return record


@dataclass(kw_only=True)
class ReadCounts:
    """What reading found: torn is a last line cut short by a kill, corrupt is damage anywhere else."""

    records: int = 0
    torn: int = 0
    corrupt: int = 0


def read_records(path: Path, counts: ReadCounts) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields (offset, length in bytes without the newline, record) of each sound line; counts the others."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            whole = line.endswith(b"\n")
            content = line[:-1] if whole else line
            record = decode_record(content)
            if record is not None:
                counts.records += 1
                yield offset, len(content), record
            elif whole:
                counts.corrupt += 1
            else:
                counts.torn += 1
            offset += len(line)


def numbered_files(folder: Path) -> list[Path]:
    """The ``NNNNNN.jsonl`` files of a folder in order; [] when there is no folder."""
    return sorted(p for p in folder.glob("*.jsonl") if p.stem.isdigit())


def next_numbered(folder: Path) -> Path:
    """The path of the file behind the last of ``numbered_files``."""
    existing = numbered_files(folder)
    return folder / f"{int(existing[-1].stem) + 1 if existing else 1:06d}.jsonl"


class AppendFile:
    """A file that only grows. Lines are buffered until ``flush`` writes them with one call."""

    def __init__(self, path: Path) -> None:
        """Makes ``path``; FileExistsError when it is there."""
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._pending: list[bytes] = []
        self._dirty = False
        self.size = 0

    def append(self, line: bytes) -> int:
        """Buffers ``line``; returns the offset it will have."""
        offset = self.size
        self._pending.append(line)
        self.size += len(line)
        return offset

    def flush(self) -> None:
        """Hands everything buffered to the operating system: from then on a kill of the process loses none of it."""
        if not self._pending:
            return
        data = memoryview(b"".join(self._pending))
        self._pending.clear()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._dirty = True

    def sync(self) -> None:
        """Makes everything flushed durable: from then on a crash of the machine loses none of it."""
        if self._dirty:
            self._dirty = False
            os.fsync(self._fd)

    def close(self) -> None:
        self.flush()
        self.sync()
        os.close(self._fd)
