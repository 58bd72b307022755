"""A trie of token ids, built one token at a time: what the planner's arrays are held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from sglbatch.types import TokenIds


@dataclass
class TrieNode:
    children: dict[int, TrieNode] = field(default_factory=dict)
    num_requests: int = 0
    ending: list[int] = field(default_factory=list)


def build_trie(prompts: list[list[int]]) -> TrieNode:
    root = TrieNode()
    for index, prompt in enumerate(prompts):
        node = root
        node.num_requests += 1
        for token in prompt:
            node = node.children.setdefault(token, TrieNode())
            node.num_requests += 1
        node.ending.append(index)
    return root


def count_nodes(node: TrieNode) -> int:
    """Nodes below ``node``: the tokens of the tree."""
    return sum(1 + count_nodes(child) for child in node.children.values())


def depth_first(node: TrieNode) -> list[int]:
    """Prompts in depth-first order, children by token id, a prompt before its extensions."""
    return node.ending + [index for token in sorted(node.children) for index in depth_first(node.children[token])]


def shared_edges(node: TrieNode, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(text up to the end of the edge, edge length, requests) of each radix-tree edge that two or more requests use."""
    for token, child in node.children.items():
        end, text = child, (*path, token)
        while len(end.children) == 1 and not end.ending:
            ((next_token, end),) = end.children.items()
            text = (*text, next_token)
        if end.num_requests >= 2:
            yield text, len(text) - len(path), end.num_requests
            yield from shared_edges(end, text)


def as_ids(prompts: list[list[int]]) -> list[TokenIds]:
    return [np.array(prompt, dtype=np.int32) for prompt in prompts]


_token = st.sampled_from([0, 1, 2, 255, 256, 49151, 2**31 - 1])  # byte order shows at 255 and 256
_fresh = st.lists(st.lists(_token, max_size=8), max_size=12)


@st.composite
def prompt_lists(draw: st.DrawFn) -> list[list[int]]:
    """Lists of prompts with many shared beginnings, duplicates, extensions and empty prompts."""
    prompts = draw(_fresh)
    for tail in draw(_fresh):
        if prompts:
            other = draw(st.sampled_from(prompts))
            prompts.append(other[: draw(st.integers(0, len(other)))] + tail)
    return prompts
