"""One process a job: a lock file that names its holder and carries a lease.

On one host ``flock`` decides (the kernel drops it with the process). Across hosts, where a shared file system may not
carry ``flock``, the lease decides: its holder renews it, and it may be taken over once it has run out.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from sglbatch.errors import SglbatchError

LEASE_S: Final = 60.0
RENEW_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a job. Times are seconds since the epoch."""

    host: str
    pid: int
    slurm_job_id: str | None
    started: float
    renewed: float
    lease_s: float = LEASE_S

    def describe(self) -> str:
        slurm = f", Slurm job {self.slurm_job_id}" if self.slurm_job_id else ""
        return f"process {self.pid} on {self.host}{slurm}"

    def is_live(self, now: float) -> bool:
        """On this host: whether the process exists. Elsewhere: whether the lease has not run out."""
        if self.host == socket.gethostname():
            return _process_exists(self.pid)
        return now < self.renewed + self.lease_s


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_holder(path: Path) -> Holder | None:
    """Who the lock file names, None when nobody (or no file)."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return _parse(content)


def _parse(content: bytes) -> Holder | None:
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return None  # empty: released; half written: its writer died in the act


class JobLock:
    """Held from ``acquire`` to ``release``; ``renew`` every second or so keeps the lease."""

    def __init__(self, path: Path, fd: int, holder: Holder) -> None:
        self._path = path
        self._fd = fd
        self._holder = holder
        self._mutex = threading.Lock()

    @staticmethod
    def acquire(path: Path, *, settle_s: float = 1.0) -> JobLock:
        """Takes the lock at once or not at all.

        Args:
            settle_s: how long to look for a rival after taking over from another host.

        Raises:
            SglbatchError: ``job-locked``, naming the holder.
        """
        now = time.time()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            previous = _take(path, fd, now)
            holder = Holder(
                host=socket.gethostname(),
                pid=os.getpid(),
                slurm_job_id=os.environ.get("SLURM_JOB_ID"),
                started=now,
                renewed=now,
            )
            lock = JobLock(path, fd, holder)
            lock._write(holder)
            if previous is not None and previous.host != holder.host:
                time.sleep(settle_s)
                lock._check_ours()
        except BaseException:
            os.close(fd)
            raise
        return lock

    def renew(self, *, min_age_s: float = RENEW_S) -> None:
        """Extends the lease, unless that was done less than ``min_age_s`` ago.

        Raises:
            SglbatchError: ``job-lock-lost`` when another process has taken the job over.
        """
        with self._mutex:
            if self._fd < 0 or time.time() < self._holder.renewed + min_age_s:
                return
            self._check_ours()
            self._holder = Holder(**{**asdict(self._holder), "renewed": time.time()})
            self._write(self._holder)

    def release(self) -> None:
        with self._mutex:
            if self._fd >= 0:
                os.ftruncate(self._fd, 0)
                os.close(self._fd)
                self._fd = -1

    def _check_ours(self) -> None:
        named = read_holder(self._path)
        if named is None or (named.host, named.pid, named.started) != (
            self._holder.host,
            self._holder.pid,
            self._holder.started,
        ):
            taken = (
                f"taken over by {named.describe()}" if named else "taken away (the lock file was changed or removed)"
            )
            raise SglbatchError(
                "job-lock-lost",
                f"this job was {taken}",
                where=str(self._path),
                hint="nothing is lost: let the other process finish, or run the same command again",
            )

    def _write(self, holder: Holder) -> None:
        data = json.dumps(asdict(holder)).encode()
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))


def _take(path: Path, fd: int, now: float) -> Holder | None:
    """Gets past the lock's previous holder or raises; returns who that was."""
    flocked = True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _held(path, read_holder(path)) from None
    except OSError:
        flocked = False  # a file system without flock: only process and lease can tell
    previous = read_holder(path)
    if previous is None:
        return None
    here = previous.host == socket.gethostname()
    if previous.is_live(now) and not (here and (flocked or previous.pid == os.getpid())):
        raise _held(path, previous)
    return previous


def _held(path: Path, holder: Holder | None) -> SglbatchError:
    who = holder.describe() if holder else "another process"
    return SglbatchError(
        "job-locked",
        f"{who} is running this job",
        where=str(path.parent),
        hint="wait for it, watch it with `sglbatch status`, or choose another output with -o",
    )
