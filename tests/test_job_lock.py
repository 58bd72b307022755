"""One process a job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from sglbatch.errors import SglbatchError
from sglbatch.job.lock import LEASE_S, Holder, JobLock, read_holder

HOLD = """
import sys
from pathlib import Path
from sglbatch.job.lock import JobLock
lock = JobLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def holder(*, host: str | None = None, pid: int = 1, renewed_ago_s: float = 0.0) -> Holder:
    now = time.time() - renewed_ago_s
    return Holder(host=host or socket.gethostname(), pid=pid, slurm_job_id="77", started=now, renewed=now)


def write(path: Path, held_by: Holder) -> None:
    path.write_text(json.dumps(asdict(held_by)))


def test_a_live_process_is_refused_and_a_dead_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(SglbatchError) as caught:
            JobLock.acquire(path)
        assert caught.value.code == "job-locked"
        assert f"process {process.pid} on {socket.gethostname()}" in caught.value.message
        process.kill()
    lock = JobLock.acquire(path)
    named = read_holder(path)
    assert named is not None and named.pid == os.getpid()
    lock.release()
    assert read_holder(path) is None


def test_a_second_lock_of_the_same_process_is_refused(tmp_path: Path) -> None:
    lock = JobLock.acquire(tmp_path / "lock")
    with pytest.raises(SglbatchError, match="is running this job"):
        JobLock.acquire(tmp_path / "lock")
    lock.release()
    JobLock.acquire(tmp_path / "lock").release()


def test_another_hosts_lease_is_respected_until_it_runs_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    write(path, holder(host="elsewhere", renewed_ago_s=LEASE_S - 10))
    with pytest.raises(SglbatchError) as caught:
        JobLock.acquire(path)
    assert "process 1 on elsewhere, Slurm job 77" in caught.value.message
    write(path, holder(host="elsewhere", renewed_ago_s=LEASE_S + 1))
    JobLock.acquire(path, settle_s=0.01).release()


def test_renewing_extends_the_lease_and_notices_a_takeover(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = JobLock.acquire(path)
    before = read_holder(path)
    time.sleep(0.01)
    lock.renew()
    assert read_holder(path) == before, "it is young"
    lock.renew(min_age_s=0)
    after = read_holder(path)
    assert before is not None and after is not None and after.renewed > before.renewed
    write(path, holder(host="elsewhere"))
    with pytest.raises(SglbatchError) as caught:
        lock.renew(min_age_s=0)
    assert caught.value.code == "job-lock-lost" and "elsewhere" in caught.value.message
    lock.release()


def test_a_half_written_lock_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text('{"host": "a", "pi')
    JobLock.acquire(tmp_path / "lock").release()
