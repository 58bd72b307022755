"""Slabs: cut from texts, ordered by tokens, they are one walk of the tree, and the engine computes nothing twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.engine.radix.tree import common_prefix_len
from sglbatch.planner import cut_slabs, depth_first_order, make_plan, slab_order
from sglbatch.types import Generate, TokenIds
from tests.engine_stub import ids
from tests.planner_naive import build_trie, count_nodes
from tests.test_scheduler import make_engine, request

texts_strategy = st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=40)
lens_strategy = st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda pair: (pair[0], sum(pair)))


def tokens_of(text: str) -> TokenIds:
    """A token a character, in another order than the characters'."""
    return ids([{"a": 2, "b": 1, "c": 3}[char] for char in text])


def walked(texts: Sequence[str], min_len: int, max_len: int) -> list[list[TokenIds]]:
    """The prompts of each slab in the order in which they run, as the job puts them together."""
    cut = cut_slabs(texts, min_len=min_len, max_len=max_len, first_shares=(3, 2))
    slabs = [[texts[i] for i in slab] for slab, _ in cut]
    walk: list[list[TokenIds]] = []
    for number, slab in enumerate(slabs):
        prompts = [tokens_of(text) for text in slab]
        before = walk[-1][-1] if walk else None
        after = tokens_of(slabs[number + 1][0]) if number + 1 < len(slabs) else None
        order = slab_order(prompts, before=before, after=after, last=len(prompts) - 1)
        assert sorted(order.tolist()) == list(range(len(prompts)))
        walk.append([prompts[i] for i in order.tolist()])
    return walk


def computed(prompts: Sequence[TokenIds]) -> int:
    """Tokens that a walk adds, where it finds what it has in common with the prompt before."""
    shared = sum(common_prefix_len(a, b) for a, b in pairwise(prompts))
    return sum(map(len, prompts)) - shared


@given(texts_strategy, lens_strategy, st.lists(st.integers(1, 3), max_size=3))
def test_slabs_are_the_texts_in_order(texts: list[str], lens: tuple[int, int], first_shares: list[int]) -> None:
    min_len, max_len = lens
    cut = list(cut_slabs(texts, min_len=min_len, max_len=max_len, first_shares=first_shares))
    slabs = [slab for slab, _ in cut]
    assert [following for _, following in cut] == [*(slab[0] for slab in slabs[1:]), None][: len(slabs)]
    order = [i for slab in slabs for i in slab]
    assert order == sorted(range(len(texts)), key=texts.__getitem__), "equal texts in input order"
    for number, (slab, following) in enumerate(pairwise(slabs)):
        share = first_shares[number] if number < len(first_shares) else 1
        min_len, max_len = ceil(lens[0] / share), ceil(lens[1] / share)
        assert len(slab) >= min_len
        assert texts[slab[-1]] != texts[following[0]], "equal texts stay together"
        assert len(slab) <= max_len or texts[slab[min_len - 1]] == texts[slab[-1]], "only equal texts make it longer"


def test_a_slab_ends_where_least_is_shared() -> None:
    texts = ["aaa", "aab", "aac", "b", "ba", "bb"]
    assert list(cut_slabs(texts, min_len=1, max_len=5)) == [([0, 1, 2], 3), ([3, 4, 5], None)]
    assert list(cut_slabs(["x"] * 7 + ["y"], min_len=1, max_len=2)) == [([0, 1, 2, 3, 4, 5, 6], 7), ([7], None)]
    assert list(cut_slabs([], min_len=1, max_len=2)) == []


@settings(max_examples=400)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=20), st.data())
def test_any_slab_order_is_depth_first(prompts: list[list[int]], data: st.DataObject) -> None:
    mark = st.none() | st.lists(st.integers(1, 3), min_size=1, max_size=6).map(ids)
    arrays = [ids(prompt) for prompt in prompts]
    before, after = data.draw(mark), data.draw(mark)
    last = data.draw(st.none() | st.integers(0, len(prompts) - 1))
    order = slab_order(arrays, before=before, after=after, last=last)
    assert sorted(order.tolist()) == list(range(len(prompts)))
    assert computed([arrays[i] for i in order.tolist()]) == count_nodes(build_trie(prompts))
    if before is None and after is None and last is None:
        assert np.array_equal(order, depth_first_order(arrays)[0])


@settings(max_examples=300)
@given(texts_strategy, lens_strategy)
def test_slabs_together_are_one_walk(texts: list[str], lens: tuple[int, int]) -> None:
    """Where the tree of the texts is that of the tokens, no cut costs a token, wherever it is."""
    walk = walked(texts, *lens)
    prompts = [prompt for slab in walk for prompt in slab]
    assert computed(prompts) == count_nodes(build_trie([prompt.tolist() for prompt in prompts]))


def run_slabs(walk: list[list[TokenIds]], *, seed: int, num_slots: int | None = None, tell: bool = True) -> int:
    """Tokens that the engine computes when slabs come while it runs; ``tell``: it knows that more will come."""
    rng = random.Random(seed)
    prompts = [prompt for slab in walk for prompt in slab]
    operation = Generate(max_tokens=3, temperature=0.0)
    least = make_plan(prompts, [operation] * len(prompts)).kv_tokens_minimum
    engine, _ = make_engine(num_slots or least, reserve="full", max_batch_tokens=rng.randint(1, 12))
    position = num_results = 0
    for number, slab in enumerate(walk):
        requests = [request(position + i, p.tolist(), operation, priority=(position + i,)) for i, p in enumerate(slab)]
        position += len(slab)
        engine.expect_more(tell and number + 1 < len(walk))
        engine.submit(requests)
        for _ in range(rng.choice([0, 1, 2, 100])):
            num_results += len(engine.step())
            engine.scheduler.check_integrity()
    while engine.has_unfinished:
        num_results += len(engine.step())
        engine.scheduler.check_integrity()
    assert num_results == len(prompts)
    assert engine.scheduler.pool.num_free == engine.scheduler.config.num_slots
    return engine.stats().computed_prompt_tokens


@settings(max_examples=150, deadline=None)
@given(texts_strategy, lens_strategy, st.integers(0, 1000), st.sampled_from([None, 60]))
def test_the_engine_computes_unique_tokens(
    texts: list[str], lens: tuple[int, int], seed: int, slots: int | None
) -> None:
    """However the slabs' coming and the engine's steps interleave, and with a pool for one request."""
    walk = walked(texts, *lens)
    unique = count_nodes(build_trie([prompt.tolist() for slab in walk for prompt in slab]))
    assert run_slabs(walk, seed=seed, num_slots=slots) == unique


@pytest.mark.parametrize("tell", [True, False])
def test_an_engine_that_knows_of_no_more_forgets(tell: bool) -> None:
    walk = walked(["aaaa", "aaab", "aaac", "aaba"], 1, 2)
    assert len(walk) > 1
    unique = count_nodes(build_trie([prompt.tolist() for slab in walk for prompt in slab]))
    found = {run_slabs(walk, seed=seed, tell=tell) for seed in range(20)}
    assert found == {unique} if tell else max(found) > unique
