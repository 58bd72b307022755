"""What bytes a token id stands for: inverts byte-level BPE's character map, and sentencepiece's spelling.

Works on the parsed ``tokenizer.json``; knows nothing of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from sglbatch.errors import ModelError

Kind: TypeAlias = Literal["byte-level", "sentencepiece"]

_SPACE_MARK: Final = "\u2581"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NORMALIZERS: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Sequence"})
_PRE_TOKENIZERS: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split"})


@dataclass(frozen=True, kw_only=True)
class ByteTable:
    """The bytes of every id.

    Attributes:
        token_bytes: per id; b"" for special tokens and unused ids.
        missing_bytes: the byte values no token can spell; text with them would be lost.
        prefix_from_normalizer: the prefix space comes after every special token, not only at the start of a text.
    """

    token_bytes: tuple[bytes, ...]
    missing_bytes: bytes
    prefix_from_normalizer: bool


def byte_table(spec: Mapping[str, Any], *, added_tokens: Sequence[Mapping[str, Any]], min_size: int) -> ByteTable:
    """Builds the table of a parsed ``tokenizer.json``; at least ``min_size`` ids.

    Raises:
        ModelError: ``unsupported-tokenizer`` for a kind whose text cannot be given back byte for byte.
    """
    kind = _kind(spec)
    vocab: Mapping[str, int] = spec["model"]["vocab"]
    size = max(min_size, 1 + max([*vocab.values(), *(token["id"] for token in added_tokens)], default=-1))
    table = [b""] * size
    spell = _byte_level_bytes if kind == "byte-level" else _sentencepiece_bytes
    for token, token_id in vocab.items():
        table[token_id] = spell(token)
    singles = {data[0] for data in table if len(data) == 1}
    for added in added_tokens:
        content = added["content"]
        plain = content if kind == "byte-level" else content.replace(_SPACE_MARK, " ")
        table[added["id"]] = b"" if added.get("special", False) else plain.encode()
    missing = bytes(sorted(set(range(256)) - singles))
    if kind == "sentencepiece" and not set(range(256)) <= _fallback_bytes(vocab):
        raise _unsupported("its vocabulary has no byte fallback for every byte")
    return ByteTable(
        token_bytes=tuple(table),
        missing_bytes=missing if kind == "byte-level" else b"",
        prefix_from_normalizer=any(part["type"] == "Prepend" for part in component_parts(spec.get("normalizer"))),
    )


def without_prefix_space(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer as it works in the middle of a text: nothing that puts a space before it."""
    return {
        **spec,
        "normalizer": _without_prefix(spec.get("normalizer")),
        "pre_tokenizer": _without_prefix(spec.get("pre_tokenizer")),
    }


def _without_prefix(part: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if part is None or part["type"] == "Prepend":
        return None
    changed = dict(part)
    if part["type"] == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        changed[key] = [kept for inner in part[key] if (kept := _without_prefix(inner)) is not None]
    elif part["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
        changed.pop("add_prefix_space", None)  # the older spelling of the scheme
    elif part["type"] == "ByteLevel":
        changed["add_prefix_space"] = False
    return changed


def _kind(spec: Mapping[str, Any]) -> Kind:
    model = spec["model"]
    model_type = model.get("type", "BPE" if "merges" in model else "unknown")
    if model_type != "BPE":
        raise _unsupported(f"its model is {model_type}, not BPE")
    for part in component_parts(spec.get("normalizer")):
        if part["type"] not in _NORMALIZERS:
            raise _unsupported(f"its normalizer {part['type']} changes the text")
    for part in component_parts(spec.get("pre_tokenizer")):
        if part["type"] not in _PRE_TOKENIZERS or part.get("behavior") == "Removed":
            raise _unsupported(f"its pre-tokenizer {part['type']} loses text")
    decoders = {part["type"] for part in component_parts(spec.get("decoder"))}
    if "ByteLevel" in decoders:
        return "byte-level"
    if model.get("byte_fallback") and decoders & {"ByteFallback", "Metaspace"}:
        return "sentencepiece"
    raise _unsupported("it is neither byte-level nor has it byte fallback")


def component_parts(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A component and, for a Sequence, everything in it."""
    if component is None:
        return
    yield component
    for key in ("normalizers", "pretokenizers", "decoders"):
        for inner in component.get(key, ()):
            yield from component_parts(inner)


def _char_to_byte() -> dict[str, int]:
    """GPT-2's map: printable Latin-1 stands for itself, the other 68 bytes for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_CHAR_TO_BYTE: Final = _char_to_byte()


def _byte_level_bytes(token: str) -> bytes:
    """A token with a character outside the map stands for its own text, as in the library's decoder."""
    if all(char in _CHAR_TO_BYTE for char in token):
        return bytes(_CHAR_TO_BYTE[char] for char in token)
    return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def _fallback_bytes(vocab: Mapping[str, int]) -> set[int]:
    return {int(match[1], 16) for token in vocab if (match := _BYTE_TOKEN.fullmatch(token))}


def _unsupported(reason: str) -> ModelError:
    return ModelError(
        "unsupported-tokenizer",
        f"this tokenizer cannot be used: {reason}",
        hint="choose a model with a byte-level BPE tokenizer, or a BPE one with byte fallback",
    )
