"""What a program's function waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from sglbatch.lang.stream import Stream


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """A variable will not change any more by what has been added."""

    stream: Stream
    name: str

    def __call__(self) -> bool:
        return self.stream.settled(self.name)


@dataclass(frozen=True, slots=True, eq=False)
class Drained:
    """All that was added has been carried out, or the branch has failed."""

    stream: Stream

    def __call__(self) -> bool:
        return self.stream.drained or self.stream.error is not None


Ready: TypeAlias = Callable[[], bool]
