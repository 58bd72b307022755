"""What a job has spent counts over all of its runs, whatever ended them; answers that are paid for are kept."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.prices import UnknownPrices, parse_price
from sglbatch.job.signals import StopRequest
from sglbatch.job.spending import Spending
from tests.api_world import SHORT, ApiWorld
from tests.fault_proxy import FaultProxy, Seen

ROOT = Path(__file__).parent.parent
PRICE = "input=1000,output=4000"


def paid(seen: list[Seen]) -> Decimal:
    """Dollars for all that the server has answered, by the usage that it told."""
    prices = parse_price(PRICE)
    usages = [s.usage for s in seen if s.ok and s.usage is not None]
    costs = [prices.cost(Tokens(prompt=u["prompt_tokens"], generated=u["completion_tokens"])) for u in usages]
    return sum((cost for cost in costs if cost is not None), Decimal(0))


def test_runs_add_up_and_prices_may_come_later(tmp_path: Path) -> None:
    first = Spending(tmp_path / "spending")
    assert first.earlier(UnknownPrices()) == 0 and not (tmp_path / "spending").exists()
    first.add(Tokens(prompt=1000, generated=10, cached=500), Decimal("0.25"), batch=False)
    first.close()
    second = Spending(tmp_path / "spending")
    second.add(Tokens(prompt=1000, generated=0), None, batch=True)
    second.close()
    third = Spending(tmp_path / "spending")
    assert third.earlier(parse_price("input=1000,output=0")) == Decimal("0.25") + Decimal("0.5")
    assert Spending(tmp_path / "spending").earlier(UnknownPrices()) == Decimal("0.25")


def test_a_kill_loses_nothing_that_was_spent(tmp_path: Path) -> None:
    code = (
        "import os, signal; from decimal import Decimal; from pathlib import Path\n"
        "from sglbatch.api_spec.answers import Tokens; from sglbatch.job.spending import Spending\n"
        f"spending = Spending(Path({str(tmp_path / 'spending')!r}))\n"
        "for _ in range(100): spending.add(Tokens(prompt=1, generated=1), Decimal('0.01'), batch=False)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -9
    spending = Spending(tmp_path / "spending")
    assert spending.earlier(UnknownPrices()) == 1 and not spending.counts.torn
    (damaged,) = (tmp_path / "spending").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-5])
    cut = Spending(tmp_path / "spending")
    assert cut.earlier(UnknownPrices()) == Decimal("0.99") and cut.counts.torn == 1


def test_the_cap_is_the_jobs_and_not_each_runs(api_url: str, tmp_path: Path) -> None:
    with FaultProxy(upstream=api_url.removesuffix("/v1")).running() as proxy:
        world = ApiWorld(folder=tmp_path, base_url=proxy.base_url, concurrency=2, price=PRICE)
        world.write(SHORT, [{"q": f"{i}"} for i in range(24)])
        world.max_cost = Decimal("0.1")
        first = world.run()
        assert first.exit_code == 4 and 0 < paid(proxy.seen) <= world.max_cost
        sent = len(proxy.seen)
        again = world.run()
        assert again.exit_code == 4 and len(proxy.seen) == sent, "the cap is spent, so nothing is asked"
        assert again.api["cost"]["earlier_dollars"] == pytest.approx(first.api["cost"]["dollars"])
        assert "earlier runs" in again.render()
        world.max_cost = Decimal("0.2")
        assert world.run().exit_code == 4 and paid(proxy.seen) <= world.max_cost and len(proxy.seen) > sent
        world.max_cost = Decimal(10)
        last = world.run()
        assert last.exit_code == 0 and len(world.output()) == 24
        total = last.api["cost"]["dollars"] + last.api["cost"]["earlier_dollars"]
        assert total == pytest.approx(float(paid(proxy.seen)))
        assert set(proxy.answered().values()) == {1}


def test_a_run_that_is_stopped_keeps_what_is_under_way_and_counts_what_it_got(api_url: str, tmp_path: Path) -> None:
    with FaultProxy(upstream=api_url.removesuffix("/v1"), delay_s=0.5).running() as proxy:
        world = ApiWorld(folder=tmp_path, base_url=proxy.base_url, concurrency=4, price=PRICE)
        world.write(SHORT, [{"q": f"{i}"} for i in range(40)])
        world.stop = lambda: StopRequest(time_limit_s=2.5)
        stopped = world.run()
        answered = sum(proxy.answered().values())
        assert stopped.exit_code == 75 and stopped.state == "stopped"
        assert 0 < stopped.requests == answered < 40, "calls under way are waited for; calls not made are not counted"
        assert stopped.api["cost"]["dollars"] == pytest.approx(float(paid(proxy.seen)))
        world.stop = StopRequest
        proxy.delay_s = 0.0
        rest = world.run()
        assert rest.calls_reused == stopped.requests and rest.requests == 40 - stopped.requests
        assert set(proxy.answered().values()) == {1} and len(proxy.answered()) == 40
