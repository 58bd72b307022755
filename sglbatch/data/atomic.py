"""A file that appears whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sglbatch.errors import SglbatchError


def check_place(path: Path) -> None:
    """Raises SglbatchError cannot-write when a file ``path`` cannot be made or replaced."""
    target = path.resolve()
    if target.is_dir():
        raise _cannot_write(path, "it is a directory", hint="name a file in it")
    if target.exists() and not target.is_file():
        raise _cannot_write(path, "it is not a regular file", hint="name a file")
    if not target.parent.is_dir():
        folder = target.parent if path.is_symlink() else path.parent
        raise _cannot_write(path, f"there is no directory {folder}", hint=f"mkdir -p '{folder}'")
    probe = _beside(target)
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except OSError as error:
        raise _os_error(path, error) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, beside ``path``; on success synced and renamed to ``path``, else removed.

    A symbolic link stays: its target is replaced.

    Raises:
        SglbatchError: cannot-write.
    """
    target = path.resolve()
    temporary = _beside(target)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise _os_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    """Names can be 255 bytes long, so the target's goes in shortened."""
    return target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.tmp")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _os_error(path: Path, error: OSError) -> SglbatchError:
    return _cannot_write(
        path, error.strerror or str(error), hint="check permissions and free space, or name another file with -o"
    )


def _cannot_write(path: Path, reason: str, *, hint: str) -> SglbatchError:
    return SglbatchError("cannot-write", f"{path} cannot be written: {reason}", hint=hint)
