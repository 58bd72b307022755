"""A constraint to look at by itself: what it accepts, what it forces, what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sglbatch.engine.fsm.automaton import DEAD, Automaton
from sglbatch.engine.fsm.guide import Forced
from sglbatch.engine.fsm.machine_guide import MachineGuide
from sglbatch.engine.fsm.masks import AutomatonGuide, TokenMasks
from sglbatch.engine.fsm.regex import compile_regex
from sglbatch.engine.fsm.schema import SchemaConstraint
from sglbatch.engine.fsm.stored import AutomatonStore
from sglbatch.errors import SglbatchError
from sglbatch.tokenizer import Tokenizer

_ORDER_HINT: Final = (
    "values are written with the properties in the schema's order, and with ', ' and ': ' between them, "
    "or ',' and ':' where separators=\"compact\""
)


@dataclass(frozen=True, kw_only=True)
class ConstraintStats:
    """What a constraint took.

    Args:
        compiled_to: automaton (a regex: all states made at once) or machine (a schema: states made as they are met).
        num_states: states made so far.
        compile_s: seconds from the source to the first state; of a regex that was compiled before, of reading it.
        unenforced: what is left to validation, as "keyword at path".
    """

    compiled_to: Literal["automaton", "machine"]
    num_states: int
    compile_s: float
    unenforced: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class CompiledConstraint:
    """What ``constraint_for_schema`` and ``constraint_for_regex`` return."""

    def __init__(self, compiled: Automaton | SchemaConstraint, tokenizer: Tokenizer, *, compile_s: float) -> None:
        self._compiled = compiled
        self._compile_s = compile_s
        masks = TokenMasks.of(tokenizer)
        self.guide = masks.guide(compiled)
        self._forced = Forced(self.guide, tokenizer.encode)

    def accepts(self, text: str) -> bool:
        """Whether a whole text meets the constraint.

        Of a schema's text the JSON value counts and not how it is written (white space, escapes, the order of an
        object's properties); an object with a name twice is no value.
        """
        if isinstance(self._compiled, SchemaConstraint):
            return self._compiled.accepts(text)
        return self._compiled.accepts(text.encode("utf-8", "surrogatepass"))

    def forced(self, text: str) -> str:
        """What must follow ``text``, the beginning of a text as it is generated; "" where there is a choice or the end.

        Raises:
            SglbatchError: ``not-a-beginning`` when nothing that is generated begins so.
        """
        state = self._run(text.encode("utf-8", "surrogatepass"))
        if state == DEAD:
            raise SglbatchError(
                "not-a-beginning",
                f"no text of the constraint begins with {text[-60:]!r}",
                hint=_ORDER_HINT if isinstance(self._compiled, SchemaConstraint) else None,
            )
        return self._forced.text(state)

    def _run(self, data: bytes) -> int:
        guide = self.guide
        if isinstance(guide, MachineGuide):
            return guide.machine.run(guide.start, data)
        assert isinstance(guide, AutomatonGuide)
        return guide.automaton.run(guide.start, data)

    @property
    def stats(self) -> ConstraintStats:
        guide = self.guide
        if isinstance(guide, MachineGuide):
            compiled_to: Literal["automaton", "machine"] = "machine"
            num_states = guide.machine.num_states
        else:
            assert isinstance(guide, AutomatonGuide)
            compiled_to, num_states = "automaton", guide.automaton.num_states
        return ConstraintStats(
            compiled_to=compiled_to,
            num_states=num_states,
            compile_s=self._compile_s,
            unenforced=tuple(getattr(self._compiled, "unenforced", None) or ()),
        )


def compiled_schema(
    schema: Any,
    tokenizer: Tokenizer,
    store: AutomatonStore,
    *,
    separators: Literal["json", "compact"],
    allow_unenforced: bool,
) -> CompiledConstraint:
    return _timed(
        lambda: SchemaConstraint(schema, separators=separators, allow_unenforced=allow_unenforced, store=store),
        tokenizer,
    )


def compiled_regex(pattern: str, tokenizer: Tokenizer, store: AutomatonStore) -> CompiledConstraint:
    return _timed(lambda: compile_regex(pattern, store=store), tokenizer)


def _timed(compile_it: Callable[[], Automaton | SchemaConstraint], tokenizer: Tokenizer) -> CompiledConstraint:
    begin = time.perf_counter()
    compiled = compile_it()
    return CompiledConstraint(compiled, tokenizer, compile_s=time.perf_counter() - begin)
