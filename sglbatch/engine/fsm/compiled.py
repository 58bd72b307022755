"""From a call's constraint to what it compiles to, once for all calls."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from sglbatch.engine.fsm.automaton import Automaton
from sglbatch.engine.fsm.regex import compile_regex
from sglbatch.engine.fsm.schema import SchemaConstraint
from sglbatch.engine.fsm.stored import AutomatonStore
from sglbatch.errors import ConstraintError
from sglbatch.types import Constraint


class Compiler:
    """Compiles each constraint once; what cannot be compiled is remembered as well.

    Args:
        store: keeps automata that took long, also those of a schema's patterns, beyond this process.
        max_remembered: the least recently used go first.
    """

    def __init__(self, store: AutomatonStore | None = None, *, max_remembered: int = 1024) -> None:
        self._store = store
        self._max_remembered = max_remembered
        self._known: OrderedDict[tuple[Constraint, bool], Automaton | SchemaConstraint | ConstraintError] = (
            OrderedDict()
        )

    def compile(self, constraint: Constraint, *, allow_unenforced: bool = False) -> Automaton | SchemaConstraint:
        """As ``compile_constraint``; for an equal constraint the same object, or the same error."""
        key = (constraint, allow_unenforced)
        if key not in self._known:
            try:
                compiled = compile_constraint(constraint, allow_unenforced=allow_unenforced, store=self._store)
            except ConstraintError as error:
                self._remember(key, _without_frames(error))
                raise
            self._remember(key, compiled)
        self._known.move_to_end(key)
        found = self._known[key]
        if isinstance(found, ConstraintError):
            raise _without_frames(found)
        return found

    def _remember(self, key: tuple[Constraint, bool], outcome: Automaton | SchemaConstraint | ConstraintError) -> None:
        self._known[key] = outcome
        if len(self._known) > self._max_remembered:
            self._known.popitem(last=False)


def _without_frames(error: ConstraintError) -> ConstraintError:
    """The same error without its traceback and cause, which hold on to all that was being built."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def compile_constraint(
    constraint: Constraint, *, allow_unenforced: bool = False, store: AutomatonStore | None = None
) -> Automaton | SchemaConstraint:
    """The automaton of a regex or the machine of a schema.

    Args:
        allow_unenforced: leave keywords that cannot be enforced to validation, as a lax constraint does.
        store: see ``Compiler``.

    Raises ConstraintError: as ``compile_regex`` and ``SchemaConstraint``; invalid-schema for text that is no JSON.
    """
    if constraint.kind == "regex":
        return compile_regex(constraint.source, store=store)
    schema = parse_schema(constraint.source)
    return SchemaConstraint(schema, allow_unenforced=allow_unenforced or constraint.lax, store=store)


def parse_schema(text: str) -> Any:
    """Raises ConstraintError (invalid-schema)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(
            "invalid-schema", f"the schema is no JSON: {error}", hint="give a JSON Schema as a JSON object"
        ) from error
