"""Plain text to token ids: text that many runs share is tokenised once, the rest in parallel."""

from __future__ import annotations

import json
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers

from sglbatch.shared_text import Run, is_blank, probe_texts, share_prefixes, split_words
from sglbatch.token_bytes import ByteTable, component_parts, without_prefix_space
from sglbatch.types import TokenIds

REPLACEMENT: Final = "\ufffd"

MIN_RUNS: Final = 16
MIN_CHARS: Final = 400_000
"""Of a call in which it is worth looking for shared text: the check before the first one takes as long as so many."""

LATER_SHARE: Final = 0.1
"""Of so many characters, from which on it is worth it once the check is done."""

_BATCH_CHARS: Final = 4_000_000  # of one call into the library: its encodings take some 100 bytes a token
_SAMPLE_RUNS: Final = 16
_CHARS_TOGETHER: Final = 2000
_GATHER_WORDS: Final = 1 << 18
_LATER_SPACE: Final = re.compile(rb"\S ")
_UNICODE_FORMS: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD"})


@dataclass(kw_only=True, slots=True)
class Sharing:
    """What has become of sharing text, for one tokenizer.

    Attributes:
        off_reason: why its texts are tokenised whole; "" while nothing speaks against sharing.
        checked: the tokenizer has been held to whole texts.
        num_calls: that shared text.
        num_mismatches: of these, calls whose sample differed; they were tokenised whole then.
    """

    off_reason: str = ""
    checked: bool = False
    num_calls: int = 0
    num_mismatches: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _WordIds:
    """Ids of words, in one array: word i has ``ids[begin[i] : begin[i] + length[i]]``."""

    ids: TokenIds
    begin: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


class RunEncoder:
    """Tokenises runs with a tokenizer that knows no special tokens.

    Args:
        spec: the parsed ``tokenizer.json`` without special tokens and post-processor.
        table: what its ids stand for.
        min_runs, min_chars: of a call, from which on shared text is looked for; later calls need less text.

    Attributes:
        middle: the library's tokenizer for text that does not begin a document.
        adds_prefix: whether text that begins one is tokenised in another way.
        sharing: whether and how often shared text was tokenised once.
        num_replaced_chars: characters, so far, that U+FFFD stands for; of text that is shared, counted once a call.
    """

    def __init__(
        self, spec: Mapping[str, Any], table: ByteTable, *, min_runs: int = MIN_RUNS, min_chars: int = MIN_CHARS
    ) -> None:
        bare = without_prefix_space(spec)
        self.middle = tokenizers.Tokenizer.from_str(json.dumps(bare))
        self.adds_prefix = bare != spec
        self.sharing = Sharing(off_reason=_why_not_shared(bare))
        self.num_replaced_chars = 0
        self._start = tokenizers.Tokenizer.from_str(json.dumps(spec)) if self.adds_prefix else self.middle
        self._table = table
        self._min_runs = min_runs
        self._min_chars = min_chars
        self._byte_len = np.array([len(data) for data in table.token_bytes], dtype=np.int64)
        self._ascii_only = any(part["type"] in _UNICODE_FORMS for part in component_parts(bare.get("normalizer")))

    def encode(self, runs: Sequence[Run]) -> list[tuple[TokenIds, ...]]:
        """The ids of distinct, non-empty runs.

        Returns:
            For each run int32 arrays to be joined. They may be shared between runs: copy, never write.
        """
        min_chars = self._min_chars * (LATER_SHARE if self.sharing.checked else 1)
        if len(runs) >= self._min_runs and sum(len(run.text) for run in runs) >= min_chars and self.may_share():
            num_replaced_chars = self.num_replaced_chars
            parts = self._encode_shared(runs)
            self.sharing.num_calls += 1
            sample = _sample(runs)
            if self._agrees([runs[i] for i in sample], [parts[i] for i in sample]):
                return parts
            self.sharing.num_mismatches += 1
            self.num_replaced_chars = num_replaced_chars
        return [(ids,) for ids in self._encode_whole(runs)]

    # --- whole ---

    def _encode_whole(self, runs: Sequence[Run]) -> list[TokenIds]:
        result: list[TokenIds] = [np.empty(0, dtype=np.int32)] * len(runs)
        for at_start in (False, True):
            encoder = self._start if at_start else self.middle
            mine = [i for i, run in enumerate(runs) if run.at_start == at_start]
            for batch in _batches(mine, [len(runs[i].text) for i in mine], _BATCH_CHARS):
                texts = [self._expressible(runs[i].text) for i in batch]
                for i, encoding in zip(batch, encoder.encode_batch_fast(texts, add_special_tokens=False), strict=True):
                    result[i] = np.array(encoding.ids, dtype=np.int32)
        return result

    def _expressible(self, text: str) -> str:
        """The text with U+FFFD for characters the vocabulary has no bytes for: the library would just drop them."""
        if self._is_expressible(text):
            return text
        good = [char if self._is_expressible(char) else REPLACEMENT for char in text]
        self.num_replaced_chars += sum(a != b for a, b in zip(text, good, strict=True))
        return "".join(good)

    def _is_expressible(self, text: str) -> bool:
        try:
            data = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
            return False
        missing = self._table.missing_bytes
        return not missing or len(data) == len(data.translate(None, missing))

    # --- shared ---

    def may_share(self) -> bool:
        """Whether cuts change nothing for this tokenizer: found out the first time it matters."""
        if not self.sharing.checked and not self.sharing.off_reason:
            self.sharing.checked = True
            num_replaced_chars = self.num_replaced_chars
            across = [data.decode("utf-8", "replace") for data in self._table.token_bytes if _LATER_SPACE.search(data)]
            texts = probe_texts(across[:500])
            runs = [
                Run(text, at_start) for text in texts for at_start in ([False, True] if self.adds_prefix else [False])
            ]
            if not self._agrees(runs, self._encode_shared(runs)):
                self.sharing.off_reason = "text that is cut before a space has other tokens than the whole"
            self.num_replaced_chars = num_replaced_chars
        return not self.sharing.off_reason

    def _agrees(self, runs: Sequence[Run], parts: Sequence[Sequence[TokenIds]]) -> bool:
        num_replaced_chars = self.num_replaced_chars
        whole = self._encode_whole(runs)
        self.num_replaced_chars = num_replaced_chars
        return all(np.array_equal(np.concatenate(mine), ids) for mine, ids in zip(parts, whole, strict=True))

    def _encode_shared(self, runs: Sequence[Run]) -> list[tuple[TokenIds, ...]]:
        shared = share_prefixes(runs)
        number = count().__next__
        words, heads = defaultdict[str, int](number), defaultdict[str, int](number)  # heads begin a document
        word_of = array("q")  # of each place in each piece
        bounds = [0]
        for text, at_start in shared.pieces:
            found = split_words(text)
            if at_start:
                word_of.append(heads[found.pop(0)])
            word_of.extend(map(words.__getitem__, found))
            bounds.append(len(word_of))
        ids, ends = _gathered(self._encode_words(words, heads), np.frombuffer(word_of, dtype=np.int64))
        id_bounds = np.concatenate([[0], ends])[bounds].tolist()
        piece_ids = [ids[a:b] for a, b in pairwise(id_bounds)]
        return [tuple([piece_ids[i] for i in numbers]) for numbers in shared.chains]

    def _encode_words(self, words: Mapping[str, int], heads: Mapping[str, int]) -> _WordIds:
        """The ids of words, by their numbers. Words go many in one text, which is cheaper, where that can be undone."""
        texts = [""] * (len(words) + len(heads))
        for word, i in chain(words.items(), heads.items()):
            texts[i] = word
        together = [i for word, i in words.items() if self._goes_together(word)]
        groups = list(_batches(together, [len(texts[i]) for i in together], _CHARS_TOGETHER))
        joined = ["".join(map(texts.__getitem__, group)) for group in groups]
        kept = [k for k, text in enumerate(joined) if self._is_expressible(text)]
        groups, joined = [groups[k] for k in kept], [joined[k] for k in kept]
        alone = sorted(set(range(len(texts))).difference(*groups))
        begin, length = np.zeros((2, len(texts)), dtype=np.int64)
        flat = [np.empty(0, dtype=np.int32)]
        total = 0
        for group, ids in zip(groups, self._encode_whole([Run(text, False) for text in joined]), strict=True):
            ends = self._word_ends([texts[i] for i in group], ids)
            if ends is None:
                alone += group
                continue
            begin[group] = total + np.concatenate([[0], ends[:-1]])
            length[group] = np.diff(ends, prepend=0)
            flat.append(ids)
            total += len(ids)
        head_numbers = set(heads.values())
        for i, ids in zip(alone, self._encode_whole([Run(texts[i], i in head_numbers) for i in alone]), strict=True):
            begin[i], length[i] = total, len(ids)
            flat.append(ids)
            total += len(ids)
        return _WordIds(ids=np.concatenate(flat), begin=begin, length=length)

    def _goes_together(self, word: str) -> bool:
        """Between such words there are safe cuts, and nothing changes the number of their bytes."""
        return word[0] == " " and not is_blank(word[-1]) and (word.isascii() or not self._ascii_only)

    def _word_ends(self, words: Sequence[str], ids: TokenIds) -> npt.NDArray[np.int64] | None:
        """[num_words] of how many ids are up to the end of each word; None where bytes do not say."""
        token_len = self._byte_len[ids]
        reached = token_len.cumsum()
        wanted = np.cumsum([len(word.encode()) for word in words])
        ends = np.searchsorted(reached, wanted)
        if not token_len.all() or reached[-1] != wanted[-1] or (reached[ends] != wanted).any():
            return None
        return ends + 1


def _gathered(words: _WordIds, word_of: npt.NDArray[np.int64]) -> tuple[TokenIds, npt.NDArray[np.int64]]:
    """The ids of a sequence of words, and where each word's end."""
    length = words.length[word_of]
    ends = length.cumsum()
    ids = np.empty(ends[-1] if len(ends) else 0, dtype=np.int32)
    shift = words.begin[word_of] - (ends - length)  # from a place in ``ids`` to one in ``words.ids``
    begin = 0
    for a in range(0, len(word_of), _GATHER_WORDS):
        end = int(ends[a : a + _GATHER_WORDS][-1])
        shifts = np.repeat(shift[a : a + _GATHER_WORDS], length[a : a + _GATHER_WORDS])
        ids[begin:end] = words.ids[np.arange(begin, end) + shifts]
        begin = end
    return ids, ends


def _why_not_shared(spec: Mapping[str, Any]) -> str:
    """What in a tokenizer looks across a safe cut; "" if nothing does."""
    for part in component_parts(spec.get("normalizer")):
        if part["type"] == "Replace" and part["pattern"] != {"String": " "}:
            return f"its normalizer replaces {part['pattern']}"
    if any(token.get("single_word", False) for token in spec.get("added_tokens") or ()):
        return "an added token of white space looks at what stands beside it"
    return ""


def _sample(runs: Sequence[Run]) -> list[int]:
    """Rows to hold to the whole: up to _SAMPLE_RUNS over all of them, of a twentieth of the text at most."""
    budget = sum(len(run.text) for run in runs) // 20
    chosen: list[int] = []
    for i in range(0, len(runs), max(1, len(runs) // _SAMPLE_RUNS)):
        budget -= len(runs[i].text)
        if chosen and (budget < 0 or len(chosen) == _SAMPLE_RUNS):
            break
        chosen.append(i)
    return chosen


def _batches(items: Sequence[int], sizes: Sequence[int], max_size: int) -> Iterator[list[int]]:
    """Cuts items into batches of at most ``max_size``, except that an item is never cut."""
    batch: list[int] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and total + size > max_size:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
