"""The Batch API's state machine, against a local implementation that executes on a real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglbatch.api_spec.batch_files import custom_id_of, files_of
from sglbatch.api_spec.bodies import Outgoing
from sglbatch.errors import SglbatchError
from tests.api_batches import BatchServer, Fate
from tests.api_world import PEOPLE, SHORT, ApiWorld, people


def world_of(folder: Path, server: BatchServer, rows: int, **batches: object) -> ApiWorld:
    world = ApiWorld(folder=folder, base_url=server.base_url, batches=batches)
    world.write(SHORT, [{"q": f"{i}"} for i in range(rows)])
    return world


def all_good(world: ApiWorld, rows: int) -> bool:
    output = world.output()
    return len(output) == rows and all(row["_error"] is None and row["a"] for row in output)


@pytest.fixture
def upstream(api_url: str) -> str:
    return api_url.removesuffix("/v1")


@given(
    st.lists(st.tuples(st.sampled_from(["/completions", "/chat/completions"]), st.integers(0, 300)), max_size=12),
    st.integers(1, 5),
    st.integers(300, 900),
)
def test_every_request_lies_in_one_file_within_the_limits(
    asked: list[tuple[str, int]], max_requests: int, max_bytes: int
) -> None:
    outgoing = [
        Outgoing(path=path, body={"prompt": "x" * size}, max_tokens=1, seed=i) for i, (path, size) in enumerate(asked)
    ]
    requests = [(custom_id_of(each), each) for each in outgoing]
    files = files_of(requests, max_requests=max_requests, max_bytes=max_bytes)
    found = [custom_id for _, lines in files for custom_id, _ in lines]
    assert sorted(found) == sorted(custom_id for custom_id, _ in requests) and len(set(found)) == len(requests)
    for path, lines in files:
        assert 1 <= len(lines) <= max_requests
        assert len(lines) == 1 or sum(len(line) for _, line in lines) <= max_bytes
        values = [json.loads(line) for _, line in lines]
        assert all(value["url"] == path for value in values)
        assert [value["custom_id"] for value in values] == [custom_id for custom_id, _ in lines]


def test_one_wave(upstream: str, api_url: str, tmp_path: Path) -> None:
    with BatchServer(upstream=upstream).running() as server:
        world = world_of(tmp_path, server, 6)
        report = world.run(max_cost=None)
        batched = [row["a"] for row in world.output()]
        assert all_good(world, 6) and report.requests == 6
        assert len(server.batches) == 1 and set(server.executed.values()) == {1}
    (tmp_path / "direct").mkdir()
    direct = ApiWorld(folder=tmp_path / "direct", base_url=api_url)
    direct.write(SHORT, [{"q": f"{i}"} for i in range(6)])
    direct.run()
    assert [row["a"] for row in direct.output()] == batched


def test_programs_of_several_calls_go_in_waves(upstream: str, tmp_path: Path) -> None:
    with BatchServer(upstream=upstream).running() as server:
        world = ApiWorld(folder=tmp_path, base_url=server.base_url, batches={})
        world.write(PEOPLE.format(options=", num_api_spec_tokens=0"), people(3))
        world.run()
        assert len(server.batches) == 3 and sum(server.executed.values()) == 9
        assert all(row["city"] for row in world.output())


def test_expired_and_partial_batches_keep_what_they_have(upstream: str, tmp_path: Path) -> None:
    fates = [Fate(status="expired", answered=4), Fate(status="cancelled", answered=1), Fate()]
    with BatchServer(upstream=upstream, fates=fates).running() as server:
        world = world_of(tmp_path, server, 10)
        report = world.run()
        assert all_good(world, 10)
        assert len(server.batches) == 3 and set(server.executed.values()) == {1}
        assert report.api["retries"] == {"batch_expired": 6 + 5}


def test_a_request_that_is_refused_is_its_rows_error(upstream: str, tmp_path: Path) -> None:
    with BatchServer(upstream=upstream, fates=[Fate(failing="number 3 ")]).running() as server:
        world = world_of(tmp_path, server, 5)
        assert world.run().rows_failed == 1
        assert [row["_error"] and row["_error"]["message"] for row in world.output()] == [None] * 3 + [
            "not this one",
            None,
        ]
        assert len(server.batches) == 1


def test_a_batch_that_is_refused_ends_the_job(upstream: str, tmp_path: Path) -> None:
    with BatchServer(upstream=upstream, fates=[Fate(status="failed"), Fate()]).running() as server:
        world = world_of(tmp_path, server, 3)
        with pytest.raises(SglbatchError, match="not to our taste") as error:
            world.run()
        assert error.value.code == "batch-failed" and error.value.exit_code == 3
        world.run()
        assert all_good(world, 3)


def test_files_keep_to_the_limits(upstream: str, tmp_path: Path) -> None:
    with BatchServer(upstream=upstream).running() as server:
        world = world_of(tmp_path, server, 7, max_requests=3)
        world.run()
        assert all_good(world, 7) and len(server.batches) == 3
    (tmp_path / "bytes").mkdir()
    with BatchServer(upstream=upstream).running() as server:
        world = world_of(tmp_path / "bytes", server, 7, max_bytes=500)
        world.run()
        inputs = [server.files[batch["input_file_id"]] for batch in server.batches]
        assert all_good(world, 7) and len(inputs) > 1 and all(len(data) <= 500 for data in inputs)


def test_detached_jobs_are_collected_by_a_later_process(upstream: str, tmp_path: Path) -> None:
    with BatchServer(upstream=upstream, fates=[Fate(status="in_progress"), Fate()]).running() as server:
        world = world_of(tmp_path, server, 4, detach=True)
        report = world.run()
        assert report.exit_code == 75 and report.state == "stopped" and len(server.batches) == 1
        assert world.run().exit_code == 75 and len(server.batches) == 1, "a batch under way is not submitted again"
        lines = [json.loads(line) for line in server.files[server.batches[0]["input_file_id"]].splitlines()]
        server.work_off(server.batches[0], lines, Fate())
        assert world.run().exit_code == 0
        assert all_good(world, 4) and len(server.batches) == 1 and set(server.executed.values()) == {1}


def test_a_batch_whose_submission_went_unheard_is_adopted(upstream: str, tmp_path: Path) -> None:
    """As after a kill between the request and its answer: the intent is on disk, the batch is with the provider."""
    with BatchServer(upstream=upstream, fates=[Fate(lose_reply=True), Fate()]).running() as server:
        world = world_of(tmp_path, server, 4)
        world.endpoint = {"max_tries": 1}
        assert world.run().exit_code == 75 and len(server.batches) == 1
        assert world.run().exit_code == 0
        assert all_good(world, 4) and len(server.batches) == 1 and set(server.executed.values()) == {1}


def test_an_intent_that_never_reached_the_provider_is_submitted(upstream: str, tmp_path: Path) -> None:
    with BatchServer(upstream=upstream).running() as server:
        world = world_of(tmp_path, server, 2)
        url, world.base_url = world.base_url, "http://127.0.0.1:9/v1"
        world.endpoint = {"max_tries": 1}
        assert world.run().exit_code == 75
        world.base_url = url
        assert world.run().exit_code == 0 and all_good(world, 2) and len(server.batches) == 1


def test_what_was_collected_before_a_kill_is_not_asked_for_again(upstream: str, tmp_path: Path) -> None:
    """The answers were read, but the process ended before they were in the journal: the provider still has them."""
    with BatchServer(upstream=upstream, fates=[Fate(), Fate(status="in_progress")]).running() as server:
        world = ApiWorld(folder=tmp_path, base_url=server.base_url, batches={"detach": True})
        world.write(PEOPLE.format(options=", num_api_spec_tokens=0"), people(3))
        assert world.run().exit_code == 75 and len(server.batches) == 2
        shutil.rmtree(world.paths.journal)
        assert world.run().exit_code == 75
        assert len(server.batches) == 2 and set(server.executed.values()) == {1}
        journal = "".join(path.read_text() for path in world.paths.journal.iterdir())
        assert journal.count('"finish_reason"') == 3


class Cron:
    """The same command line again and again, each time in a process of its own."""

    def __init__(self, folder: Path, server: BatchServer) -> None:
        self._folder = folder
        self._command = [
            *(sys.executable, "-m", "sglbatch", "run", "program.py", "data.jsonl", "-m", "openai/smollm2"),
            *("--base-url", server.base_url, "--batch-api", "--detach", "-o", "out.jsonl"),
        ]

    def run(self) -> tuple[int, str]:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        done = subprocess.run(self._command, cwd=self._folder, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr


def lines_of(server: BatchServer, number: int) -> list[dict[str, Any]]:
    data = server.files[server.batches[number]["input_file_id"]]
    return [json.loads(line) for line in data.splitlines()]


def lines_of_ids(server: BatchServer, number: int) -> list[str]:
    return [line["custom_id"] for line in lines_of(server, number)]


@pytest.mark.slow
def test_processes_submit_and_collect_one_after_the_other(upstream: str, tmp_path: Path) -> None:
    """Two waves, the first of which expires half done; five processes, none of which asks for what is answered."""
    two = """
import sglbatch as sgl

@sgl.function(temperature=0, num_api_spec_tokens=0)
def two(s, q):
    s += "The number " + q + " is" + sgl.gen("a", max_tokens=2)
    s += ", and the next one is" + sgl.gen("b", max_tokens=2)
"""
    with BatchServer(upstream=upstream, fates=[Fate(status="in_progress")]).running() as server:
        world = ApiWorld(folder=tmp_path, base_url=server.base_url)
        world.write(two, [{"q": f"{i}"} for i in range(4)])
        cron = Cron(tmp_path, server)
        code, said = cron.run()
        assert code == 75 and "the same command" in said and len(server.batches) == 1
        assert cron.run()[0] == 75 and len(server.batches) == 1, "it is still being worked on"

        server.work_off(server.batches[0], lines_of(server, 0), Fate(status="expired", answered=2))
        assert cron.run()[0] == 75
        asked = [line["custom_id"] for i in range(len(server.batches)) for line in lines_of(server, i)]
        left_over = set(lines_of_ids(server, 0)) - set(server.executed)
        assert len(left_over) == 2 and all(asked.count(custom_id) == 2 for custom_id in left_over)
        assert all(asked.count(custom_id) == 1 for custom_id in server.executed)

        for number in range(1, len(server.batches)):
            server.work_off(server.batches[number], lines_of(server, number), Fate())
        code, _ = cron.run()
        while code == 75:
            open_batches = [i for i, batch in enumerate(server.batches) if batch["status"] == "in_progress"]
            assert open_batches, "each process submits what follows"
            for number in open_batches:
                server.work_off(server.batches[number], lines_of(server, number), Fate())
            code, _ = cron.run()
        assert code == 0
        rows = world.output()
        assert len(rows) == 4 and all(row["a"] and row["b"] and row["_error"] is None for row in rows)
        assert len(server.executed) == 8 and set(server.executed.values()) == {1}
        assert cron.run()[0] == 0, "nothing is left to do"
