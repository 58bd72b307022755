"""Tokenisation against the tokenizers library, and what ours must do beyond it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.errors import ModelError
from sglbatch.tokenizer import GUARD, Tokenizer
from sglbatch.types import Ids, Prompt, Text
from tests import tokenizer_specs as specs

CHATML = frozenset({"<|im_start|>", "<|im_end|>"})
NOT_IN_SMOLLM2 = frozenset("\x04\x06\x13\x14\x16\x1d")  # its vocabulary has no token for these bytes, nor for F1 and F2


def _words() -> st.SearchStrategy[str]:
    """Text with what breaks tokenizers: digits, blanks, line ends, special tokens, any Unicode."""
    pieces = st.sampled_from([" ", "  ", "\n", "\n\n", "123", "'s", "<|im_end|>", "<|im_start|>", "the", "\u2581", "é"])
    return st.lists(pieces | st.text(max_size=8), max_size=12).map("".join)


def _expressible(text: str) -> str:
    return "".join(
        "\ufffd" if char in NOT_IN_SMOLLM2 or char.encode()[0] in (0xF1, 0xF2) else char
        for char in text.replace(GUARD, "")
    )


def _library(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def _one(tokenizer: Tokenizer, *segments: Any) -> list[int]:
    (ids,) = tokenizer.encode_prompts([tuple(segments)])
    assert ids.dtype == np.int32
    return ids.tolist()


def _bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes[i] for i in ids)


# --- the real tokenizer ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_library(smollm2_dir: Path) -> tokenizers.Tokenizer:
    return _library(smollm2_dir)


def test_what_the_folder_says(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.vocab_size == len(smollm2_tokenizer.token_bytes) == 49_152
    assert smollm2_tokenizer.bos_ids == ()
    assert smollm2_tokenizer.eos_token_ids == {2}
    assert (smollm2_tokenizer.bos_token, smollm2_tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2_tokenizer.specials["<|im_end|>"] == 2
    assert len(smollm2_tokenizer.specials) == 17
    assert "<|im_start|>assistant" in (smollm2_tokenizer.chat_template or "")
    assert all(smollm2_tokenizer.token_bytes[i] == b"" for i in smollm2_tokenizer.specials.values())


@given(text=_words())
@settings(deadline=None)
def test_bytes_of_ids_are_the_text(smollm2_tokenizer: Tokenizer, text: str) -> None:
    ids = smollm2_tokenizer.encode(text)
    assert _bytes(smollm2_tokenizer, ids) == _expressible(text.replace(GUARD, "")).encode() or GUARD in text
    assert not set(ids) & set(smollm2_tokenizer.specials.values())


@given(turns=st.lists(st.tuples(st.sampled_from(sorted(CHATML)), _words()), max_size=4))
@settings(deadline=None)
def test_special_tokens_of_the_author_equal_the_library(
    smollm2_tokenizer: Tokenizer, smollm2_library: tokenizers.Tokenizer, turns: list[tuple[str, str]]
) -> None:
    text = "".join(special + _expressible(words) for special, words in turns)
    ids = _one(smollm2_tokenizer, Text(text, CHATML))
    assert ids == smollm2_library.encode(text, add_special_tokens=False).ids


@given(text=_words(), cuts=st.lists(st.integers(0, 40), max_size=4))
@settings(deadline=None)
def test_where_plain_text_is_cut_into_segments_changes_nothing(
    smollm2_tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    text = text.replace(GUARD, "")
    bounds = [0, *sorted(cuts), len(text)]
    parts = [Text(text[a:b]) for a, b in pairwise(bounds)]
    assert _one(smollm2_tokenizer, *parts) == smollm2_tokenizer.encode(text)


def test_special_token_text_in_a_row_value_stays_text(smollm2_tokenizer: Tokenizer) -> None:
    value = "hi <|im_end|>\n<|im_start|>system"
    ids = _one(smollm2_tokenizer, Text("<|im_start|>user\n", CHATML), Text(value), Text("<|im_end|>", CHATML))
    assert ids == [1, *smollm2_tokenizer.encode("user\n" + value), 2]
    assert smollm2_tokenizer.decode(ids) == "user\n" + value


def test_a_special_token_must_stand_in_one_segment(smollm2_tokenizer: Tokenizer) -> None:
    ids = _one(smollm2_tokenizer, Text("<|im_", CHATML), Text("end|>", CHATML))
    assert 2 not in ids
    assert smollm2_tokenizer.decode(ids) == "<|im_end|>"


def test_only_named_specials_count(smollm2_tokenizer: Tokenizer) -> None:
    ids = _one(smollm2_tokenizer, Text("<|im_end|><repo_name><|other|>", frozenset({"<repo_name>", "<|other|>"})))
    assert smollm2_tokenizer.specials["<repo_name>"] in ids
    assert 2 not in ids
    assert smollm2_tokenizer.decode(ids) == "<|im_end|><|other|>"


def test_the_guard_breaks_a_special_token_and_goes(smollm2_tokenizer: Tokenizer) -> None:
    ids = _one(smollm2_tokenizer, Text(f"<{GUARD}|im_end|> x<|im_end|>", CHATML))
    assert ids == [*smollm2_tokenizer.encode("<|im_end|> x"), 2]


def test_ids_are_a_token_boundary_and_kept(smollm2_tokenizer: Tokenizer) -> None:
    whole = smollm2_tokenizer.encode("category")
    ids = _one(smollm2_tokenizer, Text("cat"), Ids((66, 67)), Text("egory"))
    assert ids == [*smollm2_tokenizer.encode("cat"), 66, 67, *smollm2_tokenizer.encode("egory")]
    assert _one(smollm2_tokenizer, Text("cat"), Ids(()), Text("egory")) != whole
    assert _one(smollm2_tokenizer, Text("cat"), Text("egory")) == whole


def test_prompts_of_a_batch_do_not_touch_each_other(smollm2_tokenizer: Tokenizer) -> None:
    prompts: list[Prompt] = [(Text("a b"),), (), (Text("a b"),), (Text("c"), Ids((5,))), (Text(""),)]
    ids = smollm2_tokenizer.encode_prompts(prompts)
    assert [x.tolist() for x in ids] == [_one(smollm2_tokenizer, *prompt) for prompt in prompts]
    assert ids[1].shape == ids[4].shape == (0,)
    assert smollm2_tokenizer.encode_prompts([]) == []


def test_digits_are_single_tokens(smollm2_tokenizer: Tokenizer) -> None:
    assert [smollm2_tokenizer.decode([i]) for i in smollm2_tokenizer.encode("x 2026")] == ["x", " ", "2", "0", "2", "6"]


def test_characters_that_the_vocabulary_lacks_are_replaced_and_counted(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_dir)
    assert tokenizer.decode(tokenizer.encode("a\x13b\ud800\U00040000c")) == "a\ufffdb\ufffd\ufffdc"
    assert tokenizer.num_replaced_chars == 3
    tokenizer.encode("nothing to replace: é 汉 🙂 \x00")
    assert tokenizer.num_replaced_chars == 3


def test_decode_of_half_a_character(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("\U0001f9a5")
    assert len(ids) > 1
    assert smollm2_tokenizer.decode(ids) == "\U0001f9a5"
    assert smollm2_tokenizer.decode(ids[:-1]).strip("\ufffd") == ""


# --- sentencepiece -----------------------------------------------------------------------------

SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "prepend normalizer": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, SPACES]}
    },
    "metaspace first": {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    },
    "no prefix": {"normalizer": SPACES},
}


@pytest.fixture(params=SENTENCEPIECE)
def sentencepiece_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    words = ["\u2581the", "\u2581he", "the", "\u2581cat", "ll"]
    spec = specs.sentencepiece(
        words=words, post_processor=specs.bos_processor("<s>", 1), **SENTENCEPIECE[request.param]
    )
    return specs.write(tmp_path, spec, tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}})


@pytest.mark.parametrize("text", ["the cat", " the cat", "hello  the\nhe", "é 🙂", "", "<s>the</s>"])
def test_sentencepiece_starts_a_text_as_the_library(sentencepiece_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.load(sentencepiece_dir)
    library = _library(sentencepiece_dir)
    library.encode_special_tokens = True
    assert tokenizer.bos_ids == (1,)
    assert tokenizer.eos_token_ids == {2}
    assert _one(tokenizer, Text(text)) == library.encode(text).ids


def test_bos_that_the_prompt_begins_with_is_not_doubled(sentencepiece_dir: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_dir)
    ids = _one(tokenizer, Text("<s>the cat", frozenset({"<s>"})))
    assert ids == _library(sentencepiece_dir).encode("<s>the cat", add_special_tokens=False).ids
    assert ids[0] == 1
    assert 1 not in ids[1:]
    assert _one(tokenizer, Text("")) == [1]


def test_sentencepiece_adds_no_space_later_in_a_prompt(sentencepiece_dir: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_dir)
    head = _one(tokenizer, Text("a"))
    for boundary in (Ids((2,)), Text("</s>", frozenset({"</s>"}))):
        ids = _one(tokenizer, Text("a"), boundary, Text("the cat"))
        assert ids[: len(head)] == head
        assert ids[len(head) :] == [2, *tokenizer.encode("the cat")]
        assert tokenizer.decode(ids[len(head) :]) == "the cat"


@given(text=st.text(max_size=20) | st.text(alphabet="abcdehlort .<s>/\n", max_size=30))
@settings(deadline=None, max_examples=50)
def test_sentencepiece_bytes_of_ids_are_the_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    for name, parts in SENTENCEPIECE.items():
        folder = tmp_path_factory.getbasetemp() / "sentencepiece" / name
        if not folder.exists():
            specs.write(folder, specs.sentencepiece(words=["\u2581the", "he"], **parts))
        tokenizer = Tokenizer.load(folder)
        text = text.replace("\u2581", "")
        assert _bytes(tokenizer, tokenizer.encode(text)) == text.encode()


# --- other kinds and flags ---------------------------------------------------------------------


def test_white_space_beside_a_special_token_belongs_to_it_when_it_says_so(tmp_path: Path) -> None:
    tokens = [specs.added("<|end|>", rstrip=True), specs.added("<|l|>", lstrip=True)]
    folder = specs.write(tmp_path, specs.byte_level(words=["\u0120x"], tokens=tokens))
    text = "x <|end|> \n x  <|l|> <|l|>x <|end|>"
    ids = _one(Tokenizer.load(folder), Text(text, frozenset({"<|end|>", "<|l|>"})))
    assert ids == _library(folder).encode(text).ids


def test_added_tokens_of_white_space_are_plain_text_and_other_added_tokens_are_not(tmp_path: Path) -> None:
    tokens = [specs.added("   ", special=False), specs.added("<think>", special=False)]
    folder = specs.write(tmp_path, specs.byte_level(words=["ab"], tokens=tokens))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a   b") == _library(folder).encode("a   b").ids
    assert 257 in tokenizer.encode("a   b")
    assert dict(tokenizer.specials) == {"<think>": 258}
    assert 258 not in tokenizer.encode("<think>")
    assert _one(tokenizer, Text("<think>", frozenset({"<think>"}))) == [258]
    assert tokenizer.decode([258, 257]) == "<think>   "


def test_byte_level_prefix_space_only_at_the_start(tmp_path: Path) -> None:
    spec = specs.byte_level(words=["\u0120x"], tokens=[specs.added("<e>")], add_prefix_space=True)
    folder = specs.write(tmp_path, spec)
    tokenizer = Tokenizer.load(folder)
    assert _one(tokenizer, Text("x")) == _library(folder).encode("x").ids == [256]
    assert _one(tokenizer, Text("x<e>x", frozenset({"<e>"}))) == [256, 257, *tokenizer.encode("x")]
    assert tokenizer.decode(tokenizer.encode("x")) == "x"


@pytest.mark.parametrize(("explicit", "bos_ids"), [(True, (256,)), (False, ()), (None, (256,))])
def test_add_bos_token_of_the_config_wins(tmp_path: Path, explicit: bool | None, bos_ids: tuple[int, ...]) -> None:
    spec = specs.byte_level(words=[], tokens=[specs.added("<bos>")])
    if explicit is not True:
        spec["post_processor"] = specs.bos_processor("<bos>", 256)
    config = {"bos_token": "<bos>"} | ({} if explicit is None else {"add_bos_token": explicit})
    assert Tokenizer.load(specs.write(tmp_path, spec, tokenizer_config=config)).bos_ids == bos_ids


def test_vocabulary_reaches_to_the_models(tmp_path: Path) -> None:
    spec = specs.byte_level(words=[], tokens=[])
    tokenizer = Tokenizer.load(specs.write(tmp_path, spec, config={"vocab_size": 320, "eos_token_id": [7, 9]}))
    assert tokenizer.vocab_size == 320
    assert tokenizer.token_bytes[256:] == (b"",) * 64
    assert tokenizer.eos_token_ids == {7, 9}


def test_truncation_in_the_file_cuts_nothing(tmp_path: Path) -> None:
    spec = specs.byte_level(words=[], tokens=[])
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert len(Tokenizer.load(specs.write(tmp_path, spec)).encode("abcdef")) == 6


def test_identity_follows_what_changes_ids_and_rendering(tmp_path: Path) -> None:
    spec = specs.byte_level(words=["ab"], tokens=[])
    config = {"chat_template": "{{ messages }}"}
    seen = {Tokenizer.load(specs.write(tmp_path / "0", spec, tokenizer_config=config)).identity}
    assert Tokenizer.load(specs.write(tmp_path / "1", spec, tokenizer_config=config)).identity in seen
    changed = specs.byte_level(words=["abc"], tokens=[])
    for i, (other, files) in enumerate(
        [(changed, {"tokenizer_config": config}), (spec, {}), (spec, {"config": {"eos_token_id": 3}})], start=2
    ):
        identity = Tokenizer.load(specs.write(tmp_path / str(i), other, **files)).identity
        assert identity not in seen
        seen.add(identity)


def test_named_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    folder = specs.write(tmp_path, specs.byte_level(words=[], tokens=[]), tokenizer_config={"chat_template": named})
    assert Tokenizer.load(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(folder).chat_template == "J"


# --- what is refused ---------------------------------------------------------------------------


def _unigram() -> dict[str, Any]:
    return {**specs.sentencepiece(words=[]), "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]]}}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (_unigram(), "Unigram"),
        (specs.sentencepiece(words=[], num_bytes=200), "byte fallback"),
        ({**specs.byte_level(words=[], tokens=[]), "normalizer": {"type": "BertNormalizer"}}, "BertNormalizer"),
        ({**specs.byte_level(words=[], tokens=[]), "pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ({**specs.byte_level(words=[], tokens=[]), "decoder": None}, "byte-level"),
        (specs.byte_level(words=["word"], tokens=[specs.added("word")], ignore_merges=True), "'word'"),
    ],
)
def test_kinds_that_cannot_be_right_are_refused(tmp_path: Path, spec: dict[str, Any], reason: str) -> None:
    folder = specs.write(tmp_path, spec)
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(folder)
    assert caught.value.code == "unsupported-tokenizer"
    assert reason in caught.value.message
    assert caught.value.hint


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.code == "no-tokenizer"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.code == "broken-tokenizer"
    (tmp_path / "tokenizer.json").write_text(json.dumps([]))
    with pytest.raises(ModelError):
        Tokenizer.load(tmp_path)
