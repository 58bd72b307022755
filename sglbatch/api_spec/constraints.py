"""Holding text to a constraint where the endpoint may not have."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from sglbatch.engine.fsm.automaton import Automaton
from sglbatch.engine.fsm.regex import compile_regex
from sglbatch.errors import ConstraintError
from sglbatch.lang.schemas import validator_kind
from sglbatch.types import Constraint, Generate, TextChoices

compiled = lru_cache(maxsize=256)(compile_regex)


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the whole text meets the constraint.

    Raises:
        ConstraintError: the constraint itself cannot be held.
    """
    if constraint.kind == "regex":
        return compiled(constraint.source).accepts(text.encode("utf-8", "replace"))
    return _is_valid(text, constraint.source)


def longest(question: Generate, text: str) -> str | None:
    """The longest beginning of ``text`` that meets the question's constraint, or None."""
    constraint = question.constraint
    assert constraint is not None
    if constraint.kind == "regex":
        return _longest_match(compiled(constraint.source), text)
    start = len(text) - len(text.lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return text[:end] if accepts(constraint, text[start:end]) else None


@lru_cache(maxsize=256)
def most_bytes(constraint: Constraint) -> int | None:
    """Bytes of the longest text that a regex allows; None where there is no longest, or no telling (a schema)."""
    if constraint.kind != "regex":
        return None
    automaton = compiled(constraint.source)
    following = [sorted({int(state) for state in row if state >= 0}) for row in automaton.table]
    longest: dict[int, int] = {}
    path, on_path = [(automaton.start, iter(following[automaton.start]))], {automaton.start}
    while path:
        state, rest = path[-1]
        target = next((t for t in rest if t not in longest), None)
        if target is None:
            longest[state] = max((1 + longest[t] for t in following[state]), default=0)
            on_path.remove(state)
            path.pop()
        elif target in on_path:
            return None
        else:
            on_path.add(target)
            path.append((target, iter(following[target])))
    return longest[automaton.start]


def field_schema(question: Generate | TextChoices) -> dict[str, Any]:
    """The JSON schema of one value."""
    if isinstance(question, TextChoices):
        return {"type": "string", "enum": list(question.choices)}
    constraint = question.constraint
    if constraint is None:
        return {"type": "string"}
    if constraint.kind == "regex":
        return {"type": "string", "pattern": f"^({constraint.source})$"}
    schema: dict[str, Any] = json.loads(constraint.source)
    return schema


def field_text(question: Generate | TextChoices, value: Any) -> str | None:
    """A field's value as the template's text, or None where it is not of the field's type."""
    if isinstance(question, Generate) and question.constraint is not None and question.constraint.kind != "regex":
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) else None


def _longest_match(automaton: Automaton, text: str) -> str | None:
    state = automaton.start
    data = text.encode("utf-8", "replace")
    end = 0 if automaton.accepting[state] else None
    for i, byte in enumerate(data):
        state = int(automaton.table[state, byte])
        if state < 0:
            break
        if automaton.accepting[state]:
            end = i + 1
    return None if end is None else data[:end].decode("utf-8", "ignore")


def _is_valid(text: str, schema_source: str) -> bool:
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    schema = json.loads(schema_source)
    registry: Registry[Any] = Registry()  # nothing is fetched
    try:
        return bool(validator_kind(schema)(schema, registry=registry).is_valid(value))
    except Unresolvable as error:
        raise ConstraintError(
            "unresolved-reference", f"the JSON schema refers to what it does not have: {error}"
        ) from error
