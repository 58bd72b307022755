"""Bad answers: each is a row's error or a retry or the end of the job, and nothing hangs.

Lines of Batch API files that are wrong are in test_api_run_batch, refused keys and exhausted quotas in test_api_faults.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from sglbatch.api_spec import bounded
from sglbatch.api_spec.answers import Garbled, read_answer
from sglbatch.api_spec.budget import Budget
from sglbatch.api_spec.prices import parse_price
from sglbatch.errors import SglbatchError
from sglbatch.job.report import Report
from tests.api_batches import BatchServer, Fate
from tests.api_world import SHORT, ApiWorld
from tests.fault_proxy import Fault, FaultProxy


def run(folder: Path, url: str, faults: Sequence[Fault | None], rows: int, **endpoint: Any) -> tuple[ApiWorld, Report]:
    """A job of so many rows, one call after the other, whose requests meet the faults in their order."""
    plan = [*faults, *([None] * 50)]
    with FaultProxy(upstream=url.removesuffix("/v1"), fault=plan.__getitem__).running() as proxy:
        world = ApiWorld(folder=folder, base_url=proxy.base_url, concurrency=1, endpoint=endpoint)
        world.write(SHORT, [{"q": f"{i}"} for i in range(rows)])
        return world, world.run()


def errors(world: ApiWorld) -> list[str]:
    return [row["_error"]["code"] for row in world.output() if row["_error"] is not None]


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("content-filter", "content-filter", "filtered"),
        ("filtered", "content-filter", "content filter"),
        ("refusal", "refused", "I'm sorry"),
        ("truncated", "truncated", "used up its tokens"),
    ],
)
def test_an_answer_that_is_none_is_its_rows_error(
    api_url: str, tmp_path: Path, *, fault: Fault, code: str, words: str
) -> None:
    world, report = run(tmp_path, api_url, [None, fault], rows=3)
    assert errors(world) == [code] and report.rows_failed == 1 and report.exit_code == 1
    assert words in next(row["_error"]["message"] for row in world.output() if row["_error"] is not None)
    assert not report.api["retries"], "asking again would cost as much and give the same"


@pytest.mark.parametrize("fault", ["garbage", "html", "cut", "reset", "no-choices"])
def test_what_is_no_answer_is_asked_for_again(api_url: str, tmp_path: Path, fault: Fault) -> None:
    world, report = run(tmp_path, api_url, [fault, None, fault, fault], rows=3)
    assert not errors(world) and sum(report.api["retries"].values()) == 3


def test_a_row_fails_after_its_own_retries_only(api_url: str, tmp_path: Path) -> None:
    world, report = run(tmp_path, api_url, ["html"] * 3, rows=3, max_tries=3)
    assert errors(world) == ["garbled"] and report.exit_code == 1
    (failed,) = [row for row in world.output() if row["_error"] is not None]
    assert "3 tries" in failed["_error"]["message"]


def test_a_server_that_streams_for_ever_costs_its_timeout(api_url: str, tmp_path: Path) -> None:
    start = time.monotonic()
    world, report = run(tmp_path, api_url, ["drip", "slow"], rows=2, timeout_s=1.5)
    assert not errors(world) and report.api["retries"] == {"timeout": 2}
    assert time.monotonic() - start < 20


def test_a_flood_is_cut_off_at_a_size(api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MAX_ANSWER_BYTES", 4 << 20)
    start = time.monotonic()
    world, report = run(tmp_path, api_url, ["flood"], rows=2, timeout_s=60.0)
    assert not errors(world) and report.api["retries"] == {"connection": 1}
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("fault", ["no-usage", "wrong-usage", "huge-usage", "zero-usage"])
def test_wrong_usage_costs_what_the_call_could_cost_at_most(api_url: str, tmp_path: Path, fault: Fault) -> None:
    price = "input=1000000,output=1000000"
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    _, right = run(tmp_path / "right", api_url, [], rows=1, budget=Budget(parse_price(price)))
    budget = Budget(parse_price(price), max_cost=Decimal(10_000))
    world, wrong = run(tmp_path / "wrong", api_url, [fault], rows=1, budget=budget)
    assert not errors(world) and wrong.api["answers_without_usage"] == 1
    assert right.api["cost"]["dollars"] < wrong.api["cost"]["dollars"] < 200
    assert wrong.prompt_tokens == 0, "what nobody has said is not made up"
    assert "counts are too low" in wrong.render()


def test_an_unknown_model_ends_the_job_with_the_providers_words(api_url: str, tmp_path: Path) -> None:
    with pytest.raises(SglbatchError, match="smollm3") as error:
        run(tmp_path, api_url, ["no-model"], rows=3)
    assert error.value.code == "unknown-api-model" and error.value.exit_code == 3
    assert "--model" in (error.value.hint or "")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b'"text"',
        b'{"choices": null}',
        b'{"choices": [7]}',
        b'{"choices": [{"text": 7}]}',
        b'{"choices": [{"message": []}]}',
        b'{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_nothing_but_an_answer_is_one(content: bytes) -> None:
    with pytest.raises(Garbled):
        read_answer(content)


@pytest.mark.parametrize(
    "logprobs",
    [7, [], {"content": []}, {"content": [{"top_logprobs": [{"token": 3}, {"token": "a", "logprob": "x"}]}]}],
)
def test_log_probabilities_that_are_none_are_left_out(logprobs: Any) -> None:
    body = {"choices": [{"text": "a", "finish_reason": "stop", "logprobs": logprobs}]}
    assert read_answer(json.dumps(body).encode()).first_token == ()


def test_lines_of_a_batch_that_are_none_are_asked_for_again(api_url: str, tmp_path: Path) -> None:
    """Not JSON, no object, another's custom_id, one that is no text, a second answer, an answer without a body."""
    with BatchServer(upstream=api_url.removesuffix("/v1"), fates=[Fate(spoil=True), Fate()]).running() as server:
        world = ApiWorld(folder=tmp_path, base_url=server.base_url, batches={})
        world.write(SHORT, [{"q": f"{i}"} for i in range(6)])
        report = world.run()
        assert not errors(world) and len(world.output()) == 6
        assert len(server.batches) == 2, "the second has only what the first left out"
        assert sum(report.api["retries"].values()) == 2
        assert "another" not in [row["a"] for row in world.output()], "a request's first answer counts"
