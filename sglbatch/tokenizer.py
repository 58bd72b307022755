"""Tokenisation from ``tokenizer.json``: prompts to token ids, token ids to bytes. No torch, no transformers.

What differs from calling the ``tokenizers`` library directly:

- A special token is one only where a prompt's segment says so. Plain text goes through an encoder that does not know
  the added tokens at all, so ``<|im_end|>`` in a row's value becomes ordinary tokens of the same characters.
- Byte-level BPE, and sentencepiece BPE with byte fallback, are the kinds for which every id's bytes are known. Others
  are refused when the tokenizer is loaded, before any work is done.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from sglbatch.run_encoder import RunEncoder, Sharing
from sglbatch.shared_text import Run, common_len
from sglbatch.token_bytes import byte_table
from sglbatch.tokenizer_files import TokenizerFiles
from sglbatch.types import Ids, Prompt, TokenIds

GUARD: Final = "\ue0f0"
"""Put inside a special token's text to break it up; tokenisation takes it out again."""

_Atom: TypeAlias = str | int | tuple[int, ...]
"""Plain text, the id of a special token its author wrote, or fixed ids."""


_Piece: TypeAlias = Run | tuple[int, ...]
"""Plain text, or fixed ids."""


class _KnownSpecials(NamedTuple):
    """``beginning``: what all of them begin with, which is quickly looked for; ``pattern``: the longest at a place."""

    beginning: str
    pattern: re.Pattern[str]


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
        self.identity = files.identity
        self._special_rules = {special.id: special for special in files.specials.values()}
        self._known: dict[frozenset[str], _KnownSpecials | None] = {}
        self._bos = np.array(self.bos_ids, dtype=np.int32)
        self._encoder = RunEncoder(files.plain_spec, table)
        self._prefix_after_bos = self._encoder.adds_prefix and table.prefix_from_normalizer
        files.check_plain_encoder(self._encoder.middle)

    @property
    def num_replaced_chars(self) -> int:
        """Characters, so far, that the vocabulary cannot express and U+FFFD stands for; of shared text counted once."""
        return self._encoder.num_replaced_chars

    @property
    def sharing(self) -> Sharing:
        """Whether text that prompts share is tokenised once, and how that went."""
        return self._encoder.sharing

    @staticmethod
    def load(model_dir: Path) -> Tokenizer:
        """Reads a Hugging Face folder.

        Raises:
            ModelError: ``no-tokenizer``, ``broken-tokenizer`` or ``unsupported-tokenizer``.
        """
        return Tokenizer(TokenizerFiles(model_dir))

    def warm_up(self) -> None:
        """Finds out whether shared text may be tokenised once, for which the first large batch would stop."""
        self._encoder.may_share()

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[TokenIds]:
        """Tokenises prompts in one batch: text that they share once, all of it in parallel.

        Adjacent plain text is one text whatever segments it comes from; special tokens and ``Ids`` are boundaries. The
        guard character is taken out. ``bos_ids`` come first, unless the prompt begins with them.

        Returns:
            int32 [prompt_len] for each prompt, an array of its own; of length 0 only when prompt and ``bos_ids`` are
            empty.
        """
        index: defaultdict[_Piece, int] = defaultdict(count().__next__)
        pieces_of = [[index[piece] for piece in self._pieces(prompt)] for prompt in prompts]
        pieces = list(index)
        arrays: list[tuple[TokenIds, ...]] = [
            () if isinstance(piece, Run) else (np.array(piece, dtype=np.int32),) for piece in pieces
        ]
        run_at = [i for i, piece in enumerate(pieces) if isinstance(piece, Run)]
        encoded = self._encoder.encode([piece for piece in pieces if isinstance(piece, Run)])
        for i, parts in zip(run_at, encoded, strict=True):
            arrays[i] = parts
        return [self._joined([part for i in mine for part in arrays[i]]) for mine in pieces_of]

    def _joined(self, parts: Sequence[TokenIds]) -> TokenIds:
        num_bos = len(self._bos)
        if parts and not num_bos:
            return np.concatenate(parts)
        ids = np.concatenate([self._bos, *parts])
        return ids[num_bos:] if num_bos and np.array_equal(ids[num_bos : 2 * num_bos], self._bos) else ids

    def encode(self, text: str) -> list[int]:
        """Plain text as it stands in the middle of a prompt: no special tokens, no bos, no prefix space."""
        if not text:
            return []
        ((ids,),) = self._encoder.encode([Run(text, False)])
        found: list[int] = ids.tolist()
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens give nothing, an incomplete character gives U+FFFD."""
        return b"".join(self.token_bytes[i] for i in ids).decode("utf-8", "replace")

    def _pieces(self, prompt: Prompt) -> list[_Piece]:
        atoms = self._atoms(prompt)
        pieces: list[_Piece] = []
        before: int | None = None  # the special token just passed, when the last atom was one
        strip_left = False
        for is_text, group in groupby(atoms, key=_is_text):
            if not is_text:
                for atom in group:
                    assert not isinstance(atom, str)
                    before = atom if isinstance(atom, int) else None
                    if before is not None and self._special_rules[before].lstrip:
                        _strip_last_run(pieces)
                    pieces.append(atom if isinstance(atom, tuple) else (atom,))
                strip_left = before is not None and self._special_rules[before].rstrip
                continue
            text = "".join(map(str, group)).replace(GUARD, "")
            text = text.lstrip() if strip_left else text
            if text:
                pieces.append(Run(text, self._is_start(pieces, before)))
        return pieces

    def _is_start(self, pieces: Sequence[object], before: int | None) -> bool:
        """Whether the tokenizer's prefix space goes here: only ever where a document starts."""
        if not self._encoder.adds_prefix:
            return False
        return not pieces or (self._prefix_after_bos and before is not None and (before,) == self.bos_ids)

    def _atoms(self, prompt: Prompt) -> list[_Atom]:
        atoms: list[_Atom] = []
        for segment in prompt:
            if isinstance(segment, Ids):
                atoms.append(segment.ids)
                continue
            known = self._known_specials(segment.specials) if segment.specials else None
            if known is None or known.beginning not in segment.text:
                atoms.append(segment.text)
                continue
            parts = known.pattern.split(segment.text)
            atoms += (part if i % 2 == 0 else self.specials[part] for i, part in enumerate(parts))
        return atoms

    def _known_specials(self, specials: frozenset[str]) -> _KnownSpecials | None:
        """Those of a segment's special tokens that the tokenizer has; None if there are none."""
        if specials not in self._known:
            known = sorted((text for text in specials if text in self.specials), key=len, reverse=True)
            pattern = re.compile(f"({'|'.join(map(re.escape, known))})")
            beginning = known[0][: common_len(min(known), max(known))] if known else ""
            self._known[specials] = _KnownSpecials(beginning, pattern) if known else None
        return self._known[specials]


def _is_text(atom: _Atom) -> bool:
    return isinstance(atom, str)


def _strip_last_run(pieces: list[_Piece]) -> None:
    if pieces and isinstance(last := pieces[-1], Run):
        pieces.pop()
        if text := last.text.rstrip():
            pieces.append(Run(text, last.at_start))
