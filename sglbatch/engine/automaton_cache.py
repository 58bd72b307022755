"""Built automata on disk, in the user's cache: ``automata/KEY.npz``.

A file's name is the hash of what it was built from and of everything that built it: a changed constraint, a changed
compiler or another Python finds nothing and builds anew. Files are written beside their place and renamed, so any
number of processes may share the folder; the least recently used go when it grows too large.
"""

from __future__ import annotations

import importlib.resources
import os
import sys
import tempfile
import unicodedata
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np

from sglbatch.errors import ModelError
from sglbatch.models.cache import cache_dir, cache_folder

FORMAT_VERSION: Final = 1
MAX_BYTES: Final = 64 << 20
MAX_FILES: Final = 2000


class AutomatonCache:
    """An ``AutomatonStore``. Where the cache's folder cannot be read or written, nothing is found and nothing kept.

    Args:
        max_bytes, max_files: of all files together; above either, files are removed down to three quarters.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files

    @property
    def folder(self) -> Path:
        return cache_dir() / "automata"

    def load(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):  # a folder that may only be read is of use too
            os.utime(path)
        return data

    def save(self, key: str, data: bytes) -> None:
        try:
            folder = cache_folder(self.folder.name)
            _write(self._path(key), data)
            self._trim(folder)
        except (OSError, ModelError):
            return

    def _path(self, key: str) -> Path:
        name = blake2b(f"{self._version}\n{key}".encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
        return self.folder / f"{name}.npz"

    @cached_property
    def _version(self) -> str:
        """Of the format, the code and the libraries that decide what is built."""
        code = blake2b(digest_size=20)
        sources = importlib.resources.files("sglbatch.engine.fsm").iterdir()
        for source in sorted(sources, key=lambda source: source.name):
            if source.name.endswith(".py"):
                code.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        python = f"{sys.version_info[:3]} {unicodedata.unidata_version}"
        return f"{FORMAT_VERSION} {code.hexdigest()} {python} {np.__version__}"

    def _trim(self, folder: Path) -> None:
        """Removes the least recently used files; others may be doing the same."""
        files: list[tuple[int, int, str]] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                files.append((stat.st_mtime_ns, stat.st_size, entry.path))
        num_bytes = sum(size for _, size, _ in files)
        if num_bytes <= self._max_bytes and len(files) <= self._max_files:
            return
        num_files = len(files)
        for _, size, path in sorted(files):
            if num_bytes <= self._max_bytes * 3 // 4 and num_files <= self._max_files * 3 // 4:
                break
            Path(path).unlink(missing_ok=True)
            num_bytes -= size
            num_files -= 1


def _write(path: Path, data: bytes) -> None:
    """The whole file or none."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise
