"""The top of the tree, held against a trie, and the text that shows it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglbatch.lang.calls import PendingCall
from sglbatch.planner import (
    JobFacts,
    Summary,
    Tree,
    depth_first_order,
    escape_controls,
    plan_calls,
    render_summary,
    shorten,
    top_of_tree,
)
from sglbatch.types import Choose, ErrorInfo, Generate, Operation, TokenIds
from tests.planner_naive import as_ids, build_trie, prompt_lists, shared_edges


def _decode(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def _tree(prompts: list[list[int]], max_nodes: int = 12, min_requests: int = 2) -> Tree:
    ids = as_ids(prompts)
    order, lcp = depth_first_order(ids)
    return top_of_tree(order, lcp, ids, _decode, max_nodes=max_nodes, min_requests=min_requests)


def _paths(tree: Tree) -> list[tuple[str, int, int]]:
    """(whole text from the root, tokens shown, requests) of each node, joined along the levels."""
    found, path = [], []
    for node in tree.nodes:
        path = [*path[: node.level], node.text]
        found.append((" ".join(path), node.num_tokens, node.num_requests))
    return found


@given(prompt_lists())
def test_all_nodes_are_the_tries(prompts: list[list[int]]) -> None:
    edges = list(shared_edges(build_trie(prompts)))
    tree = _tree(prompts, max_nodes=1000)
    assert sorted(_paths(tree)) == sorted((_decode(text), length, count) for text, length, count in edges)
    assert tree.num_hidden == tree.hidden_saved_tokens == 0
    assert tree.saved_tokens == sum(length * (count - 1) for _, length, count in edges)


@given(prompt_lists(), st.integers(0, 4), st.integers(2, 4))
def test_a_part_of_the_nodes(prompts: list[list[int]], max_nodes: int, min_requests: int) -> None:
    edges = list(shared_edges(build_trie(prompts)))
    counts = {_decode(text): count for text, _, count in edges}
    savings = sorted((length * (count - 1) for _, length, count in edges if count >= min_requests), reverse=True)
    tree = _tree(prompts, max_nodes, min_requests)
    assert len(tree.nodes) == min(max_nodes, len(savings))
    assert len(tree.nodes) + tree.num_hidden == len(edges)
    assert tree.saved_tokens == sum(length * (count - 1) for _, length, count in edges)
    assert tree.hidden_saved_tokens >= 0
    shown = {path: requests for path, _, requests in _paths(tree)}
    assert shown.items() <= counts.items()
    own = {_decode(text): length * (count - 1) for text, length, count in edges}
    assert sorted((own[path] for path in shown), reverse=True) == savings[:max_nodes]


def test_text_starts_where_the_shown_parent_ends() -> None:
    tree = _tree([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 9], [1, 9]], max_nodes=1)
    (node,) = tree.nodes  # "2 3 4" saves 3 tokens, as does "1", but more than "9"; the earlier and shallower one stays
    assert (node.text, node.start, node.end, node.level, node.num_requests) == ("1", 0, 1, 0, 4)
    tree = _tree([[1, 2, 3, 4, 7, 5], [1, 2, 3, 4, 7, 6], [1, 9], [1, 9]], max_nodes=1)
    assert [node.text for node in tree.nodes] == ["1 2 3 4 7"]
    assert (tree.num_hidden, tree.saved_tokens, tree.hidden_saved_tokens) == (2, 3 + 4 + 1, 3)


@given(st.text())
def test_escaped_text_is_safe(text: str) -> None:
    escaped = escape_controls(text)
    assert all(not unicodedata.category(char).startswith("C") for char in escaped)
    assert "\u2028" not in escaped and "\u2029" not in escaped


def test_escapes() -> None:
    assert escape_controls("a\n\t\x1b[31m\u202e\U000e0001é") == "a\\n\\t\\x1b[31m\\u202e\\U000e0001é"


@given(st.text(alphabet="ab漢字é\u0301"), st.integers(3, 30))
def test_shortened_text_fits(text: str, width: int) -> None:
    def columns(text: str) -> int:
        wide = {"漢": 2, "字": 2, "\u0301": 0}
        return sum(wide.get(char, 1) for char in text)

    short = shorten(text, width)
    assert columns(short) <= width
    assert (short == text) == (columns(text) <= width)


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert shorten("abcde", 5) == "abcde"
    assert shorten(["a", "\\n", "b", "c", "\\n"], 5) == "a…\\n"


def _calls(decode: Callable[[TokenIds], str] = _decode) -> list[PendingCall]:
    shared = [1] * 40
    choose = Choose(alternatives=((7,), (8,), (7, 9)))
    prompts = as_ids([[*shared, 2], [*shared, 3], [5], [6] * 95])
    operations: list[Operation] = [choose, choose, Generate(max_tokens=16), Generate(max_tokens=16)]
    askers = [[0], [1, 4, 5], [2], [3]]
    return [
        PendingCall(
            key=f"key {index}",
            prompt_ids=prompt,
            operation=operation,
            path=(0,),
            name="answer",
            seed=0,
            keep=isinstance(operation, Choose),
            program_ids=programs,
            waiters=[(program, (0,)) for program in programs],
            decode=decode,
        )
        for index, (prompt, operation, programs) in enumerate(zip(prompts, operations, askers, strict=True))
    ]


FACTS = JobFacts(
    num_rows=8,
    context_len=100,
    errors=[ErrorInfo(code="bad-json", message="x"), ErrorInfo(code="null-value", message="y")],
    calls_reused=3,
    kv_bytes_per_token={"bfloat16": 23040, "float32": 46080},
)


def test_plan_calls() -> None:
    plan, summary, tree = plan_calls(_calls(), FACTS)
    assert plan.order.tolist() == [0, 1, 2, 3]
    assert summary == Summary(
        num_rows=8,
        failed_rows={"bad-json": 1, "null-value": 1},
        num_requests=4,
        num_equal_calls=2,
        calls_reused=3,
        num_too_long=1,
        longest_prompt_len=95,
        prompt_tokens=178 + 2 * (41 + 1),  # a choice of (7), (8), (7, 9) is two runs: the prompt, and the prompt and 7
        unique_tokens=138 + 2,
        best_hit_rate=plan.best_hit_rate,
        most_generated_tokens=16 + 16,
        kv_tokens_minimum=95 + 15,
        kv_tokens_whole=138 + 1 + 1 + 30,
        kv_bytes_per_token={"bfloat16": 23040, "float32": 46080},
        follow_up_rows=4,
    )
    assert [(node.num_tokens, node.num_requests) for node in tree.nodes] == [(40, 2)]
    assert json.loads(json.dumps(summary.to_json()))["follow_up_calls"] == {
        "estimated": True,
        "calls": 4,
        "rows": 4,
    }
    assert json.loads(json.dumps(tree.to_json()))["nodes"][0]["saved_tokens"] == 40


def test_nothing_to_plan() -> None:
    plan, summary, tree = plan_calls([], JobFacts(num_rows=0, context_len=10))
    assert plan.num_requests == summary.prompt_tokens == tree.saved_tokens == 0
    assert render_summary(summary, tree) == "rows             0\nrequests         0"
    waiting = plan_calls([], JobFacts(num_rows=3, context_len=10, rows_outside=1))
    assert "outside          1 row calls a function first" in render_summary(*waiting[1:])


def test_rendered_plan() -> None:
    _, summary, tree = plan_calls(_calls(lambda ids: "Answer\x1b[2J:\n" * len(ids)), FACTS)
    assert (
        render_summary(summary, tree, width=60)
        == """\
rows             8, 2 failed already (bad-json 1, null-value 1)
requests         4, and 2 equal calls answered with them
answered already 3 calls
too long         1 request over the context length; their rows will fail
prompt tokens    262, longest 95
unique tokens    140
best hit rate    46.6%
generated tokens at most 32 by these first calls
KV needed        110 tokens (2.4 MiB in bfloat16, 4.8 MiB in float32) at least
                 170 tokens (3.7 MiB in bfloat16, 7.5 MiB in float32) to hold everything at once
follow-up calls  4 or more (estimated): 4 rows go on after these answers

tokens  requests  shared beginning
    40         2  "Answer\\x1b[2J:\\nAnsw…:\\nAnswer\\x1b[2J:\\n"\
"""
    )


@pytest.mark.parametrize("width", [50, 60, 100])
def test_deep_trees_stay_on_their_lines(width: int) -> None:
    tree = _tree([list(range(depth)) for depth in range(1, 60)], max_nodes=58)
    lines = render_summary(plan_calls([], FACTS)[1], tree, width).split("\n\n")[1].splitlines()
    assert len(lines) == 59
    assert max(map(len, lines)) <= width
