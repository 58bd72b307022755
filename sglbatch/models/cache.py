"""The user's model cache: where it lies, one process at a time, folders that are whole or not there.

$SGLBATCH_CACHE or ~/.cache/sglbatch     0700
  models/NAME/       a converted model in Hugging Face format
  downloads/         package files that a user placed there by hand
  hashes/            content hashes of local GGUF files, by path, size and time
  automata/          regexes' automata that took long to build
  locks/
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sglbatch.errors import ModelError

Report = Callable[[str], None]

_VARIABLE: Final = "SGLBATCH_CACHE"


def cache_dir() -> Path:
    """The cache's root; it need not exist yet."""
    value = os.environ.get(_VARIABLE)
    return Path(value).expanduser().absolute() if value else Path.home() / ".cache" / "sglbatch"


def cache_folder(name: str) -> Path:
    """A folder of the cache, with mode 0700; so is the cache itself, unless the user made it otherwise.

    Raises:
        ModelError: ``cache-not-writable``.
    """
    folder = cache_dir() / name
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o700)
    except OSError as error:
        raise ModelError(
            "cache-not-writable",
            f"the model cache cannot be used: {error.strerror}",
            hint=f"set {_VARIABLE} to a folder that you can write to",
            where=str(folder),
        ) from error
    return folder


@contextmanager
def exclusive(name: str, *, report: Report) -> Iterator[None]:
    """Holds the cache's lock ``name``; waits for another process that holds it. A process that dies lets go."""
    path = cache_folder("locks") / f"{name}.lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that is preparing {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_folder(target: Path, build: Callable[[Path], None]) -> None:
    """Lets ``build`` fill an empty folder beside ``target``, which then takes that name in one step.

    Call it with the lock of ``target`` held: what an earlier process left unfinished is removed.
    """
    for leftover in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial"))
    try:
        build(partial)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(target.parent)


def require_space(folder: Path, num_bytes: int) -> None:
    """Raises ModelError ``no-space`` when the file system of ``folder`` has less than ``num_bytes`` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes:
        raise ModelError(
            "no-space",
            f"{num_bytes / 1e6:,.0f} MB are needed in the model cache and {free_bytes / 1e6:,.0f} MB are free",
            hint=f"free some space, or set {_VARIABLE} to a folder on another disk",
            where=str(folder),
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
