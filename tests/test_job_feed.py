"""The model loads beside the planning, and first calls come slab by slab: the same job as all at once."""

from __future__ import annotations

import io
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from sglbatch.errors import ModelError, SglbatchError
from sglbatch.job import execution, feed
from sglbatch.job.prepare import Prepared
from sglbatch.job.report import Report
from sglbatch.lang import Driver
from sglbatch.models import LocalModel
from sglbatch.planner import Plan
from sglbatch.tokenizer import Tokenizer
from tests.job_world import World
from tests.lang_backend import ScriptedBackend

BRANCHES = """
import sglbatch as sgl

def upper(text):
    return text.upper()

@sgl.function(temperature=0)
def branches(s, q):
    if q.startswith("outside"):
        q = sgl.call(upper, q)
    s += "Question: " + q
    views = s.fork(2)
    views += lambda i: f" View {i}:" + sgl.gen("view", max_tokens=4)
    s["views"] = [view["view"] for view in views]
    s += " All: " + s["views"][0] + sgl.gen("answer", max_tokens=4)
    s += sgl.call(upper, s["answer"]) + sgl.gen("end", max_tokens=4)
"""


@pytest.fixture
def world(tmp_path: Path, smollm2_dir: Path) -> World:
    return World(folder=tmp_path, model=smollm2_dir)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MIN_SLAB", 2)
    monkeypatch.setattr(feed, "MAX_SLAB", 4)


class Slabs(ScriptedBackend):
    """Tells what waits, so that it is given a slab at a time; remembers what came between its steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.expected: list[bool] = []
        self.num_steps = 0
        self.came: list[int] = []

    @property
    def num_waiting(self) -> int:
        return 1000

    def expect_more(self, more: bool) -> None:
        self.expected.append(more)

    def submit(self, requests: Any) -> None:
        self.came += [self.num_steps] * len(requests)
        super().submit(requests)

    def step(self) -> Any:
        self.num_steps += 1
        return super().step()


class BlockedWorld(World):
    """A world whose model loads until it may end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loading, self.may_end, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.loader: threading.Thread | None = None

    def _load(self, model: LocalModel, tokenizer: Tokenizer, config: Any) -> ScriptedBackend:
        self.loader = threading.current_thread()
        self.loading.set()
        assert self.may_end.wait(30)
        if self.error is not None:
            raise self.error
        backend = super()._load(model, tokenizer, config)
        backend.close = self.closed.set  # type: ignore[method-assign]
        return backend


class Listening(io.StringIO):
    """Sets an event when a text is written."""

    def __init__(self, text: str, event: threading.Event) -> None:
        super().__init__()
        self._text = text
        self._event = event

    def write(self, text: str) -> int:
        if self._text in text:
            self._event.set()
        return super().write(text)


@pytest.fixture
def blocked(tmp_path: Path, smollm2_dir: Path) -> BlockedWorld:
    return BlockedWorld(folder=tmp_path, model=smollm2_dir)


def rows() -> list[dict[str, str] | str]:
    names = [f"{'outside ' if i % 5 == 0 else ''}number {i % 17}, {'abc'[i % 3]}" for i in range(40)]
    return [*({"q": name} for name in names), "not JSON", {"q": "\ue0f0"}]


def give_slabs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: LocalModel, tokenizer: Tokenizer, config: Any) -> Slabs:
        world.backend = Slabs(tokenizer, world._answer, shuffle=1, batch=7)
        return world.backend

    monkeypatch.setattr(world, "_load", load)


def facts(world: World) -> tuple[Any, ...]:
    """What a run has left behind."""
    report, plan = Report.load(world.paths.report), Plan.load(world.paths.plan)
    return (
        world.output(),
        (report.requests, report.calls_collapsed, report.calls_reused, report.unique_prompt_tokens),
        (plan.order.tolist(), plan.lcp.tolist(), plan.fingerprint, plan.unique_tokens, plan.num_tokens),
    )


def test_slabs_make_the_same_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.write_template(BRANCHES)
    world.write_rows(rows())
    world.run()
    expected = facts(world)
    monkeypatch.setattr(feed, "MIN_SLAB", 2)
    monkeypatch.setattr(feed, "MAX_SLAB", 4)
    give_slabs(world, monkeypatch)
    world.run(restart=True)
    assert facts(world) == expected
    backend = world.backend
    assert isinstance(backend, Slabs)
    assert backend.came[0] == 0 and len(set(backend.came)) > 5, "the first slab at once, the others between steps"
    assert backend.expected[0] and not backend.expected[-1]


@pytest.mark.usefixtures("small_slabs")
def test_programs_that_are_parked_before_they_are_tokenised_make_the_same_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a backend may keep for a program is known when it asks; parked, it could not tell any more."""

    def asked() -> list[tuple[str, bool]]:
        assert world.backend is not None
        return sorted((world.backend.show(r.prompt_ids), r.keep) for r in world.backend.requests)

    world.write_template(BRANCHES)
    world.write_rows(rows())
    world.run()
    expected, kept = facts(world), asked()
    assert len({keep for _, keep in kept}) == 2
    make = Prepared.driver

    def few(ready: Prepared, **options: Any) -> Driver:
        driver = make(ready, **options)
        driver._max_live_programs = 3
        return driver

    monkeypatch.setattr(Prepared, "driver", few)
    monkeypatch.setattr(execution, "CHUNK_ROWS", 2)
    world.run(restart=True)
    assert facts(world) == expected and asked() == kept


def test_a_job_that_is_answered_in_one_step_has_its_plan(world: World) -> None:
    world.batch = 1000
    world.write_template(
        "import sglbatch as sgl\n\n@sgl.function(temperature=0)\ndef f(s, q):\n    s += q + sgl.gen('a')\n"
    )
    world.questions(range(5))
    report = world.run().report
    assert (report.requests, report.steps) == (5, 0) and report.unique_prompt_tokens > 0
    assert Plan.load(world.paths.plan).num_requests == 5
    assert "plan: 5 rows, 5 first calls to make" in world.stderr.getvalue()


@pytest.mark.usefixtures("small_slabs")
def test_a_job_stopped_between_slabs_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.write_template(BRANCHES)
    world.write_rows(rows())
    give_slabs(world, monkeypatch)
    world.on_request = lambda number: world.stop.receive(signal.SIGTERM, None) if number == 20 else None
    stopped = world.run()
    assert (stopped.exit_code, stopped.report.state) == (143, "stopped")
    world.on_request = None
    report = world.run().report
    done = world.num_requests
    assert report.state == "finished" and report.calls_reused > 0 and report.rows_failed == 2
    output = world.output()
    world.run(restart=True)
    assert output == world.output() and world.num_requests - done == done, "no call was made twice"


def test_the_model_loads_while_rows_are_read(blocked: BlockedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "CHUNK_ROWS", 2)
    blocked.questions(range(9))
    started: list[int] = []
    advance = execution.Progress.advance

    def note(self: Any, count: int = 1, **numbers: str) -> None:
        started.append(count)
        if len(started) == 4:
            assert blocked.loading.wait(30), "it loads by now"
            blocked.may_end.set()
        advance(self, count, **numbers)

    monkeypatch.setattr(execution.Progress, "advance", note)
    assert blocked.run().exit_code == 0
    assert blocked.loader is not threading.main_thread() and blocked.closed.is_set()


def test_an_error_while_loading_is_the_jobs(blocked: BlockedWorld) -> None:
    blocked.questions(range(9))
    blocked.error = ModelError("out-of-memory", "too little", hint="more")
    blocked.may_end.set()
    with pytest.raises(ModelError, match="too little"):
        blocked.run()
    assert not blocked.paths.folder.exists(), "nothing was done, so nothing is left"


def test_what_is_wrong_with_few_rows_is_known_before_anything_loads(blocked: BlockedWorld) -> None:
    blocked.write_rows([{"q": "a"}, {"q": "a"}])
    with pytest.raises(SglbatchError, match="not unique"):
        blocked.run(id_column="q")
    assert not blocked.loading.is_set()


def test_an_error_beside_loading_waits_for_the_thread(blocked: BlockedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "CHUNK_ROWS", 2)
    blocked.write_rows([{"q": q} for q in ("a", "b", "c", "a")])
    blocked.stderr = Listening("waiting until the model is loaded", blocked.may_end)
    with pytest.raises(SglbatchError, match="not unique"):
        blocked.run(id_column="q")
    assert blocked.closed.is_set()


def test_a_stop_while_loading_is_resumable(blocked: BlockedWorld) -> None:
    blocked.questions(range(9))

    def stop() -> None:
        assert blocked.loading.wait(30)
        blocked.stop.receive(signal.SIGTERM, None)

    threading.Thread(target=stop).start()
    blocked.stderr = Listening("waiting until the model is loaded", blocked.may_end)
    ended = blocked.run()
    assert (ended.exit_code, ended.report.state, ended.report.requests) == (143, "stopped", 0)
    assert blocked.closed.is_set()
    assert blocked.run().report.rows_done == 9


def test_a_bad_constraint_of_the_template_loads_nothing(blocked: BlockedWorld) -> None:
    blocked.write_template(
        "import sglbatch as sgl\n\n@sgl.function\ndef f(s, q):\n    s += q + sgl.gen('a', regex='(a')\n"
    )
    blocked.questions(range(3))
    with pytest.raises(SglbatchError) as caught:
        blocked.run()
    assert str(caught.value.where).startswith(str(blocked.template)) and not blocked.loading.is_set()
