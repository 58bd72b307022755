"""The job's folder while a process works on it: locked, with its journal open and a heartbeat going."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from types import TracebackType

from sglbatch.errors import SglbatchError
from sglbatch.job.heartbeat import Heartbeat
from sglbatch.job.journal import Journal
from sglbatch.job.lock import JobLock
from sglbatch.job.manifest import Manifest
from sglbatch.job.paths import JobPaths, move_aside
from sglbatch.job.progress import Progress


class JobFolder:
    """``with JobFolder(...) as folder``. On leaving, everything is synced and the lock given back.

    A folder that this process made and left without a single call is removed again when the job ends in a user's error,
    so that a mistake leaves nothing behind.

    Attributes:
        previous: the manifest of the job that was there; None for a new job.
        journal: open for reading and writing.
    """

    previous: Manifest | None
    journal: Journal

    def __init__(self, paths: JobPaths, *, restart: bool, progress: Progress) -> None:
        self.paths = paths
        self._restart = restart
        self._progress = progress
        self._stack = ExitStack()
        self._fresh = False

    def __enter__(self) -> JobFolder:
        with ExitStack() as stack:
            lock = self._locked_folder()
            stack.callback(lock.release)
            self.previous = Manifest.load(self.paths.manifest) if self.paths.manifest.exists() else None
            self.journal = Journal(self.paths.journal)
            stack.callback(self.journal.close)
            self.heartbeat = stack.enter_context(Heartbeat([self.journal.sync, lock.renew]))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        useless = self._fresh and isinstance(error, SglbatchError) and not len(self.journal)
        self._stack.close()
        if useless:
            shutil.rmtree(self.paths.folder)

    def _locked_folder(self) -> JobLock:
        if self.paths.folder.exists() and not self.paths.folder.is_dir():
            raise SglbatchError(
                "no-folder",
                "a file lies where the job's folder has to be",
                where=str(self.paths.folder),
                hint="move it away, or name another output with -o",
            )
        if self._restart and self.paths.folder.exists():
            JobLock.acquire(self.paths.lock).release()  # a job that runs is not moved away under its process
            self._progress.note(f"the old job is now {move_aside(self.paths)}")
        self._fresh = not self.paths.folder.exists()
        self.paths.folder.mkdir(exist_ok=True)
        return JobLock.acquire(self.paths.lock)
