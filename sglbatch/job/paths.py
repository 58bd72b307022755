"""Where a job keeps its things: the folder ``OUT.job`` beside the output ``OUT``."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from sglbatch.errors import SglbatchError


@dataclass(frozen=True, kw_only=True)
class JobPaths:
    """The files of the job whose output is ``output``. Making one touches no disk."""

    output: Path

    @property
    def folder(self) -> Path:
        return self.output.with_name(self.output.name + ".job")

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def rows(self) -> Path:
        return self.folder / "rows"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.npz"

    def piece_rows(self, plan: str) -> Path:
        """Of a piece of a larger job: the places of its rows in the whole input, as this plan has them."""
        return self.folder / f"rows-{plan}.npy"

    def output_stat(self) -> tuple[int, int]:
        """[bytes, time of change in ns] of the output."""
        stat = self.output.stat()
        return stat.st_size, stat.st_mtime_ns

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    @property
    def batches(self) -> Path:
        return self.folder / "batches.json"

    @property
    def spending(self) -> Path:
        return self.folder / "spending"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def crash(self) -> Path:
        return self.folder / "crash.txt"


def job_of(output: Path) -> JobPaths:
    """The existing job of ``output``; the job folder itself may be named too.

    Raises:
        SglbatchError: ``no-job`` when there is none.
    """
    if output.name.endswith(".job") and output.is_dir():
        output = output.with_name(output.name.removesuffix(".job"))
    paths = JobPaths(output=output)
    if not paths.manifest.is_file():
        raise SglbatchError(
            "no-job",
            f"there is no job for this output ({paths.folder.name}/manifest.json is not there)",
            where=str(output),
            hint="name the output file of an earlier `sglbatch run`",
        )
    return paths


def move_aside(paths: JobPaths) -> Path | None:
    """Moves ``OUT.job`` (with OUT inside it) to ``OUT.job.old-TIMESTAMP``; None when there is no job."""
    if not paths.folder.exists():
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = paths.folder.with_name(f"{paths.folder.name}.old-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = paths.folder.with_name(f"{paths.folder.name}.old-{stamp}-{number}")
    paths.folder.rename(target)
    if paths.output.exists():
        paths.output.rename(target / paths.output.name)
    return target


def write_atomically(path: Path, data: bytes) -> None:
    """Writes ``path`` so that a reader, or a crash, sees the old or the new content and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a folder's entries (new names, renames) durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
