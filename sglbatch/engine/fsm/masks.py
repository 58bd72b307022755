"""Which tokens a constraint allows in each state of its automaton."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.automaton import DEAD, Automaton
from sglbatch.engine.fsm.bitmask import Bitmask
from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.guide import Guide
from sglbatch.engine.fsm.machine_guide import MachineGuide
from sglbatch.engine.fsm.minimise import can_finish
from sglbatch.engine.fsm.schema import SchemaConstraint
from sglbatch.engine.fsm.schema_parts import byte_costs
from sglbatch.engine.fsm.vocabulary import Vocabulary, row_offsets
from sglbatch.errors import ConstraintError
from sglbatch.tokenizer import Tokenizer

_MASKS: WeakKeyDictionary[Tokenizer, TokenMasks] = WeakKeyDictionary()


class TokenMasks:
    """Token masks over one tokenizer; built once, shared by all constraints.

    Args:
        token_bytes: the bytes each token id stands for; b"" for special tokens and unused ids.
        eos_token_ids: allowed exactly where a text may end.
        vocab_size: number of the model's logits, at least ``len(token_bytes)``; further ids are never allowed.
        max_guides: constraints whose masks are remembered while nobody uses them; the least recently used go first.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], eos_token_ids: frozenset[int], vocab_size: int, *, max_guides: int = 64
    ) -> None:
        assert len(token_bytes) <= vocab_size, "more tokens than logits"
        assert all(0 <= token_id < vocab_size for token_id in eos_token_ids), "an end token without a logit"
        self.vocab_size = vocab_size
        self._token_bytes = [b"" if i in eos_token_ids else data for i, data in enumerate(token_bytes)]
        self._eos_ids = sorted(eos_token_ids)
        self._vocabulary = Vocabulary(self._token_bytes)
        self._max_guides = max_guides
        self._lock = Lock()
        self._guides: OrderedDict[Automaton | SchemaConstraint, Guide] = OrderedDict()
        self._in_use: WeakValueDictionary[Automaton | SchemaConstraint, Guide] = WeakValueDictionary()
        self._distinct: WeakValueDictionary[bytes, Bitmask] = WeakValueDictionary()

    @staticmethod
    def of(tokenizer: Tokenizer) -> TokenMasks:
        """The masks over a tokenizer, the same ones for all threads as long as somebody has it.

        Its vocabulary is laid out once.
        """
        masks = _MASKS.get(tokenizer)
        if masks is None:
            masks = TokenMasks(tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.vocab_size)
            _MASKS[tokenizer] = masks
        return masks

    def guide(self, compiled: Automaton | SchemaConstraint) -> Guide:
        """The guide of this very object: the same one while anybody holds it, or it is among the last ``max_guides``.

        Raises ConstraintError (untokenizable-constraint) when no sequence of tokens spells an accepted text.
        """
        with self._lock:
            guide = self._in_use.get(compiled)
            if guide is None:
                guide = self._new_guide(compiled)
                self._in_use[compiled] = guide
            self._guides[compiled] = guide
            self._guides.move_to_end(compiled)
            if len(self._guides) > self._max_guides:
                self._guides.popitem(last=False)
            return guide

    def _new_guide(self, compiled: Automaton | SchemaConstraint) -> Guide:
        return AutomatonGuide(compiled, self) if isinstance(compiled, Automaton) else MachineGuide(compiled, self)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to the text; empty for special tokens, end tokens and ids beyond the tokenizer's."""
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def pack(self, allowed: npt.NDArray[np.bool_], *, may_end: bool) -> Bitmask:
        """The bitmask of ``allowed`` (bool [num_tokens]); equal masks are one object while any is in use."""
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.bool_)
        bits[: len(allowed)] = allowed
        if may_end:
            bits[self._eos_ids] = True
        data = np.packbits(bits, bitorder="little").tobytes()
        mask: Bitmask = np.frombuffer(data, dtype=np.dtype("<i4"))
        return self._distinct.setdefault(data, mask)


class AutomatonGuide:
    """The guide of an automaton, whose states it uses. See ``Guide``.

    Masked decoding cannot get stuck, even where the tokenizer lacks some byte.
    """

    def __init__(self, automaton: Automaton, masks: TokenMasks) -> None:
        self.automaton = automaton
        self.start = automaton.start
        self._token_masks = masks
        self._rows = row_offsets(automaton.table)
        self._masks: dict[int, Bitmask] = {}
        self._completing: dict[int, Bitmask] = {}
        self._costs: list[int] | None = None
        self._dead_end = self._token_dead_ends()
        if self._dead_end is not None and self._dead_end[self.start]:
            raise ConstraintError(
                "untokenizable-constraint",
                "the constraint needs bytes that this model's tokenizer has no token for",
                hint="leave unusual control characters out of the regex or the choices",
            )

    def mask(self, state: int) -> Bitmask:
        """The tokens allowed in ``state``; end-of-sequence tokens exactly when it accepts. Made once a state."""
        mask = self._masks.get(state)
        if mask is None:
            allowed = self._allowed(state)
            mask = self._token_masks.pack(allowed, may_end=bool(self.automaton.accepting[state]))
            self._masks[state] = mask
        return mask

    def advance(self, state: int, token_id: int) -> int:
        """The state after a token that stands for text; -1 when the token leaves the language."""
        data = self._token_masks.bytes_of(token_id)
        assert data, f"token {token_id} stands for no text"
        return self.automaton.run(state, data)

    def is_final(self, state: int) -> bool:
        """The text may end here and nothing can follow."""
        return bool(self.automaton.accepting[state]) and bool((self.automaton.table[state] == DEAD).all())

    def may_end(self, state: int) -> bool:
        return bool(self.automaton.accepting[state])

    def row(self, state: int) -> npt.NDArray[np.int32]:
        row: npt.NDArray[np.int32] = self.automaton.table[state]
        return row

    def cost(self, state: int) -> int:
        if self._costs is None:
            self._costs = byte_costs(self.automaton, escaped=False)
        return self._costs[state]

    def free_text(self, state: int) -> bool:
        return False

    def completing_mask(self, state: int) -> Bitmask:
        mask = self._completing.get(state)
        if mask is None:
            vocabulary = self._token_masks.vocabulary
            after = vocabulary.destinations(self._rows, state)
            allowed = self._allowed(state)
            left = self.cost(state)
            for token_id in np.flatnonzero(allowed).tolist():
                allowed[token_id] = self.cost(int(after[token_id])) == left - len(self.bytes_of(token_id))
            mask = self._completing[state] = self._token_masks.pack(allowed, may_end=left == 0)
        return mask

    def bytes_of(self, token_id: int) -> bytes:
        return self._token_masks.bytes_of(token_id)

    def _allowed(self, state: int) -> npt.NDArray[np.bool_]:
        vocabulary = self._token_masks.vocabulary
        if self._dead_end is None:
            return vocabulary.reachable(self._rows, state)
        after = vocabulary.destinations(self._rows, state)
        return (after >= 0) & ~self._dead_end[after]

    def _token_dead_ends(self) -> npt.NDArray[np.bool_] | None:
        """bool [S]: no sequence of tokens leads to the end. None, the rule, when there is no such state.

        The automaton's own states all reach the end by bytes; a vocabulary without a token for some byte can
        still make one a dead end. States that get there over single-byte tokens are found at once.
        """
        vocabulary, accepting = self._token_masks.vocabulary, self.automaton.accepting
        columns = self.automaton.table[:, sorted(vocabulary.single_bytes)]
        differs = np.ones(columns.shape[1], dtype=np.bool_)
        differs[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        alive = can_finish(columns[:, differs], accepting, Budget())
        doubtful = {s: np.unique(vocabulary.destinations(self._rows, s)) for s in np.flatnonzero(~alive).tolist()}
        while revived := [s for s, after in doubtful.items() if alive[after[after >= 0]].any()]:
            for state in revived:
                alive[state] = True
                del doubtful[state]
        return ~alive if doubtful else None
