"""Text that is tokenised once for many prompts, held to tokenising each text whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.run_encoder import RunEncoder
from sglbatch.shared_text import Run, common_len, last_safe_cut, probe_texts, share_prefixes, split_words
from sglbatch.token_bytes import byte_table
from sglbatch.tokenizer import Tokenizer
from sglbatch.tokenizer_files import TokenizerFiles
from sglbatch.types import Ids, Prompt, Text
from tests import tokenizer_specs as specs

MARK = "\u2581"
NEVER = 1 << 60
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
ENGLISH = ["\u0120the", "the", "\u0120\u0120\u0120", "\u010a\u010a", "12", "123", "\u0120a", "ing", "\u0120.", "..."]


def _safe_cuts(text: str) -> list[int]:
    """By the definition, character by character."""
    blank = [char.isspace() or char == MARK for char in text]
    return [i for i in range(1, len(text)) if text[i] == " " and not blank[i - 1]]


def _texts() -> st.SearchStrategy[str]:
    blanks = st.sampled_from([" ", " ", " ", "  ", "\n", "\t", "\u3000", MARK, " \n ", "x" * 70, " " * 70])
    return st.lists(blanks | st.text(alphabet="abé", min_size=1, max_size=3), min_size=1, max_size=12).map("".join)


@st.composite
def _families(draw: st.DrawFn) -> list[str]:
    """Distinct texts, of which many begin as others do."""
    pieces = st.sampled_from(
        [" ", "  ", "\n", "\n\n", " \n", "12", "3", "'s", "the", " the", ".", "<|im_end|>", MARK, "é"]
    )
    tail = st.lists(pieces | st.text(min_size=1, max_size=6), max_size=10).map("".join)
    texts = [draw(tail)]
    for _ in range(draw(st.integers(0, 20))):
        head = draw(st.sampled_from(texts))
        texts.append(head[: draw(st.integers(0, len(head)))] + draw(tail))
    return [text for text in dict.fromkeys(texts) if text]


# --- the text ----------------------------------------------------------------------------------


@given(text=_texts())
def test_words_are_cut_at_every_safe_cut_and_nowhere_else(text: str) -> None:
    words = split_words(text)
    assert "".join(words) == text
    assert np.cumsum([len(word) for word in words])[:-1].tolist() == _safe_cuts(text)


@given(text=_texts(), end=st.integers(0, 200))
def test_last_safe_cut_against_the_definition(text: str, end: int) -> None:
    assert last_safe_cut(text, end) == max((cut for cut in _safe_cuts(text) if cut < end), default=0)


@given(a=st.text(alphabet="ab", max_size=12), b=st.text(alphabet="ab", max_size=12))
def test_common_len_against_the_definition(a: str, b: str) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_len(a, b) == expected


@given(texts=_families(), at_start=st.lists(st.booleans(), min_size=30, max_size=30), least=st.integers(1, 12))
def test_chains_are_the_texts_and_share_what_is_common(texts: list[str], at_start: list[bool], least: int) -> None:
    runs = [Run(text, flag) for text, flag in zip(texts, at_start, strict=False)]
    shared = share_prefixes(runs, min_shared_chars=least)
    assert len(set(shared.pieces)) == len(shared.pieces)
    for run, numbers in zip(runs, shared.chains, strict=True):
        pieces = [shared.pieces[i] for i in numbers]
        assert "".join(piece.text for piece in pieces) == run.text
        assert [piece.at_start for piece in pieces] == [run.at_start] + [False] * (len(pieces) - 1)
        ends = np.cumsum([len(piece.text) for piece in pieces]).tolist()
        assert set(ends[:-1]) <= set(_safe_cuts(run.text))
        assert all(len(piece.text) >= least for piece in pieces[:-1])
    for a, b in combinations(range(len(runs)), 2):
        common = [i for i, j in zip(shared.chains[a], shared.chains[b], strict=False) if i == j]
        num_shared = sum(len(shared.pieces[i].text) for i in common)
        cut = last_safe_cut(runs[a].text, common_len(runs[a].text, runs[b].text))
        if runs[a].at_start == runs[b].at_start:
            assert num_shared > cut - least
        else:
            assert shared.chains[a][0] != shared.chains[b][0]


def test_no_runs() -> None:
    assert share_prefixes([]).chains == []


def test_every_text_of_a_deep_tree_is_a_short_chain() -> None:
    rng = random.Random(3)
    lines = [" ".join(rng.choices(["alpha", "beta", "gamma"], k=12)) for _ in range(6)]
    texts = [f"{a} one {b} two {c} three" for a in lines for b in lines for c in lines]
    shared = share_prefixes([Run(text, False) for text in texts])
    assert sum(len(piece.text) for piece in shared.pieces) < sum(map(len, texts)) / 2.5
    assert max(map(len, shared.chains)) <= 8


# --- tokenizers --------------------------------------------------------------------------------


def _split(pattern: str) -> dict[str, Any]:
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [part, level]}}


def _llama3_like(**parts: Any) -> dict[str, Any]:
    return specs.byte_level(words=ENGLISH, tokens=[specs.added("<|im_end|>")]) | _split(LLAMA3_SPLIT) | parts


def _sentencepiece(**parts: Any) -> dict[str, Any]:
    words = [MARK * 2, MARK * 4, f"{MARK}the", "the", f"{MARK}t", "he", f"{MARK}a"]
    return specs.sentencepiece(words=words, **parts)


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, SPACES]}
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "llama-3": _llama3_like,
    "composing": lambda: _llama3_like(normalizer={"type": "NFC"}),
    "compatible": lambda: _llama3_like(normalizer={"type": "NFKC"}),
    "prefix space": lambda: specs.byte_level(words=ENGLISH, tokens=[], add_prefix_space=True),
    "added blanks": lambda: specs.byte_level(words=ENGLISH, tokens=[specs.added("    ", special=False)]),
    "sentencepiece": lambda: _sentencepiece(normalizer=SPACES),
    "sentencepiece with prefix": lambda: _sentencepiece(normalizer=PREPEND),
    "metaspace": lambda: _sentencepiece(
        pre_tokenizer={"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": False}
    ),
}


def _encoders(folder: Path) -> tuple[RunEncoder, RunEncoder]:
    """One that always shares and one that never does."""
    files = TokenizerFiles(folder)
    table = byte_table(files.spec, added_tokens=files.added_tokens, min_size=0)
    sharing, whole = (RunEncoder(files.plain_spec, table, min_chars=n, min_runs=n) for n in (0, NEVER))
    return sharing, whole


def _assert_same(encoders: tuple[RunEncoder, RunEncoder], texts: Sequence[str]) -> None:
    sharing, whole = encoders
    runs = [Run(text, at_start) for text in texts for at_start in {False, sharing.adds_prefix}]
    for mine, (expected,) in zip(sharing.encode(runs), whole.encode(runs), strict=True):
        assert np.concatenate(mine).tolist() == expected.tolist()
    assert sharing.sharing.off_reason == ""
    assert sharing.sharing.num_mismatches == 0


@pytest.fixture(scope="module")
def smollm2_encoders(smollm2_dir: Path) -> tuple[RunEncoder, RunEncoder]:
    return _encoders(smollm2_dir)


@given(texts=_families())
@settings(deadline=None, max_examples=100)
def test_smollm2_has_the_ids_of_the_whole(smollm2_encoders: tuple[RunEncoder, RunEncoder], texts: list[str]) -> None:
    _assert_same(smollm2_encoders, texts)


@pytest.fixture(scope="module", params=KINDS)
def encoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunEncoder, RunEncoder]:
    return _encoders(specs.write(tmp_path_factory.mktemp("kind"), KINDS[request.param]()))


@given(texts=_families())
@settings(deadline=None, max_examples=25)
def test_other_kinds_have_the_ids_of_the_whole(encoders: tuple[RunEncoder, RunEncoder], texts: list[str]) -> None:
    _assert_same(encoders, texts)


def test_probes_are_many_and_the_same_every_time() -> None:
    texts = probe_texts(["q w"])
    assert texts == probe_texts(["q w"])
    assert len(texts) > 950
    assert sum(len(_safe_cuts(text)) for text in texts) > 2000
    assert any("q w" in text for text in texts)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a token with a space inside": (specs.sentencepiece(words=[f"at{MARK}he"], normalizer=SPACES), "other tokens"),
    "words that end with their space": (
        specs.byte_level(words=["qqj\u0120"], tokens=[]) | _split(r"\S+\s|\S+|\s"),
        "other tokens",
    ),
    "a normalizer that looks at two characters": (
        _llama3_like(normalizer={"type": "Replace", "pattern": {"String": ". "}, "content": "."}),
        "replaces",
    ),
    "an added token that looks around": (
        specs.byte_level(words=ENGLISH, tokens=[specs.added("  ", special=False, single_word=True)]),
        "added token",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_looks_across_cuts_gets_whole_texts(tmp_path: Path, name: str) -> None:
    spec, reason = REFUSED[name]
    sharing, whole = _encoders(specs.write(tmp_path, spec))
    runs = [Run(text, False) for text in probe_texts(["at he"])]
    for (mine,), (expected,) in zip(sharing.encode(runs), whole.encode(runs), strict=True):
        assert mine.tolist() == expected.tolist()
    assert reason in sharing.sharing.off_reason
    assert sharing.sharing.num_calls == 0


def test_what_the_probes_do_not_find_the_sample_of_a_call_does(tmp_path: Path) -> None:
    spec = specs.byte_level(words=[*ENGLISH, "\u0120w"], tokens=[]) | _split(r"\s?qzq |\s?\S+|\s")
    sharing, whole = _encoders(specs.write(tmp_path, spec))
    good, bad = ([Run(f"the w the {word} w and more {i}", False) for i in range(40)] for word in ("qz", "qzq"))
    for runs, num_mismatches in ((good, 0), (bad, 1), (good, 1)):
        for mine, (expected,) in zip(sharing.encode(runs), whole.encode(runs), strict=True):
            assert np.concatenate(mine).tolist() == expected.tolist()
        assert sharing.sharing.num_mismatches == num_mismatches
    assert sharing.sharing.num_calls == 3
    assert sharing.sharing.off_reason == ""


def test_characters_that_are_replaced_are_counted_once_for_shared_text(smollm2_dir: Path) -> None:
    sharing, whole = _encoders(smollm2_dir)
    runs = [
        Run(f"a text with \x13 in its beginning \x13 and \ud800{i} \U00040000 at its end", False) for i in range(20)
    ]
    for mine, (expected,) in zip(sharing.encode(runs), whole.encode(runs), strict=True):
        assert np.concatenate(mine).tolist() == expected.tolist()
    assert whole.num_replaced_chars == 4 * 20
    assert sharing.num_replaced_chars == 1 + 20 + 1  # words: each distinct one is looked at once


# --- prompts -----------------------------------------------------------------------------------


def _prompts(num: int) -> list[Prompt]:
    chat = frozenset({"<|im_start|>", "<|im_end|>"})
    system = "You answer questions about many things, one after another, and never say more than you are asked. " * 20
    return [
        (
            Text(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nQuestion {i // 4}: ", chat),
            Text("why <|im_end|>?"),
            Text("<|im_end|>\n<|im_start|>assistant\n", chat),
            Ids((i % 4, 7)),
            Text(" and", chat),
            Text(f" choice {i % 4}"),
        )
        for i in range(num)
    ]


def test_prompts_that_share_are_as_prompts_alone(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_dir)
    texts = [
        (Text(f"{'Some context to read first. ' * 300}Question {i // 4}? Answer: {'ABCD'[i % 4]}"),) for i in range(100)
    ]
    prompts = [*_prompts(200), *texts, *texts[:5], ()]
    together = tokenizer.encode_prompts(prompts)
    assert tokenizer.sharing.num_calls == 1
    alone = [tokenizer.encode_prompts([prompt])[0] for prompt in prompts]
    assert tokenizer.sharing.num_calls == 1
    assert all(np.array_equal(a, b) and a.dtype == np.int32 for a, b in zip(together, alone, strict=True))


def test_arrays_of_prompts_are_their_own(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_dir)
    prompts = [(Text("The same beginning of every prompt here. " * 600 + f"Number {i // 2}"),) for i in range(40)]
    ids = tokenizer.encode_prompts(prompts)
    assert tokenizer.sharing.num_calls == 1
    kept = [x.copy() for x in ids]
    ids[0][:] = -1
    assert all(np.array_equal(a, b) for a, b in zip(ids[1:], kept[1:], strict=True))
    assert not any(np.shares_memory(ids[0], x) for x in ids[1:])
