"""Whatever the network and the provider do, every row is answered once and no answered call is made again."""

from __future__ import annotations

import bisect
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglbatch.api_spec.limits import BURST_S, Limits
from sglbatch.errors import SglbatchError
from sglbatch.job.report import Report
from tests.api_world import SHORT, ApiWorld
from tests.fault_proxy import Fault, FaultProxy

FAULTS: tuple[Fault, ...] = ("500", "reset", "cut", "html", "garbage", "no-choices", "429")


def bad_network(seed: int, rate: float, slow: int = 0) -> list[Fault | None]:
    """One fault in ``1 / rate`` requests, bursts of 429, and a few answers that come too late."""
    rng = random.Random(seed)
    plan: list[Fault | None] = [rng.choice(FAULTS) if rng.random() < rate else None for _ in range(10_000)]
    for start in rng.sample(range(20, 2000), 10):
        plan[start : start + 15] = ["429"] * 15
    for i in range(slow):
        plan[5 + 17 * i] = "slow" if i % 2 else "drip"
    return plan


def job(folder: Path, proxy: FaultProxy, rows: int, *, limits: Limits | None = None) -> tuple[ApiWorld, Report]:
    world = ApiWorld(folder=folder, base_url=proxy.base_url, concurrency=8, endpoint={"timeout_s": 8.0})
    world.limits = limits or Limits()
    world.write(SHORT, [{"q": f"{i}"} for i in range(rows)])
    return world, world.run()


def check_answered_once(world: ApiWorld, proxy: FaultProxy, rows: int) -> None:
    output = world.output()
    assert len(output) == rows and all(row["_error"] is None for row in output)
    answered = proxy.answered()
    assert len(answered) == rows
    assert set(answered.values()) == {1}, "a call was made again after it had been answered"


def test_faults_cost_retries_and_no_rows(api_url: str, tmp_path: Path) -> None:
    plan = bad_network(1, 0.2, slow=2)
    with FaultProxy(upstream=api_url.removesuffix("/v1"), fault=plan.__getitem__).running() as proxy:
        world, report = job(tmp_path, proxy, 100)
        check_answered_once(world, proxy, 100)
        faults = proxy.number - 100
    assert faults > 20 and sum(report.api["retries"].values()) == faults
    assert report.api["http_requests"] == 100 + faults


@pytest.mark.slow
def test_a_thousand_rows_through_a_bad_network(api_url: str, tmp_path: Path) -> None:
    plan = bad_network(2, 0.15, slow=10)
    with FaultProxy(upstream=api_url.removesuffix("/v1"), fault=plan.__getitem__).running() as proxy:
        world, report = job(tmp_path, proxy, 1000)
        check_answered_once(world, proxy, 1000)
        print(len(proxy.seen), "requests", report.api["retries"], report.seconds["run"], "s")


@pytest.mark.slow  # counted by the time of arrival, which a loaded machine bunches
@pytest.mark.parametrize("by_header", [True, False])
def test_the_limit_on_requests_is_kept(api_url: str, tmp_path: Path, by_header: bool) -> None:
    """Learned from the headers of the first answer, or given by the user."""
    per_min = 480.0
    with FaultProxy(upstream=api_url.removesuffix("/v1"), requests_per_min=per_min, burst=20).running() as proxy:
        limits = Limits() if by_header else Limits(requests_per_min=per_min)
        world, report = job(tmp_path, proxy, 60, limits=limits)
        check_answered_once(world, proxy, 60)
        starts = sorted(seen.at for seen in proxy.seen)
    later = starts[20:] if by_header else starts
    window_s = 2.0
    most = max(bisect.bisect_right(later, at + window_s) - i for i, at in enumerate(later))
    assert most <= 1.05 * per_min * (window_s + BURST_S) / 60 + 1
    if not by_header:
        assert proxy.refused == 0 and not report.api["retries"]


@pytest.mark.parametrize(
    ("fault", "code", "exit_code"),
    [("bad-key", "bad-api-key", 3), ("quota", "no-quota", 3), ("500", "endpoint-down", 75)],
)
def test_hopeless_causes_end_the_job_and_it_goes_on_later(
    api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fault: Fault, code: str, exit_code: int
) -> None:
    key = "sk-verysecret0123456789"
    monkeypatch.setenv("TEST_KEY", key)
    plan = [None] * 5 + [fault] * 1000
    with FaultProxy(upstream=api_url.removesuffix("/v1"), fault=lambda n: plan[n]).running() as proxy:
        world = ApiWorld(folder=tmp_path, base_url=proxy.base_url, concurrency=4)
        world.write(SHORT, [{"q": f"{i}"} for i in range(30)])
        start = time.monotonic()
        if exit_code == 75:
            report = world.run(api_key_env="TEST_KEY")
            assert report.exit_code == 75 and report.state == "stopped" and code in world.stderr.getvalue()
        else:
            with pytest.raises(SglbatchError) as caught:
                world.run(api_key_env="TEST_KEY")
            assert caught.value.code == code and caught.value.exit_code == exit_code
            assert key not in caught.value.render()
            assert len(proxy.seen) <= 5 + 4
        assert time.monotonic() - start < 30
        plan[:] = [None] * 1000
        assert world.run(api_key_env="TEST_KEY").calls_reused == 5
        check_answered_once(world, proxy, 30)
        assert all(seen.headers["authorization"] == f"Bearer {key}" for seen in proxy.seen)
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert kept and not any(key.encode() in data for data in kept)
    assert key not in world.stderr.getvalue()


def test_one_rows_failure_is_its_own(api_url: str, tmp_path: Path) -> None:
    plan: list[Fault | None] = [None, "content-filter", "no-usage", "wrong-usage", *[None] * 20]
    with FaultProxy(upstream=api_url.removesuffix("/v1"), fault=plan.__getitem__).running() as proxy:
        world = ApiWorld(folder=tmp_path, base_url=proxy.base_url, concurrency=1)
        world.write(SHORT, [{"q": f"{i}"} for i in range(6)])
        report = world.run()
    assert [row["_error"] and row["_error"]["code"] for row in world.output()].count("content-filter") == 1
    assert report.rows_failed == 1 and report.exit_code == 1
    assert report.api["answers_without_usage"] == 2


def test_no_key_goes_where_none_belongs(api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-you-0123456789")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-mine")
    with FaultProxy(upstream=api_url.removesuffix("/v1")).running() as proxy:
        world = ApiWorld(folder=tmp_path, base_url=proxy.base_url)
        world.write(SHORT, [{"q": "1"}])
        world.run()
        (seen,) = proxy.seen
    assert "authorization" not in seen.headers and "openai-organization" not in seen.headers


def test_a_kill_costs_at_most_the_calls_in_flight(api_url: str, tmp_path: Path) -> None:
    concurrency, rows = 4, 40
    with FaultProxy(upstream=api_url.removesuffix("/v1")).running() as proxy:
        world = ApiWorld(folder=tmp_path, base_url=proxy.base_url)
        world.write(SHORT, [{"q": f"{i}"} for i in range(rows)])
        command = [
            *(sys.executable, "-m", "sglbatch", "run", "program.py", "data.jsonl", "-m", "openai/smollm2"),
            *("--base-url", proxy.base_url, "--concurrency", str(concurrency), "-o", "out.jsonl"),
        ]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        for killed_at in (8, 20):
            process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
            while sum(seen.ok for seen in list(proxy.seen)) < killed_at:
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
            process.wait()
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
        answered = proxy.answered()
    assert len(answered) == rows and len(world.output()) == rows
    print(sum(answered.values()) - rows, "calls paid twice in two kills with", concurrency, "under way")
    assert sum(answered.values()) - rows <= 2 * concurrency
