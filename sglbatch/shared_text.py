"""Text that many prompts share: where it may be cut, common prefixes as a tree of pieces, words. No tokenizer in here.

A **safe cut** stands before a space (U+0020) that follows something other than white space. Pre-tokenizers begin a word
there, so both sides tokenise by themselves as they do together. U+2581, which sentencepiece writes for a space, counts
as white space. Not every tokenizer has to agree: ``probe_texts`` are for finding out.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Final, NamedTuple

MIN_SHARED_CHARS: Final = 24
"""A common part that is shorter is not worth a piece of its own: joining costs more than looking words up."""

_SPACE_MARK: Final = "\u2581"
_WORD: Final = re.compile(r"\s*\S+(?:[^\S ]\s*\S*)*|\s+")
_WORD_WITH_MARK: Final = re.compile(r"[\s\u2581]*[^\s\u2581]+(?:(?:[^\S ]|\u2581)[\s\u2581]*[^\s\u2581]*)*|[\s\u2581]+")
_LOOK_BACK_CHARS: Final = 64
_MAX_LOOKS: Final = 500


class Run(NamedTuple):
    """Plain text that tokenises as one; ``at_start`` when nothing stands before it."""

    text: str
    at_start: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPieces:
    """Runs as chains of pieces, cut at safe cuts.

    Attributes:
        pieces: each distinct one once; ``at_start`` for the first pieces of runs that have it.
        chains: for each run the indices of its pieces.
    """

    pieces: list[Run]
    chains: list[tuple[int, ...]]


def share_prefixes(runs: Sequence[Run], *, min_shared_chars: int = MIN_SHARED_CHARS) -> SharedPieces:
    """Cuts distinct, non-empty runs where they part from each other, so that a prefix of several is one piece."""
    if not runs:
        return SharedPieces(pieces=[], chains=[])
    texts = [run.text for run in runs]
    order = sorted((i for i, run in enumerate(runs) if not run.at_start), key=texts.__getitem__)
    order += sorted((i for i, run in enumerate(runs) if run.at_start), key=texts.__getitem__)
    tree = _PrefixTree([_shared_cut(runs[a], runs[b]) for a, b in pairwise(order)])
    index: defaultdict[Run, int] = defaultdict(count().__next__)
    path: list[tuple[int, ...]] = [()] * len(tree.depth)  # of each node: the pieces of the text up to its cut
    reach = [0] * len(tree.depth)  # of each node: where these pieces end; before its depth when the rest is too short
    for node in sorted(range(1, len(tree.depth)), key=tree.depth.__getitem__):
        parent, depth = tree.parent[node], tree.depth[node]
        path[node], reach[node] = path[parent], reach[parent]
        if depth - reach[node] >= min_shared_chars:
            run = runs[order[tree.leaf[node]]]
            piece = Run(run.text[reach[node] : depth], run.at_start and not reach[node])
            path[node], reach[node] = (*path[node], index[piece]), depth
    chains: list[tuple[int, ...]] = [()] * len(runs)
    for i, node in zip(order, tree.leaf_parent, strict=True):
        text, at_start = runs[i]
        begin = reach[node]
        chains[i] = (*path[node], index[Run(text[begin:], at_start and not begin)])
    return SharedPieces(pieces=list(index), chains=chains)


def split_words(text: str) -> list[str]:
    """The text between all its safe cuts."""
    return (_WORD_WITH_MARK if _SPACE_MARK in text else _WORD).findall(text)


def is_blank(char: str) -> bool:
    """White space, as safe cuts have it."""
    return char.isspace() or char == _SPACE_MARK


def last_safe_cut(text: str, end: int) -> int:
    """The last safe cut whose space stands before ``end``; 0 if there is none, or none for a long way."""
    for _ in range(_MAX_LOOKS):
        cut = text.rfind(" ", 0, end)
        if cut <= 0:
            return 0
        begin = max(0, cut - _LOOK_BACK_CHARS)
        end = begin + len(text[begin:cut].rstrip())  # of what stands before the white space
        if end and text[end] == " " and not is_blank(text[end - 1]):
            return end
    return 0


def common_len(a: str, b: str) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is one memory comparison each."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def probe_texts(words: Sequence[str], *, num_texts: int = 1000) -> list[str]:
    """Texts that break what can break: white space of every kind, digits, line ends, scripts, marks that combine.

    The same texts for the same ``words``, which are put in between. Many share a beginning.
    """
    rng = random.Random(0)
    texts = ["a"]
    while len(texts) < num_texts:
        parts = [_probe_part(rng, words) for _ in range(rng.randint(1, 16))]
        head = rng.choice(texts[-20:])
        texts.append((head[: rng.randint(0, 80)] if rng.random() < 0.6 else "") + "".join(parts))
    return list(dict.fromkeys(text for text in texts if text))


_PROBE_SPACES: Final = (
    *([" "] * 12),
    *("  ", "   ", " " * 9, "\n", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\xa0", "\u3000", "\u2028", "\x85", "\x0b"),
    *("\x1c", "\u200b", ""),
)
_PROBE_WORDS: Final = (
    *("the", "The", "Answer", "hello", "don't", "'s", "'LL", "’re", "I'm", "e.g.", "</s>", "<s>", "<|im_end|>", "a_b"),
    *(
        "naïve",
        "l'été",
        "cafe\u0301",
        "ẞ",
        "Å",
        "\u212b",
        "\ufb01",
        "\u0301",
        "\u0308x",
        "\u1100\u1161",
        "\u2581",
        "°C",
    ),
    *("Привет", "мир", "שלום", "مرحبا", "हिन्दी", "ไทย", "中文字", "かな", "한국어", "🙂", "👩\u200d👧", "🇩🇪"),
    *("1", "12", "123", "2026", "3.14", "1,000", "-7", "٣", "Ⅳ", "½", "²", "\x00", "\x01", "\x7f"),
    *("...", "!!", "?", "-", "--", "(", ")", "[", "{}", "//", "\\n", "#", "$x", "@", "=", "==", ";", ":", "€"),
)


def _probe_part(rng: random.Random, words: Sequence[str]) -> str:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(_PROBE_SPACES)
    if kind < 0.55 and words:
        return rng.choice(words)
    if kind < 0.65:
        planes = ((0x21, 0x24F), (0x250, 0x2FFF), (0x3000, 0xD7FF), (0x10000, 0x1FFFF))
        return chr(rng.randint(*rng.choice(planes)))
    return rng.choice(_PROBE_WORDS)


class _PrefixTree:
    """What sorted texts have in common, as nested intervals of them. Node 0 is the root.

    Args:
        cuts: [num_texts - 1] where neighbours part.

    Attributes:
        depth: [num_nodes] characters that the texts under a node share, up to a safe cut.
        parent: [num_nodes] of smaller depth, except the root's own.
        leaf: [num_nodes] one of the texts under it.
        leaf_parent: [num_texts] the deepest node over a text.
    """

    def __init__(self, cuts: Sequence[int]) -> None:
        self.depth, self.parent, self.leaf = [0], [0], [0]
        self.leaf_parent: list[int] = []
        stack = [0]  # the nodes over the text at hand, root first
        for i, cut in enumerate((*cuts, 0)):
            if cut > self.depth[stack[-1]]:
                stack.append(self._add(cut, stack[-1], i))
            self.leaf_parent.append(stack[-1])
            while self.depth[stack[-1]] > cut:
                child = stack.pop()
                if self.depth[stack[-1]] < cut:  # a node that shows only now, after its children
                    stack.append(self._add(cut, stack[-1], i))
                    self.parent[child] = stack[-1]

    def _add(self, depth: int, parent: int, leaf: int) -> int:
        self.depth.append(depth)
        self.parent.append(parent)
        self.leaf.append(leaf)
        return len(self.depth) - 1


def _shared_cut(a: Run, b: Run) -> int:
    """Where neighbours part: one that begins a document has nothing in common with one that does not."""
    return last_safe_cut(a.text, common_len(a.text, b.text)) if a.at_start == b.at_start else 0
