"""One job in pieces: `plan --save`, `run --shard I/N --plan`, `merge`."""

from __future__ import annotations

import io
import json
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest

from sglbatch.data.values import SURROGATE
from sglbatch.errors import SglbatchError
from sglbatch.job import commands, merging
from sglbatch.job.config import MaxFailures
from sglbatch.job.folder import JobFolder
from sglbatch.job.manifest import Manifest
from sglbatch.job.merging import merge
from sglbatch.job.paths import JobPaths
from sglbatch.job.progress import Progress
from sglbatch.job.report import Report
from sglbatch.job.runner import Ended
from sglbatch.job.shards import SavedPlan, Shard
from sglbatch.job.signals import Stopped, StopRequest
from sglbatch.planner import make_plan
from tests.job_world import TWO_GENS, World

SAMPLED = """
import sglbatch as sgl

@sgl.function(temperature=1)
def sampled(s, q):
    s += "Question: " + q + sgl.gen("first", max_tokens=4)
    if s.rng.random() < 0.5:
        s += " and" + sgl.gen("second", max_tokens=4)
    left, right = s.fork(2)
    left += " left" + sgl.gen("l", max_tokens=2)
    right += " right" + sgl.gen("r", max_tokens=2)
    s["both"] = left["l"] + right["r"]
"""


ODD = """
import sglbatch as sgl

@sgl.function(temperature=0)
def odd(s, q):
    s += "Question: " + q + sgl.gen("answer", max_tokens=4)
    s["odd"] = "\\ud800"
"""


API_FACTS: dict[str, Any] = {
    "endpoint": "http://here/v1",
    "http_requests": 1,
    "answers": 1,
    "answers_without_usage": 0,
    "retries": {"timeout": 2},
    "methods": {},
    "cost": {"dollars": 0.0, "earlier_dollars": 0.0, "prices": "--price"},
    "speculation": {"saved_prompt_tokens": 0, "used_tokens": 0, "wasted_tokens": 0, "places_off": 0},
    "calls_ahead": 0,
}


@pytest.fixture
def world(tmp_path: Path, smollm2_dir: Path) -> World:
    return World(folder=tmp_path, model=smollm2_dir)


def plan_of(world: World, **options: Any) -> Path:
    path = world.folder / "job.plan"
    commands.plan(world.config(**options), save=path, as_json=False)
    return path


def run_piece(world: World, plan: Path, shard: str, **options: Any) -> Ended:
    whole = options.pop("output", world.paths.output)
    return world.run(shard=shard, plan=plan, output=Shard.parse(shard).output(whole), **options)


def merged(world: World, *, output: Path | None = None, restart: bool = False) -> Ended:
    return merge(output or world.paths.output, Progress(io.StringIO()), restart=restart)


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        table: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return table
    return [json.loads(line) for line in path.read_text().splitlines()]


def mixed_rows() -> list[Any]:
    """Equal rows, rows that share a beginning, one that cannot be read, one without the column."""
    rows: list[Any] = [{"q": f"number {i % 7}?", "n": i} for i in range(20)]
    rows += [{"q": f"{'a long introduction ' * 5}{i}", "n": i} for i in range(9)]
    return [*rows[:11], "{broken", *rows[11:], {"n": 5}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("count", [1, 2, 5, 31])
@pytest.mark.parametrize(
    ("template", "options"), [(None, {}), (SAMPLED, {"seed": 3}), (None, {"keep": ("all",), "save": ("transcript",)})]
)
def test_pieces_together_are_the_whole(
    world: World, template: str | None, options: dict[str, Any], count: int, suffix: str
) -> None:
    if template is not None:
        world.write_template(template)
    world.write_rows(mixed_rows())
    allowed = options | {"max_failures": MaxFailures(value=100, percent=True)}
    alone = world.folder / f"alone.{suffix}"
    ended = world.run(output=alone, **allowed)
    num_alone = world.num_requests
    whole = world.folder / f"out.{suffix}"
    plan = plan_of(world, **{name: options[name] for name in options if name == "seed"})
    for number in range(count, 0, -1):
        run_piece(world, plan, f"{number}/{count}", output=whole, **allowed)
    result = merged(world, output=whole)
    assert whole.read_bytes() == alone.read_bytes() if suffix == "jsonl" else rows_of(whole) == rows_of(alone)
    assert (result.report.rows, result.report.rows_failed) == (31, ended.report.rows_failed)
    assert result.exit_code == ended.exit_code and result.report.errors == ended.report.errors
    if template is None and count < 31:  # as many pieces as rows: equal ones are apart
        assert world.num_requests == 2 * num_alone, "no call is made in two pieces"


def test_a_merged_job_goes_on_as_one_that_ran_alone(world: World) -> None:
    world.questions(range(12))
    world.failing = ("number 3?",)
    plan = plan_of(world)
    for shard in ("1/3", "2/3", "3/3"):
        run_piece(world, plan, shard)
    assert merged(world).exit_code == 1
    done = world.num_requests
    again = world.run()
    assert again.unchanged and again.exit_code == 1 and world.num_requests == done
    world.failing = ()
    assert world.retry().exit_code == 0 and world.num_requests == done + 2, "the failed row's two calls"
    assert world.run().unchanged


def test_a_piece_goes_on_after_a_stop(world: World) -> None:
    world.questions(range(16))
    plan = plan_of(world)

    world.batch = 1
    world.on_request = lambda count: world.stop.receive(signal.SIGUSR1, None) if count == 5 else None
    assert run_piece(world, plan, "1/2").exit_code == 75
    with pytest.raises(SglbatchError, match="1 of 2 pieces are not there: 2/2"):
        merged(world)
    run_piece(world, plan, "2/2")
    with pytest.raises(SglbatchError, match="1 of 2 pieces have not come to their end: 1/2"):
        merged(world)
    world.on_request = None
    run_piece(world, plan, "1/2")
    assert world.num_requests == 32 and merged(world).exit_code == 0
    assert run_piece(world, plan, "1/2").unchanged


def test_an_output_that_has_a_job_is_merged_anew_only_when_asked(world: World) -> None:
    world.questions(range(4))
    plan = plan_of(world)
    for shard in ("1/2", "2/2"):
        run_piece(world, plan, shard)
    merged(world)
    before = world.paths.output.read_bytes()
    with pytest.raises(SglbatchError, match="job already"):
        merged(world)
    merged(world, restart=True)
    assert world.paths.output.read_bytes() == before
    assert len(list(world.folder.glob("out.jsonl.job.old-*"))) == 1


def test_pieces_of_different_jobs_are_not_merged(world: World) -> None:
    world.questions(range(8))
    plan = plan_of(world)
    run_piece(world, plan, "1/2")
    run_piece(world, plan, "2/2", keep=("q",))
    with pytest.raises(SglbatchError, match=r"are no pieces of one job: keep"):
        merged(world)
    run_piece(world, plan, "2/2", restart=True)
    run_piece(world, plan, "1/3")
    with pytest.raises(SglbatchError, match="2 pieces -> 3 pieces"):
        merged(world)
    with pytest.raises(SglbatchError, match="no pieces of this output"):
        merged(world, output=world.folder / "other.jsonl")


def change_template(world: World) -> dict[str, Any]:
    world.write_template(SAMPLED)
    return {}


def change_data(world: World) -> dict[str, Any]:
    world.questions(range(9))
    return {}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (change_template, "template: its source changed"),
        (change_data, "data: files added, removed or changed"),
        (lambda _: {"seed": 1}, "seed: 0 -> 1"),
        (lambda _: {"limit": 3}, "limit: null -> 3"),
        (lambda _: {"max_tokens": 3}, "max_tokens: null -> 3"),
    ],
)
def test_a_plan_is_for_one_job(world: World, change: Callable[[World], dict[str, Any]], what: str) -> None:
    world.questions(range(8))
    plan = plan_of(world)
    options = change(world)
    with pytest.raises(SglbatchError, match=what) as raised:
        run_piece(world, plan, "1/2", **options)
    assert raised.value.code == "plan-mismatch" and not list(world.folder.glob("*.job"))


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "a/b", "1/0", "-1/2", "1/2/3"])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(SglbatchError, match="from 1/n to n/n"):
        Shard.parse(text)


def test_more_pieces_than_rows_and_half_of_the_options(world: World) -> None:
    world.questions(range(3))
    plan = plan_of(world)
    with pytest.raises(SglbatchError, match="3 rows cannot be cut into 4 pieces"):
        run_piece(world, plan, "1/4")
    with pytest.raises(SglbatchError, match="go together"):
        world.config(shard="1/2")
    with pytest.raises(SglbatchError, match="go together"):
        world.config(plan=plan)
    with pytest.raises(SglbatchError, match="not a saved plan"):
        run_piece(world, world.data, "1/2")


def in_two(world: World, **options: Any) -> Path:
    """The plan of a job whose two pieces have run."""
    plan = plan_of(world, **{name: value for name, value in options.items() if name in ("id_column", "data")})
    for shard in ("1/2", "2/2"):
        run_piece(world, plan, shard, **options)
    return plan


def piece_folder(world: World, number: int) -> Path:
    return world.folder / f"out.shard-{number}-of-2.jsonl.job"


@pytest.mark.parametrize("name", ["out.jsonl.gz", "a [1-2]*.x.jsonl", "v1.2.parquet"])
def test_any_output_s_name_is_found_again(world: World, name: str) -> None:
    world.questions(range(4))
    whole = world.folder / name
    in_two(world, output=whole)
    assert merged(world, output=whole).exit_code == 0 and whole.exists()


def test_merge_overwrites_no_stranger_and_no_input(world: World) -> None:
    world.questions(range(4))
    plan = in_two(world)
    world.paths.output.write_text("precious")
    with pytest.raises(SglbatchError, match="no job") as raised:
        merged(world)
    assert raised.value.code == "output-exists" and world.paths.output.read_text() == "precious"
    before = world.data.read_bytes()
    for shard in ("1/2", "2/2"):
        run_piece(world, plan, shard, output=world.data)
    for restart in (False, True):
        with pytest.raises(SglbatchError, match="would overwrite this input"):
            merged(world, output=world.data, restart=restart)
    with pytest.raises(SglbatchError, match="would overwrite this input"):
        commands.run(world.config(output=world.data, shard="1/2", plan=plan), restart=False, as_json=False)
    for data in (str(world.data), str(world.data.with_name("*.jsonl"))):
        with pytest.raises(SglbatchError, match="would overwrite this input"):
            commands.plan(world.config(data=(data,)), save=world.data, as_json=False)
    assert world.data.read_bytes() == before


def test_copies_of_pieces_are_told_from_pieces(world: World) -> None:
    world.questions(range(6))
    in_two(world)
    shutil.copytree(piece_folder(world, 1), world.folder / "out.shard-1-of-2-backup.jsonl.job")
    (world.folder / "out.shard-x-of-y.jsonl.job").mkdir()
    piece_folder(world, 2).rename(world.folder / "aside")
    piece_folder(world, 2).mkdir()
    with pytest.raises(SglbatchError, match="are not there: 2/2"):
        merged(world)
    piece_folder(world, 2).rmdir()
    shutil.copytree(piece_folder(world, 1), piece_folder(world, 2))
    with pytest.raises(SglbatchError, match="the name of piece 2/2 and in it the job of piece 1/2"):
        merged(world)
    shutil.rmtree(piece_folder(world, 2))
    (world.folder / "aside").rename(piece_folder(world, 2))
    assert merged(world).exit_code == 0


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:70])])
@pytest.mark.parametrize("name", ["rows-*.npy", "rows/*.jsonl"])
def test_a_damaged_piece_is_named_and_can_be_mended(world: World, name: str, damage: Callable[[Path], Any]) -> None:
    world.questions(range(6))
    plan = in_two(world)
    damage(next(piece_folder(world, 2).glob(name)))
    with pytest.raises(SglbatchError) as raised:
        merged(world)
    assert raised.value.code == "job-damaged" and not world.paths.folder.exists()
    done = world.num_requests
    if name.endswith(".jsonl"):
        (world.folder / "out.shard-2-of-2.jsonl").unlink()  # as the hint says
    run_piece(world, plan, "2/2")
    assert merged(world).exit_code == 0 and world.num_requests == done


def test_pieces_that_do_not_make_up_the_whole(world: World) -> None:
    world.questions(range(6))
    in_two(world)
    merged(world)
    rows = next(piece_folder(world, 2).glob("rows-*.npy"))
    places = np.load(rows)
    np.save(rows, np.flatnonzero(~np.isin(np.arange(6), places[:-1]))[-len(places) :])
    with pytest.raises(SglbatchError, match="do not make up the whole"):
        merged(world, restart=True)
    assert world.paths.output.exists(), "nothing is moved aside for a merge that cannot be"


def test_a_merge_that_was_cut_short_is_made_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.questions(range(4))
    in_two(world)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(merging, "write_rows", Mock(side_effect=OSError(28, "full")))
        merged(world)
    assert world.paths.folder.exists()
    assert merged(world).exit_code == 0 and world.run().unchanged


def test_pieces_that_run_are_not_merged(world: World) -> None:
    world.questions(range(6))
    world.failing = ("number 3?",)
    in_two(world)
    piece = JobPaths(output=world.folder / "out.shard-1-of-2.jsonl")
    with (
        JobFolder(piece, restart=False, progress=Progress(world.stderr)),
        pytest.raises(SglbatchError, match="running"),
    ):
        merged(world)
    merged(world)


def test_a_piece_keeps_the_rows_of_the_plan_that_it_finished(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run with another plan was stopped before it began."""
    world.write_rows([{"q": "abcdef"[i % 6] + str(i)} for i in range(8)])
    data, plan = world.data.read_bytes(), in_two(world)
    merged(world)
    before = world.paths.output.read_bytes()
    world.write_rows([{"q": "fedcba"[i // 2 % 6] * 3 + str(i)} for i in range(8)])
    plan_of(world)
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "check", Mock(side_effect=Stopped(143, "stopped")))
        assert run_piece(world, plan, "1/2").exit_code == 143
    world.data.write_bytes(data)
    merged(world, restart=True)
    assert world.paths.output.read_bytes() == before


def test_damaged_plans(world: World) -> None:
    world.questions(range(6))
    path = plan_of(world)
    content = path.read_bytes()
    for place in range(0, len(content), 41):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            SavedPlan.load(path)
        except SglbatchError as error:
            assert error.code in ("plan-unreadable", "plan-version")
    arrays = dict(np.load(io.BytesIO(content)))
    for name, value in [
        ("row_places", arrays["row_places"] + 100),
        ("row_places", arrays["row_places"].astype(float)),
        ("occurrences", arrays["occurrences"][:2]),
        ("identity", np.frombuffer(b"[1]", dtype=np.uint8)),
        ("identity", np.frombuffer(b"{bad", dtype=np.uint8)),
    ]:
        with path.open("wb") as file:
            np.savez(file, **{**arrays, name: value})
        with pytest.raises(SglbatchError) as raised:
            SavedPlan.load(path)
        assert raised.value.code == "plan-unreadable"


def test_a_plan_that_is_saved_is_of_all_first_calls(world: World) -> None:
    """A merged job has answered them, but pieces have journals of their own."""
    world.questions(range(8))
    plan = in_two(world)
    merged(world)
    before = SavedPlan.load(plan).row_places.tolist()
    assert SavedPlan.load(plan_of(world)).row_places.tolist() == before
    world.write_template(TWO_GENS.replace("Answer", "Reply"))
    assert SavedPlan.load(plan_of(world)).row_places.tolist() == before
    done = world.num_requests
    in_two(world)
    assert world.num_requests == done + 8, "the last question of each row"


def test_what_cannot_go_together_with_pieces(world: World) -> None:
    world.questions(range(4))
    plan = plan_of(world)
    with pytest.raises(SglbatchError, match="--show answers the first rows of the data"):
        commands.show(world.config(shard="1/2", plan=plan), count=1)
    with pytest.raises(SglbatchError, match="--keep cannot have columns of standard input"):
        run_piece(world, plan, "1/2", data=("-",), keep=("q",))


def test_a_merged_report_says_what_the_pieces_changed_in_values(world: World) -> None:
    world.write_template(ODD)
    world.questions(range(6))
    in_two(world)
    report = merged(world).report
    assert report.notes == {SURROGATE: 6} and f"6 {SURROGATE}" in report.warnings


def test_a_merged_job_has_spent_and_may_spend_what_its_pieces_have_and_might(world: World) -> None:
    world.questions(range(4))
    in_two(world)
    for number, dollars in ((1, 2.0), (2, 3.0)):
        piece = JobPaths(output=piece_folder(world, number).with_suffix(""))
        manifest, report = Manifest.load(piece.manifest), Report.load(piece.report)
        replace(manifest, config=replace(manifest.config, max_cost=dollars)).save(piece.manifest)
        replace(report, api={**API_FACTS, "cost": {**API_FACTS["cost"], "dollars": dollars}}).save(piece.report)
    report = merged(world).report
    assert report.api["cost"]["dollars"] == 5 and report.api["retries"] == {"timeout": 4}
    assert "cost      $5.00 by --price" in report.render()
    assert Manifest.load(world.paths.manifest).config.max_cost == 5


def saved_plan(prompts: list[list[int]], rows: list[int]) -> SavedPlan:
    plan = make_plan([np.array(p, dtype=np.int32) for p in prompts])
    places = plan.positions()[rows].astype(np.int64)
    return SavedPlan(plan=plan, row_places=places, occurrences=np.ones(len(rows), dtype=np.int32), identity={})


def test_a_piece_ends_where_neighbours_share_least() -> None:
    documents = [[d] * 100 + [200 + q] for d in range(10) for q in range(10)]
    pieces = saved_plan(documents, list(range(100)))._pieces(4)
    assert sorted(Counter(pieces.tolist())) == [0, 1, 2, 3]
    assert all(len(set(pieces[10 * d : 10 * d + 10].tolist())) == 1 for d in range(10)), "no document is cut"


def test_what_every_piece_computes_again_counts_for_each() -> None:
    behind_one_beginning = [[1] * 285 + [2 + i] * 10 for i in range(12)]
    pieces = saved_plan(behind_one_beginning, list(range(12)))._pieces(3)
    assert sorted(Counter(pieces.tolist()).values()) == [4, 4, 4]


@pytest.mark.parametrize("count", range(1, 13))
def test_every_row_is_in_one_piece_and_no_piece_is_empty(count: int) -> None:
    rng = np.random.default_rng(count)
    prompts = [rng.integers(1, 4, rng.integers(1, 30)).tolist() for _ in range(9)]
    rows = rng.integers(0, 9, 12).tolist()
    saved = saved_plan(prompts, rows)
    pieces = saved._pieces(count)
    assert sorted(set(pieces.tolist())) == list(range(count))
    if len(set(rows)) >= count:
        assert all(pieces[a] == pieces[b] for a in range(12) for b in range(12) if rows[a] == rows[b])
