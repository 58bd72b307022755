"""OpenAI's own tokenizers, from the package bpe-openai: the same ids as tiktoken's, without its downloads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from sglbatch.types import TokenIds

PACKAGE: Final = "bpe-openai"

PIECE_CHARS: Final = 40_000
"""The package refuses long texts. Longer ones are cut before a space that follows no white space, which changes no
token; a stretch without such a place is cut where it is full."""

_ROLES: Final = {"system": 0, "user": 1, "assistant": 2}


class Encoding:
    """One of OpenAI's tokenizers.

    Messages are counted as OpenAI documents it for its chat models: three tokens and the role's around each content,
    three more where the answer begins (its cookbook, "How to count tokens with tiktoken").
    """

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self._first_mark: int = encoding.n_vocab

    def ids(self, text: str) -> list[int]:
        """Plain text: what looks like a special token is none."""
        text = text.encode("utf-8", "replace").decode()
        return [token_id for piece in _pieces(text) for token_id in self._encoding.encode_ordinary(piece)]

    def chat_ids(self, messages: Sequence[tuple[str, str]]) -> TokenIds:
        """Messages up to where the answer begins. Ids beyond the vocabulary stand for the marks around them."""
        start, separator, end, role_mark = range(self._first_mark, self._first_mark + 4)
        found: list[int] = []
        for role, content in messages:
            found += [start, role_mark + _ROLES.get(role, len(_ROLES)), separator, *self.ids(content), end]
        found += [start, role_mark + _ROLES["assistant"], separator]
        return np.array(found, dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without the marks; an incomplete character gives U+FFFD."""
        data = b"".join(self._encoding.decode_single_token_bytes(i) for i in ids if i < self._first_mark)
        return data.decode("utf-8", "replace")


@lru_cache(maxsize=2)
def load_encoding(name: str) -> Encoding | None:
    """``o200k`` or ``cl100k``; None where the package is not installed. Takes about a second."""
    try:
        import bpe_openai
    except ModuleNotFoundError:
        return None
    return Encoding(bpe_openai.get_encoding(f"{name}_base"))


def _pieces(text: str) -> Iterator[str]:
    while len(text) > PIECE_CHARS:
        places = [match.end() for match in re.finditer(r"\S(?= )", text[: PIECE_CHARS + 1])]
        cut = places[-1] if places else PIECE_CHARS
        yield text[:cut]
        text = text[cut:]
    if text:
        yield text
