"""What a job knows of its batches: on disk, so that another process can go on with them."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sglbatch.errors import SglbatchError

VERSION = 1


@dataclass(kw_only=True)
class Part:
    """One batch. The intent is written before the request is sent; ``batch_id`` comes with its answer.

    Args:
        number: stands with the job's name in the batch's metadata, so that it is found again without ``batch_id``.
        custom_ids: of its requests.
        state: ``intended``, ``submitted`` or ``collected``.
    """

    number: int
    custom_ids: list[str]
    state: Literal["intended", "submitted", "collected"] = "intended"
    batch_id: str | None = None


@dataclass(kw_only=True)
class BatchStore:
    """Args:
    path: the file; None keeps nothing.
    detach: stop once everything is submitted.
    poll_s: seconds between looks at a batch.
    settle_s: a wave goes out when no further call has come for so long.
    max_requests, max_bytes: of one file.
    """

    path: Path | None
    detach: bool = False
    poll_s: float = 30.0
    settle_s: float = 1.0
    max_requests: int = 50_000
    max_bytes: int = 190_000_000
    job: str = ""
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self._load(self.path)
        self.job = self.job or secrets.token_hex(8)

    def add(self, custom_ids: list[str]) -> Part:
        """A part that is about to be submitted, safely on disk."""
        part = Part(number=len(self.parts), custom_ids=custom_ids)
        self.parts.append(part)
        self.save()
        return part

    def save(self) -> None:
        if self.path is None:
            return
        value = {"version": VERSION, "job": self.job, "parts": [asdict(part) for part in self.parts]}
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with temporary.open("w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def _load(self, path: Path) -> None:
        try:
            value: dict[str, Any] = json.loads(path.read_bytes())
            if value["version"] != VERSION:
                raise ValueError(f"version {value['version']}")
            self.job = value["job"]
            self.parts = [Part(**part) for part in value["parts"]]
        except (ValueError, KeyError, TypeError) as error:
            raise SglbatchError(
                "job-damaged",
                f"the state of the job's batches cannot be read ({error})",
                where=str(path),
                hint="move it away to submit what is not answered yet anew; what the old batches answer is then lost",
            ) from error
