"""JSON Schemas as programs give them, and the check of finished values against them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from sglbatch.errors import SglbatchError
from sglbatch.json_places import check_finite
from sglbatch.lang.last_gen import last_gen
from sglbatch.types import Constraint, ErrorInfo, Generate, Operation, Result, VarType

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

INVALID_VALUE: Final = "invalid-value"
"""The error of a call whose finished value does not satisfy its schema."""

_PLAIN_TYPES: Final[Mapping[Any, str]] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_DATA: Final = ("default", "const", "enum", "examples")
"""Keywords that hold values and not schemas."""
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_HINT: Final = 'json_schema={"type": "object", "properties": {...}, "required": [...]}'


def schema_text(schema: Any) -> str:
    """A schema as JSON text: of a dict, JSON text, a pydantic model, or a type that pydantic can describe.

    The order of the properties stays: it is the order in which they are written.

    Raises:
        SglbatchError: ``invalid-argument``; ``invalid-schema`` for a number that JSON does not have.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise SglbatchError("invalid-argument", f"json_schema is no JSON text: {error}", hint=_HINT) from error
        if not isinstance(schema, Mapping | bool):
            raise SglbatchError("invalid-argument", f"json_schema is JSON text of no schema: {schema!r}", hint=_HINT)
    if not isinstance(schema, Mapping | bool):
        schema = _schema_of_type(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise SglbatchError("invalid-argument", f"json_schema is no JSON value: {error}", hint=_HINT) from error
    check_finite(schema)
    return text


def _schema_of_type(kind: Any) -> Any:
    if isinstance(kind, type) and kind in _PLAIN_TYPES:
        return {"type": _PLAIN_TYPES[kind]}
    try:
        from pydantic import BaseModel, TypeAdapter
        from pydantic.errors import PydanticUserError
    except ImportError as error:
        raise SglbatchError(
            "invalid-argument", f"json_schema is neither a dict nor JSON text but {kind!r}", hint="pip install pydantic"
        ) from error
    try:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return _closed(kind.model_json_schema())
        return _closed(TypeAdapter(kind).json_schema())
    except (PydanticUserError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise SglbatchError(
            "invalid-argument", f"json_schema={kind!r} has no JSON Schema: {reason}", hint=_HINT
        ) from error


def _closed(schema: Any) -> Any:
    """A class names its fields, so its objects have no others."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key in _DATA else _closed(value) for key, value in schema.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def schema_constraint(schema: Any) -> tuple[Constraint, VarType]:
    """The constraint of a schema and the type of its variable."""
    text = schema_text(schema)
    return Constraint(kind="json_schema", source=text), VarType(kind="json", schema=text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A schema from outside for one gen of a template (``--schema``).

    Args:
        name: the gen's; every row's last gen has it.
    """

    name: str
    constraint: Constraint
    var_type: VarType

    @staticmethod
    def of(schema: Any, source: str, *, file: str = "", first_line: int = 1) -> Record:
        """The schema for the last gen of a function's source; raises SglbatchError: as ``last_gen``, and
        ``invalid-argument``.
        """
        constraint, var_type = schema_constraint(schema)
        name = last_gen(source, file=file, first_line=first_line)
        return Record(name=name, constraint=constraint, var_type=var_type)


def validator_kind(schema: Any) -> type[Validator]:
    """The validator of a schema's draft. Lists under ``items``, which 2020-12 has not, are read as 2019-09 does."""
    from jsonschema import Draft201909Validator, Draft202012Validator
    from jsonschema.validators import validator_for

    kind = validator_for(schema, default=Draft202012Validator)
    return Draft201909Validator if kind is Draft202012Validator and _lists_items(schema) else kind


def _lists_items(schema: Any, *, are_named: bool = False) -> bool:
    """Whether a list stands under ``items``; ``are_named``: the keys are names, of a schema each."""
    if isinstance(schema, list):
        return any(map(_lists_items, schema))
    if not isinstance(schema, dict):
        return False
    inner = schema.items() if are_named else [(key, part) for key, part in schema.items() if key not in _DATA]
    below = any(_lists_items(part, are_named=not are_named and key in _NAMED) for key, part in inner)
    return below or (not are_named and isinstance(schema.get("items"), list))


class Checks:
    """Holds finished values to their schemas, formats included."""

    def __init__(self) -> None:
        self._validators: dict[str, Validator] = {}

    def checked(self, operation: Operation, result: Result) -> Result:
        """The result, with an error where its text is not a value of the call's schema."""
        constraint = operation.constraint if isinstance(operation, Generate) else None
        if constraint is None or constraint.kind != "json_schema" or result.error is not None:
            return result
        problem = self.problem(constraint.source, result.text)
        if problem is None:
            return result
        message = f"the value does not satisfy its schema: {problem}; the text: {result.text}"
        return replace(result, error=ErrorInfo(code=INVALID_VALUE, message=message))

    def problem(self, source: str, text: str) -> str | None:
        """What is wrong with a text as a value of a schema (JSON text); None where nothing is."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"it is no JSON ({error})"
        try:
            found = next(self._validator(source).iter_errors(value), None)
        except re.error:
            # A pattern in ECMA's syntax that Python's re cannot read: the engine holds texts to it or refuses it.
            return None
        return None if found is None else f"{found.json_path}: {found.message}"

    def _validator(self, source: str) -> Validator:
        if source not in self._validators:
            schema = json.loads(source)
            kind = validator_kind(schema)
            self._validators[source] = kind(schema, format_checker=kind.FORMAT_CHECKER)
        return self._validators[source]
