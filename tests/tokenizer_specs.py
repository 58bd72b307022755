"""Small tokenizers of every kind, as parsed ``tokenizer.json``, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MARK = "\u2581"


def added(content: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    """An added token; the id is its word's, else the next free one."""
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"content": content, **token, **flags}


def byte_level(
    *, words: list[str], tokens: list[dict[str, Any]], add_prefix_space: bool = False, ignore_merges: bool = False
) -> dict[str, Any]:
    """All 256 bytes, then ``words`` (byte-level spelling, each with the merges that build it from the left)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]
    part = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}
    return _spec(alphabet, words, tokens, pre_tokenizer=part, decoder=part, model={"ignore_merges": ignore_merges})


def sentencepiece(
    *,
    words: list[str],
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any] | None = None,
    post_processor: dict[str, Any] | None = None,
    num_bytes: int = 256,
) -> dict[str, Any]:
    """<unk>, <s>, </s>, the bytes, then characters and ``words``."""
    alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(num_bytes)), _MARK, *"abcdehlort.<s>/"]
    decoders = [
        {"type": "Replace", "pattern": {"String": _MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return _spec(
        list(dict.fromkeys(alphabet)),
        words,
        [added("<unk>"), added("<s>"), added("</s>")],
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        post_processor=post_processor,
        decoder={"type": "Sequence", "decoders": decoders},
        model={"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True},
    )


def bos_processor(bos: str, bos_id: int) -> dict[str, Any]:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, sequence],
        "pair": [special, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def write(folder: Path, spec: dict[str, Any], **files: Any) -> Path:
    """Writes tokenizer.json, and NAME.json for every other argument."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {"tokenizer": spec, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def _spec(
    alphabet: list[str], words: list[str], tokens: list[dict[str, Any]], *, model: dict[str, Any], **parts: Any
) -> dict[str, Any]:
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges: list[list[str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            pair = [word[: end - 1], word[end - 1]]
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append(pair)
    new = iter(range(len(vocab), len(vocab) + len(tokens)))
    tokens = [{"id": vocab[text] if (text := token["content"]) in vocab else next(new), **token} for token in tokens]
    base = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    base |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    spec: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens}
    spec |= {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None, **parts}
    return spec | {"model": base | model | {"vocab": vocab, "merges": merges}}
