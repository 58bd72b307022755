"""Files made readable at any place: decompressed and piped inputs copied to disk, few files open at once."""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TypeVar, cast

from sglbatch.data.paths import Codec
from sglbatch.errors import SglbatchError

_CHUNK_BYTES: Final = 1 << 20
_MAX_OPEN: Final = 32


class _Closes(Protocol):
    def close(self) -> Any: ...


C = TypeVar("C", bound=_Closes)


class OpenFiles:
    """Keeps the 32 most recently used files open, so that a thousand inputs need no thousand descriptors."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, _Closes] = OrderedDict()

    def get(self, path: Path, opener: Callable[[], C]) -> C:
        """The object ``opener`` made for ``path``; valid until the next ``get``."""
        if path not in self._open:
            while len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[path] = opener()
        self._open.move_to_end(path)
        return cast(C, self._open[path])

    def read(self, path: Path, start: int, end: int) -> bytes:
        """Bytes [start, end) of ``path``.

        Raises:
            SglbatchError: input-changed, when the file is shorter than it was.
        """
        file = self.get(path, lambda: _Descriptor(path))
        data = file.read(start, end)
        if len(data) != end - start:
            raise SglbatchError(
                "input-changed",
                f"{path} became shorter while it was read",
                hint="run the same command again when the file is complete",
            )
        return data

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


class _Descriptor:
    """Positioned reads instead of a memory map: a file cut short under us is an error, not a SIGBUS."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(path, error) from error

    def read(self, start: int, end: int) -> bytes:
        parts: list[bytes] = []
        while start < end and (part := os.pread(self._fd, end - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        os.close(self._fd)


def unreadable(name: str | Path, error: OSError) -> SglbatchError:
    return SglbatchError(
        "unreadable-file",
        f"{name} cannot be read: {error.strerror or error}",
        hint="check the file and its permissions",
    )


class Spool:
    """A folder for copies of inputs, made on first use and removed by ``close`` or at the end of the process.

    A killed process leaves its ``rows-*`` folder in ``parent``; the owner of ``parent`` may empty it.
    """

    def __init__(self, parent: Path | None) -> None:
        self._parent = parent
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_files = 0

    def new_path(self) -> Path:
        """A path for one more file. Raises OSError when the folder cannot be made."""
        if self._folder is None:
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(prefix="rows-", dir=self._parent)
        self._num_files += 1
        return Path(self._folder.name) / str(self._num_files)

    def copy(self, name: str, chunks: Iterable[bytes]) -> Path:
        """Write ``chunks`` to a new file.

        Raises:
            SglbatchError: cannot-spool; and what iterating ``chunks`` raises.
        """
        try:
            path = self.new_path()
            with path.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
        except OSError as error:
            raise cannot_spool(name, error) from error
        return path

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def cannot_spool(name: str, error: OSError) -> SglbatchError:
    return SglbatchError(
        "cannot-spool",
        f"{name} has to be copied to disk and cannot be: {error.strerror or error}",
        hint="free some space, or set TMPDIR to a folder with more",
    )


def stream_chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk


def decompressed_chunks(name: str, path: Path, codec: Codec) -> Iterator[bytes]:
    """The content of a .gz or .zst file (several members or frames in one file count).

    Raises:
        SglbatchError: bad-compressed, unreadable-file.
    """
    try:
        source = path.open("rb")
    except OSError as error:
        raise unreadable(name, error) from error
    with source:
        try:
            if codec == "gzip":
                yield from stream_chunks(cast(BinaryIO, gzip.GzipFile(fileobj=source)))
            else:
                import pyarrow as pa

                yield from stream_chunks(pa.CompressedInputStream(source, "zstd"))
        except (OSError, EOFError, zlib.error) as error:
            raise SglbatchError(
                "bad-compressed",
                f"{name} cannot be decompressed: {error}",
                hint="the file is damaged, not complete, or not what its name says; make it again",
            ) from error


def content_hash(path: Path) -> str:
    """blake2b (128 bits, hex) of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for chunk in stream_chunks(file):
            digest.update(chunk)
    return digest.hexdigest()
