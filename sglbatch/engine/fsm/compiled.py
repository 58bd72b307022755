"""From a call's constraint to what it compiles to."""

from __future__ import annotations

import json
from typing import Any

from sglbatch.engine.fsm.automaton import Automaton
from sglbatch.engine.fsm.regex import compile_regex
from sglbatch.engine.fsm.schema import SchemaConstraint
from sglbatch.errors import ConstraintError
from sglbatch.types import Constraint


def compile_constraint(constraint: Constraint, *, allow_unenforced: bool = False) -> Automaton | SchemaConstraint:
    """The automaton of a regex or the machine of a schema.

    Args:
        allow_unenforced: leave keywords that cannot be enforced to validation, as a lax constraint does.

    Raises ConstraintError: as ``compile_regex`` and ``SchemaConstraint``; invalid-schema for text that is no JSON.
    """
    if constraint.kind == "regex":
        return compile_regex(constraint.source)
    return SchemaConstraint(parse_schema(constraint.source), allow_unenforced=allow_unenforced or constraint.lax)


def parse_schema(text: str) -> Any:
    """Raises ConstraintError (invalid-schema)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(
            "invalid-schema", f"the schema is no JSON: {error}", hint="give a JSON Schema as a JSON object"
        ) from error
