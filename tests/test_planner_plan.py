"""A plan's numbers, its saved form, and the pools of memory it asks for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglbatch.errors import SglbatchError
from sglbatch.planner import Plan, make_plan
from sglbatch.planner.estimate import AnswerTokens, answer_tokens, kv_bytes_per_token
from sglbatch.types import Choose, Generate, Operation, prefill_runs
from tests.planner_naive import as_ids, build_trie, count_nodes, prompt_lists

ARRAYS = ("order", "lcp", "lengths", "reserved")


def _plan(prompts: list[list[int]], reserved: list[int] | None = None) -> Plan:
    """``reserved``: KV slots behind each prompt; an answer's last token needs none."""
    return make_plan(as_ids(prompts), reserved and [Generate(max_tokens=number + 1) for number in reserved])


@given(prompt_lists())
def test_numbers(prompts: list[list[int]]) -> None:
    plan = _plan(prompts)
    tokens, unique = sum(map(len, prompts)), count_nodes(build_trie(prompts))
    assert (plan.num_requests, plan.num_tokens, plan.unique_tokens) == (len(prompts), tokens, unique)
    assert plan.best_hit_rate == (1 - unique / tokens if tokens else 0.0)
    assert plan.lengths.tolist() == [len(prompts[index]) for index in plan.order]
    assert plan.positions()[plan.order].tolist() == list(range(len(prompts)))
    assert plan.order[plan.positions()].tolist() == list(range(len(prompts)))


@given(prompt_lists(), st.data())
def test_kv_tokens_is_the_largest_window_of_the_order(prompts: list[list[int]], data: st.DataObject) -> None:
    reserved = data.draw(st.lists(st.integers(0, 5), min_size=len(prompts), max_size=len(prompts)))
    num_running = data.draw(st.integers(1, max(1, len(prompts) + 2)))
    plan = _plan(prompts, reserved)
    width = min(num_running, len(prompts))
    windows = [plan.order[left : left + width].tolist() for left in range(len(prompts) - width + 1)]
    needed = [count_nodes(build_trie([prompts[i] for i in w])) + sum(reserved[i] for i in w) for w in windows if w]
    assert plan.kv_tokens(num_running) == max(needed, default=0)


def test_smallest_and_whole_pool() -> None:
    plan = _plan([[1, 2, 3], [1, 2, 4, 5], [9]], [10, 1, 20])
    assert plan.kv_tokens_minimum == 21  # [9] and its 20
    assert plan.kv_tokens_whole == 6 + 31
    assert _plan([]).kv_tokens_minimum == _plan([]).kv_tokens_whole == 0


def test_arrays_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        _plan([[1], [2]]).order[0] = 1


@given(prompts=prompt_lists())
def test_save_and_load(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plan") / "job.plan"
    plan = _plan(prompts, list(range(len(prompts))))
    plan.save(path)
    loaded = Plan.load(path)
    assert (loaded.version, loaded.fingerprint) == (plan.version, plan.fingerprint)
    assert (loaded.num_tokens, loaded.unique_tokens) == (plan.num_tokens, plan.unique_tokens)
    for name in ARRAYS:
        assert getattr(loaded, name).dtype == getattr(plan, name).dtype
        assert getattr(loaded, name).tolist() == getattr(plan, name).tolist()
    assert [file.name for file in path.parent.iterdir()] == ["job.plan"]


@given(prompt_lists(), prompt_lists())
def test_a_plan_matches_its_own_prompts_only(prompts: list[list[int]], others: list[list[int]]) -> None:
    assert _plan(prompts).matches(as_ids(prompts))
    assert _plan(prompts).matches(as_ids(others)) == (prompts == others)


HEADER = {"version": 1, "num_tokens": 5, "unique_tokens": 4, "fingerprint": "f"}


def test_an_undamaged_plan_is_read(tmp_path: Path) -> None:
    assert Plan.load(_saved(tmp_path / "p", HEADER)).num_requests == 3


@pytest.mark.parametrize("header", [{"version": 1}, HEADER | {"num_tokens": "5"}, HEADER | {"fingerprint": None}])
def test_a_damaged_header_is_refused(tmp_path: Path, header: dict[str, object]) -> None:
    with pytest.raises(SglbatchError) as raised:
        Plan.load(_saved(tmp_path / "p", header))
    assert raised.value.code == "plan-unreadable"


def _saved(path: Path, header: object, **changed: np.ndarray | None) -> Path:
    plan = _plan([[1, 2], [1, 3], [4]])
    arrays = {name: getattr(plan, name) for name in ARRAYS} | changed
    with path.open("wb") as file:
        np.savez(
            file,
            header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
            **{name: array for name, array in arrays.items() if array is not None},
        )
    return path


def test_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SglbatchError) as raised:
        Plan.load(_saved(tmp_path / "p", {"version": 99, "fingerprint": "f"}))
    assert raised.value.code == "plan-version"
    assert "version 99" in raised.value.message and raised.value.hint


@pytest.mark.parametrize(
    "changed",
    [
        {"lcp": None},
        {"lcp": np.array([0, 1], dtype=np.int32)},
        {"lcp": np.array([0, 1, 0], dtype=np.int64)},
        {"lcp": np.array([0, 9, 0], dtype=np.int32)},
        {"order": np.array([0, 0, 1])},
        {"order": np.array([0, 1, 3])},
        {"order": np.array([None, None, None])},  # would need pickle
    ],
)
def test_a_damaged_plan_is_refused(tmp_path: Path, changed: dict[str, np.ndarray | None]) -> None:
    path = _saved(tmp_path / "p", HEADER, **changed)
    with pytest.raises(SglbatchError) as raised:
        Plan.load(path)
    assert raised.value.code == "plan-unreadable" and raised.value.where == str(path)


@pytest.mark.parametrize("content", [b"", b"not a plan", b"PK\x03\x04 cut short", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p"
    path.write_bytes(content)
    with pytest.raises(SglbatchError) as raised:
        Plan.load(path)
    assert raised.value.code == "plan-unreadable"


def test_a_truncated_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    _plan([[1, 2], [1, 3]]).save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(SglbatchError) as raised:
        Plan.load(path)
    assert raised.value.code == "plan-unreadable"


def test_a_bare_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.npy"
    np.save(path, np.arange(3))
    with pytest.raises(SglbatchError) as raised:
        Plan.load(path)
    assert raised.value.code == "plan-unreadable"


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(SglbatchError, match="No such file"):
        Plan.load(tmp_path / "none")
    with pytest.raises(SglbatchError) as raised:
        _plan([[1]]).save(tmp_path / "no" / "folder")
    assert raised.value.code == "plan-not-written" and raised.value.hint


def test_answer_tokens() -> None:
    choose = Choose(alternatives=((1, 2), (1, 3, 4), (5,)))
    generate = Generate(max_tokens=7)
    runs = AnswerTokens(generated=0, context=3, kv=3, num_runs=3, run_tokens=3)  # (), (1), (1, 3)
    assert answer_tokens([generate, choose]) == [AnswerTokens(generated=7, context=7, kv=6), runs]


_alternatives = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, unique=True)
_operations = st.one_of(
    st.just(Generate(max_tokens=4)),
    st.builds(Choose, alternatives=_alternatives.map(tuple)),
)


@given(prompt_lists(), st.data())
def test_alternatives_count_as_runs(prompts: list[list[int]], data: st.DataObject) -> None:
    operations: list[Operation] = data.draw(st.lists(_operations, min_size=len(prompts), max_size=len(prompts)))
    calls = zip(as_ids(prompts), operations, strict=True)
    runs = [run.tolist() for prompt, operation in calls for run in prefill_runs(prompt, operation)]
    plan = make_plan(as_ids(prompts), operations)
    assert plan.num_tokens == sum(map(len, runs))
    assert plan.unique_tokens == count_nodes(build_trie(runs))
    assert plan.kv_tokens_minimum == max(
        (
            len(prompt)
            + sum(len(run) - len(prompt) for run in prefill_runs(prompt, operation))
            + (operation.max_tokens - 1 if isinstance(operation, Generate) else 0)
            for prompt, operation in zip(as_ids(prompts), operations, strict=True)
        ),
        default=0,
    )


def test_kv_bytes_per_token() -> None:
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert kv_bytes_per_token(config, bytes_per_value=4) == 2 * 30 * 3 * 64 * 4
    assert kv_bytes_per_token({"text_config": config | {"head_dim": 32}}, bytes_per_value=2) == 2 * 30 * 3 * 32 * 2
    assert kv_bytes_per_token({"n_layer": 12}, bytes_per_value=2) is None
