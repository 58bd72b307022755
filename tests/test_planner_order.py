"""The order is a depth-first walk of the radix tree, and the common prefixes are its edges."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglbatch.engine.radix.tree import common_prefix_len
from sglbatch.planner import depth_first_order
from tests.planner_naive import as_ids, build_trie, count_nodes, depth_first, prompt_lists


@given(prompt_lists(), st.sampled_from([1, 64, 1 << 20]))
def test_order_is_a_depth_first_walk(prompts: list[list[int]], key_tokens: int) -> None:
    order, lcp = depth_first_order(as_ids(prompts), key_tokens=key_tokens)
    assert order.dtype == np.int64 and lcp.dtype == np.int32
    assert order.tolist() == depth_first(build_trie(prompts))


@given(prompt_lists())
def test_lengths_less_common_prefixes_are_the_tokens_of_the_tree(prompts: list[list[int]]) -> None:
    _, lcp = depth_first_order(as_ids(prompts))
    assert sum(map(len, prompts)) - int(lcp.sum()) == count_nodes(build_trie(prompts))


@given(prompt_lists())
def test_common_prefix_with_the_neighbour(prompts: list[list[int]]) -> None:
    order, lcp = depth_first_order(as_ids(prompts))
    for place in range(1, len(prompts)):
        a, b, common = prompts[order[place - 1]], prompts[order[place]], int(lcp[place])
        assert a[:common] == b[:common]
        assert common == min(len(a), len(b)) or a[common] != b[common]
    assert not len(lcp) or lcp[0] == 0


@pytest.mark.parametrize(
    ("a", "b", "common"), [([], [], 0), ([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([5], [6], 0)]
)
def test_common_prefix_len(a: list[int], b: list[int], common: int) -> None:
    first, second = as_ids([a, b])
    assert common_prefix_len(first, second) == common_prefix_len(second, first) == common


def test_long_ties_take_several_rounds_and_stay_in_input_order() -> None:
    shared = list(range(100))
    prompts = [[*shared, 7], shared, [*shared, 7], [*shared, 3, 9], shared]
    order, lcp = depth_first_order(as_ids(prompts), key_tokens=1)
    assert order.tolist() == [1, 4, 3, 0, 2]
    assert lcp.tolist() == [0, 100, 100, 100, 101]


def test_ten_million_tokens_are_ordered_within_a_second() -> None:
    rng = np.random.default_rng(0)
    shared = [rng.integers(0, 49152, 600, dtype=np.int32) for _ in range(57)]
    own = [rng.integers(0, 49152, 100, dtype=np.int32) for _ in range(14_000)]
    prompts = [np.concatenate((shared[index % 57], tail)) for index, tail in enumerate(own)]
    started = time.process_time()  # of this process: other work on the machine does not count
    order, lcp = depth_first_order(prompts)
    assert time.process_time() - started < 1.0
    assert len(order) == len(prompts)
    assert int(lcp.sum()) >= (14_000 - 57) * 600
