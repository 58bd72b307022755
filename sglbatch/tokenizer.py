"""Tokenisation from ``tokenizer.json``: prompts to token ids, token ids to bytes. No torch, no transformers.

What differs from calling the ``tokenizers`` library directly:

- A special token is one only where a prompt's segment says so. Plain text goes through an encoder that does not know
  the added tokens at all, so ``<|im_end|>`` in a row's value becomes ordinary tokens of the same characters.
- Byte-level BPE, and sentencepiece BPE with byte fallback, are the kinds for which every id's bytes are known. Others
  are refused when the tokenizer is loaded, before any work is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import tokenizers

from sglbatch.token_bytes import byte_table, without_prefix_space
from sglbatch.tokenizer_files import TokenizerFiles
from sglbatch.types import Ids, Prompt, Text, TokenIds

GUARD: Final = "\ue0f0"
"""Put inside a special token's text to break it up; tokenisation takes it out again."""

REPLACEMENT: Final = "\ufffd"

_BATCH_CHARS: Final = 4_000_000  # of one call into the library: its encodings take some 100 bytes a token

_Atom: TypeAlias = str | int | tuple[int, ...]
"""Plain text, the id of a special token its author wrote, or fixed ids."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Plain text that tokenises as one; ``at_start`` when nothing stands before it."""

    text: str
    at_start: bool


class Tokenizer:
    """A model's tokenizer. Make one with ``Tokenizer.load``.

    Attributes:
        identity: short hash of everything that changes ids or the chat rendering.
        vocab_size: number of ids, at least the model's ``vocab_size``; the length of ``token_bytes``.
        specials: text of every added token that means something by itself, with its id.
        eos_token_ids: the ids that end a generation.
        bos_ids: what stands before every prompt; () for models that want nothing there.
        bos_token, eos_token: their text, "" when the model has none.
        chat_template: jinja source, None when the model has none.
        token_bytes: for each id the bytes it stands for in running text; b"" for special tokens and unused ids.
        num_replaced_chars: characters, so far, that the vocabulary cannot express and U+FFFD stands for.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        table = byte_table(files.spec, added_tokens=files.added_tokens, min_size=files.model_vocab_size)
        self.specials: Mapping[str, int] = {text: special.id for text, special in files.specials.items()}
        self.bos_token = files.bos_token
        self.eos_token = files.eos_token
        self.bos_ids = files.bos_ids
        self.eos_token_ids = files.eos_token_ids
        self.chat_template = files.chat_template
        self.token_bytes: Sequence[bytes] = table.token_bytes
        self.vocab_size = len(table.token_bytes)
        self.num_replaced_chars = 0
        self.identity = files.identity
        self._table = table
        self._special_rules = {special.id: special for special in files.specials.values()}
        self._patterns: dict[frozenset[str], re.Pattern[str] | None] = {}
        plain = files.plain_spec
        bare = without_prefix_space(plain)
        self._middle_encoder = tokenizers.Tokenizer.from_str(json.dumps(bare))
        self._adds_prefix = bare != plain
        self._start_encoder = (
            tokenizers.Tokenizer.from_str(json.dumps(plain)) if self._adds_prefix else self._middle_encoder
        )
        self._prefix_after_bos = self._adds_prefix and table.prefix_from_normalizer
        files.check_plain_encoder(self._middle_encoder)

    @staticmethod
    def load(model_dir: Path) -> Tokenizer:
        """Reads a Hugging Face folder.

        Raises:
            ModelError: ``no-tokenizer``, ``broken-tokenizer`` or ``unsupported-tokenizer``.
        """
        return Tokenizer(TokenizerFiles(model_dir))

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[TokenIds]:
        """Tokenises prompts in one batch; equal plain runs are tokenised once.

        Adjacent plain text is one text whatever segments it comes from; special tokens and ``Ids`` are boundaries. The
        guard character is taken out. ``bos_ids`` come first, unless the prompt begins with them.

        Returns:
            int32 [prompt_len] for each prompt; of length 0 only when prompt and ``bos_ids`` are empty.
        """
        pieces_of = [self._pieces(prompt) for prompt in prompts]
        runs = dict.fromkeys(piece for pieces in pieces_of for piece in pieces if isinstance(piece, _Run))
        ids_of = dict(zip(runs, self._encode_runs(list(runs)), strict=True))
        return [self._joined(pieces, ids_of) for pieces in pieces_of]

    def _joined(self, pieces: Sequence[_Run | tuple[int, ...]], ids_of: Mapping[_Run, TokenIds]) -> TokenIds:
        bos_ids = np.array(self.bos_ids, dtype=np.int32)
        parts = [ids_of[piece] if isinstance(piece, _Run) else np.array(piece, dtype=np.int32) for piece in pieces]
        ids = np.concatenate([bos_ids, *parts])
        num_bos = len(bos_ids)
        return ids[num_bos:] if np.array_equal(ids[num_bos : 2 * num_bos], bos_ids) else ids

    def encode(self, text: str) -> list[int]:
        """Plain text as it stands in the middle of a prompt: no special tokens, no bos, no prefix space."""
        ids: list[int] = self._encode_runs([_Run(text, at_start=False)])[0].tolist()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens give nothing, an incomplete character gives U+FFFD."""
        return b"".join(self.token_bytes[i] for i in ids).decode("utf-8", "replace")

    def _pieces(self, prompt: Prompt) -> list[_Run | tuple[int, ...]]:
        pieces: list[_Run | tuple[int, ...]] = []
        before: int | None = None  # the special token just passed, when the last atom was one
        strip_left = False
        for is_text, group in groupby(self._atoms(prompt), key=lambda atom: isinstance(atom, str)):
            if not is_text:
                for atom in group:
                    assert not isinstance(atom, str)
                    before = atom if isinstance(atom, int) else None
                    if before is not None and self._special_rules[before].lstrip:
                        _strip_last_run(pieces)
                    pieces.append(atom if isinstance(atom, tuple) else (atom,))
                strip_left = before is not None and self._special_rules[before].rstrip
                continue
            text = "".join(str(atom) for atom in group).replace(GUARD, "")
            text = text.lstrip() if strip_left else text
            if text:
                pieces.append(_Run(text, at_start=self._is_start(pieces, before)))
        return pieces

    def _is_start(self, pieces: Sequence[object], before: int | None) -> bool:
        """Whether the tokenizer's prefix space goes here: only ever where a document starts."""
        if not self._adds_prefix:
            return False
        return not pieces or (self._prefix_after_bos and before is not None and (before,) == self.bos_ids)

    def _atoms(self, prompt: Prompt) -> Iterator[_Atom]:
        for segment in prompt:
            if isinstance(segment, Ids):
                yield segment.ids
                continue
            pattern = self._pattern(segment)
            if pattern is None:
                yield segment.text
                continue
            for i, part in enumerate(pattern.split(segment.text)):
                yield part if i % 2 == 0 else self.specials[part]

    def _pattern(self, segment: Text) -> re.Pattern[str] | None:
        """Matches the longest special token of the segment at a place; texts that are none here are plain."""
        if segment.specials not in self._patterns:
            known = sorted((text for text in segment.specials if text in self.specials), key=len, reverse=True)
            self._patterns[segment.specials] = re.compile(f"({'|'.join(map(re.escape, known))})") if known else None
        return self._patterns[segment.specials]

    def _encode_runs(self, runs: Sequence[_Run]) -> list[TokenIds]:
        result = [np.empty(0, dtype=np.int32)] * len(runs)
        for at_start in (False, True):
            encoder = self._start_encoder if at_start else self._middle_encoder
            mine = [i for i, run in enumerate(runs) if run.at_start == at_start]
            for batch in _batches(mine, [len(runs[i].text) for i in mine]):
                texts = [self._expressible(runs[i].text) for i in batch]
                encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
                for i, encoding in zip(batch, encodings, strict=True):
                    result[i] = np.array(encoding.ids, dtype=np.int32)
        return result

    def _expressible(self, text: str) -> str:
        """The text with U+FFFD for characters the vocabulary has no bytes for: the library would just drop them."""
        try:
            if not self._table.missing_bytes:
                text.encode()
                return text
            data = text.encode()
            if len(data) == len(data.translate(None, self._table.missing_bytes)):
                return text
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
            pass
        good = [char if self._has_char(char) else REPLACEMENT for char in text]
        self.num_replaced_chars += sum(a != b for a, b in zip(text, good, strict=True))
        return "".join(good)

    def _has_char(self, char: str) -> bool:
        if "\ud800" <= char <= "\udfff":
            return False
        return not any(byte in self._table.missing_bytes for byte in char.encode())


def _strip_last_run(pieces: list[_Run | tuple[int, ...]]) -> None:
    if pieces and isinstance(last := pieces[-1], _Run):
        pieces.pop()
        if text := last.text.rstrip():
            pieces.append(_Run(text, at_start=last.at_start))


def _batches(items: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Cuts items into batches of at most _BATCH_CHARS, except that an item is never cut."""
    batch: list[int] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and total + size > _BATCH_CHARS:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
