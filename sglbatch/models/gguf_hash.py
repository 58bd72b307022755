"""The content hash of a local GGUF file, computed once for each version of the file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sglbatch.models.cache import cache_folder
from sglbatch.models.fetch import file_sha256


def gguf_sha256(path: Path) -> str:
    """SHA-256 of a file, remembered for its path, size and time of change."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()[:32]
    note = cache_folder("hashes") / key
    if note.is_file():
        return note.read_text()
    sha256 = file_sha256(path)
    partial = note.with_suffix(f".{sha256[:8]}")
    partial.write_text(sha256)
    partial.rename(note)
    return sha256
