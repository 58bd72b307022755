"""Images and videos as a prompt holds them: by the hash of their content.

No backend takes them yet. Their place is kept all the same: in a program's operations, and in the prefix tree and the
calls' keys, where equal content is equal and different content is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal

import numpy as np

from sglbatch.errors import SglbatchError

_NUM_IDS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """One image or video. ``num_frames`` belongs to a video: how many of its frames are looked at."""

    kind: Literal["image", "video"]
    digest: str
    num_frames: int | None = None

    @property
    def key_ids(self) -> tuple[int, ...]:
        """What stands for it among a prompt's token ids: negative numbers, which are no token's."""
        content = f"{self.kind} {self.num_frames} {self.digest}".encode()
        digest = blake2b(content, digest_size=4 * _NUM_IDS).digest()
        numbers = np.frombuffer(digest, dtype="<u4") >> 1
        return tuple((-1 - numbers.astype(np.int64)).tolist())


def read_media(kind: Literal["image", "video"], source: str | Path | bytes, *, num_frames: int | None = None) -> Media:
    """Hashes a file's content, or bytes.

    Raises:
        SglbatchError: ``media-not-found``, ``invalid-argument``.
    """
    if isinstance(source, bytes):
        content = source
    elif isinstance(source, (str, Path)):
        try:
            content = Path(source).read_bytes()
        except OSError as error:
            reason = error.strerror or str(error)
            raise SglbatchError("media-not-found", f"the {kind} {str(source)!r} cannot be read: {reason}") from error
    else:
        raise SglbatchError("invalid-argument", f"sgl.{kind} takes a path or bytes, not {type(source).__name__}")
    return Media(kind=kind, digest=blake2b(content, digest_size=16).hexdigest(), num_frames=num_frames)
