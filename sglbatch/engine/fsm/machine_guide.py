"""The guide of a compiled schema: its machine is unfolded only where tokens can lead."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglbatch.engine.fsm.bitmask import Bitmask
from sglbatch.engine.fsm.schema import SchemaConstraint
from sglbatch.errors import ConstraintError

if TYPE_CHECKING:
    from sglbatch.engine.fsm.masks import TokenMasks


class MachineGuide:
    """See ``Guide``.

    Bytes that are no token by themselves are not used, so that no text begins that tokens cannot finish.

    Raises ConstraintError (untokenizable-constraint) when the schema itself names such bytes.
    """

    def __init__(self, constraint: SchemaConstraint, masks: TokenMasks) -> None:
        self.constraint = constraint
        alphabet = masks.vocabulary.single_bytes
        named = set(json.dumps(constraint.schema, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        if not named <= alphabet:
            raise ConstraintError(
                "untokenizable-constraint",
                "the schema names characters that this model's tokenizer has no token for",
                hint="leave unusual characters out of property names and enums",
            )
        self.machine = constraint.machine(alphabet)
        self.start = self.machine.start
        self._token_masks = masks
        self._masks: dict[int, Bitmask] = {}
        self._completing: dict[int, Bitmask] = {}

    def mask(self, state: int) -> Bitmask:
        mask = self._masks.get(state)
        if mask is None:
            ids, _ = self._token_masks.vocabulary.walk(self.machine, state)
            mask = self._masks[state] = self._pack(ids, may_end=self.may_end(state))
        return mask

    def completing_mask(self, state: int) -> Bitmask:
        mask = self._completing.get(state)
        if mask is None:
            ids, after = self._token_masks.vocabulary.walk(self.machine, state)
            left = self.cost(state)
            lengths = np.fromiter((len(self.bytes_of(i)) for i in ids.tolist()), dtype=np.int64, count=len(ids))
            costs = np.fromiter((self.cost(s) for s in after.tolist()), dtype=np.int64, count=len(after))
            shortest = ids[costs == left - lengths]
            lost = left > 0 and not len(shortest)
            mask = self._completing[state] = self._pack(ids if lost else shortest, may_end=left == 0)
        return mask

    def _pack(self, ids: npt.NDArray[np.int64], *, may_end: bool) -> Bitmask:
        allowed = np.zeros(self._token_masks.vocabulary.num_tokens, dtype=np.bool_)
        allowed[ids] = True
        return self._token_masks.pack(allowed, may_end=may_end)

    def advance(self, state: int, token_id: int) -> int:
        data = self.bytes_of(token_id)
        assert data, f"token {token_id} stands for no text"
        return self.machine.run(state, data)

    def is_final(self, state: int) -> bool:
        return self.may_end(state) and bool((self.row(state) < 0).all())

    def may_end(self, state: int) -> bool:
        return self.machine.accepting(state)

    def row(self, state: int) -> npt.NDArray[np.int32]:
        return self.machine.row(state)

    def cost(self, state: int) -> int:
        return self.machine.cost(state)

    def free_text(self, state: int) -> bool:
        return self.machine.free_text(state)

    def bytes_of(self, token_id: int) -> bytes:
        return self._token_masks.bytes_of(token_id)
