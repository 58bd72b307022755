"""Counting and cutting text in a model's tokens, exactly where its tokenizer is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, Protocol

import numpy as np

from sglbatch.api_spec.encodings import PACKAGE, Encoding, load_encoding
from sglbatch.api_spec.families import Family
from sglbatch.lang.chat import ChatTemplate
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Prompt, Text, TokenIds

BYTES_PER_TOKEN: Final = 4
"""A guess that is a little high for English prose."""

MESSAGE_BYTES: Final = 4 * BYTES_PER_TOKEN

Messages = Sequence[tuple[str, str]]


class Counter(Protocol):
    """Ids of prompts, to order and count them by."""

    @property
    def exact(self) -> bool:
        """The counts of text are the model's own."""

    @property
    def guess(self) -> str | None:
        """Why the counts of whole prompts may be off, in words; None where they are exact too."""

    def text_ids(self, text: str) -> TokenIds:
        """A plain prompt's."""

    def chat_ids(self, messages: Messages) -> TokenIds:
        """Those of messages as the model gets them, up to where its answer begins."""

    def num_tokens(self, ids: TokenIds) -> int: ...

    def count(self, text: str) -> int:
        """Tokens of a piece of text by itself."""

    def first(self, text: str, max_tokens: int) -> str | None:
        """The beginning of a generated text that has at most so many tokens; None where that cannot be told."""

    def show(self, ids: TokenIds) -> str: ...

    def token_id(self, piece: bytes, named: int | None) -> int | None:
        """The id of a token of a generated text; None where it cannot be told.

        Args:
            named: the id that the endpoint gives it; believed where this tokenizer has the same text there, or the
                endpoint shows none.
        """

    def token_text(self, token_id: int) -> str: ...


class ByteCounter:
    """Where the tokenizer is not known: ids are bytes, and four of them are taken for a token."""

    exact: Final = False

    def __init__(self, guess: str = "the tokenizer is not known, --tokenizer names it") -> None:
        self.guess = guess

    def text_ids(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int32)

    def chat_ids(self, messages: Messages) -> TokenIds:
        return self.text_ids(
            "".join(f"\x01{role:<{MESSAGE_BYTES - 2}.{MESSAGE_BYTES - 2}}\x02{text}" for role, text in messages)
            + "\x01assistant\x02"
        )

    def num_tokens(self, ids: TokenIds) -> int:
        return -(-len(ids) // BYTES_PER_TOKEN)

    def count(self, text: str) -> int:
        return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)

    def first(self, text: str, max_tokens: int) -> str | None:
        """A token has at least one byte, so a text of no more bytes than tokens fits; of others nothing is known."""
        return text if len(text.encode("utf-8", "surrogatepass")) <= max_tokens else None

    def show(self, ids: TokenIds) -> str:
        return bytes(ids.astype(np.uint8).tolist()).decode("utf-8", "replace")

    def token_id(self, piece: bytes, named: int | None) -> int | None:
        """Nothing is known of an id that the endpoint names."""
        return None

    def token_text(self, token_id: int) -> str:
        return self.show(np.array([token_id], dtype=np.int32))


class TokenizerCounter:
    """The model's own tokenizer and chat template."""

    exact: Final = True
    guess: Final = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        self._specials = frozenset(tokenizer.specials)
        self._special_texts = {token_id: text.encode() for text, token_id in tokenizer.specials.items()}

    def text_ids(self, text: str) -> TokenIds:
        return self._tokenizer.encode_prompts([(Text(text),)])[0]

    def chat_ids(self, messages: Messages) -> TokenIds:
        prompt: list[Text] = []
        roles: tuple[str, ...] = ()
        for role, content in messages:
            roles = (*roles, role)
            frame = self._chat.frame(roles)
            prompt += [Text(frame.prefix, self._specials), Text(content), Text(frame.suffix, self._specials)]
        prompt.append(Text(self._chat.frame((*roles, "assistant")).prefix, self._specials))
        whole: Prompt = tuple(prompt)
        return self._tokenizer.encode_prompts([whole])[0]

    def num_tokens(self, ids: TokenIds) -> int:
        return len(ids)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def first(self, text: str, max_tokens: int) -> str | None:
        ids = self._tokenizer.encode(text)
        if len(ids) <= max_tokens:
            return text
        return self._tokenizer.decode(ids[:max_tokens]).rstrip("\ufffd")

    def show(self, ids: TokenIds) -> str:
        pieces = (self._special_texts.get(i) or self._tokenizer.token_bytes[i] for i in ids.tolist())
        return b"".join(pieces).decode("utf-8", "replace")

    def token_id(self, piece: bytes, named: int | None) -> int | None:
        if named is not None and named < self._tokenizer.vocab_size:
            own = {self._tokenizer.token_bytes[named], self._special_texts.get(named, b"")}
            if not piece or piece in own:
                return named
        return self._ids_by_bytes.get(piece)

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, int]:
        """Of the tokens that are text; of equal ones the first."""
        tokens = list(enumerate(self._tokenizer.token_bytes))
        specials = {text: token_id for token_id, text in self._special_texts.items()}
        return specials | {data: token_id for token_id, data in reversed(tokens) if data}

    def token_text(self, token_id: int) -> str:
        return self.show(np.array([token_id], dtype=np.int32))


class EncodingCounter:
    """One of OpenAI's own tokenizers. ``guess``: what goes around messages is not published for every model."""

    exact: Final = True

    def __init__(self, encoding: Encoding, *, guess: str | None) -> None:
        self._encoding = encoding
        self.guess = guess

    def text_ids(self, text: str) -> TokenIds:
        return np.array(self._encoding.ids(text), dtype=np.int32)

    def chat_ids(self, messages: Messages) -> TokenIds:
        return self._encoding.chat_ids(messages)

    def num_tokens(self, ids: TokenIds) -> int:
        return len(ids)

    def count(self, text: str) -> int:
        return len(self._encoding.ids(text))

    def first(self, text: str, max_tokens: int) -> str | None:
        ids = self._encoding.ids(text)
        return text if len(ids) <= max_tokens else self._encoding.decode(ids[:max_tokens]).rstrip("\ufffd")

    def show(self, ids: TokenIds) -> str:
        return self._encoding.decode(ids.tolist())

    def token_id(self, piece: bytes, named: int | None) -> int | None:
        """Of a token that is whole characters: only those can be looked up."""
        try:
            ids = self._encoding.ids(piece.decode())
        except UnicodeDecodeError:
            return None
        return ids[0] if len(ids) == 1 else None

    def token_text(self, token_id: int) -> str:
        return self._encoding.decode([token_id])


def counter_for(tokenizer: Tokenizer | None, family: Family | None = None) -> Counter:
    """The counter of a model: by the tokenizer that the user names, else by its family's own, else by bytes."""
    if tokenizer is not None:
        return TokenizerCounter(tokenizer)
    if family is None or family.encoding is None:
        return ByteCounter()
    encoding = load_encoding(family.encoding)
    if encoding is None:
        return ByteCounter(f"{PACKAGE} has its tokenizer: pip install 'sglbatch[openai]'")
    guess = None if family.known_framing else "OpenAI does not say what goes around this model's messages"
    return EncodingCounter(encoding, guess=guess)
