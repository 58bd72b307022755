"""Single keywords of a schema, checked and read as plain values: types, counts, names, bounds of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final

from sglbatch.engine.fsm.schema_node import ANY, Node, Place, node_or, of_types
from sglbatch.engine.fsm.schema_numbers import NumberSet, exact
from sglbatch.errors import ConstraintError, UnsupportedSchemaError

TYPES: Final = ("null", "boolean", "object", "array", "number", "string", "integer")
MAX_COUNT: Final = 1 << 40

_IN_PLACE: Final = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies"}
)


def invalid(place: Place, keyword: str | None, message: str) -> ConstraintError:
    """The error of a schema that says something that no draft allows."""
    where = place.path if keyword is None else f"{place.path}/{keyword}"
    return ConstraintError("invalid-schema", f"{where}: {message}", hint="correct the schema")


def leave(unenforced: list[str] | None, place: Place, keyword: str, reason: str) -> None:
    """Leaves a keyword to validation.

    Raises UnsupportedSchemaError where that is not allowed, ``unenforced`` being None.
    """
    if unenforced is None:
        raise UnsupportedSchemaError(
            keyword, place.path, reason, hint="--allow-unenforced validates the finished value instead"
        )
    unenforced.append(f"{keyword} at {place.path}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def count_of(place: Place, keyword: str) -> int:
    return min(int(place.schema[keyword]), MAX_COUNT)


def limits_of(place: Place, least: str, most: str) -> tuple[int, int | None]:
    """Two keywords that say how many there are; what is not there says nothing."""
    schema = place.schema
    return (
        count_of(place, least) if least in schema else 0,
        count_of(place, most) if most in schema else None,
    )


def type_names(place: Place) -> Iterable[str]:
    types = place.schema.get("type", TYPES)
    return [types] if isinstance(types, str) else types


def types_of(place: Place) -> Node:
    """Every value of the types that ``type`` names."""
    if "type" not in place.schema:
        return ANY
    found = of_types(type_names(place))
    if place.schema.get("nullable") is True:  # OpenAPI 3.0
        found = node_or(found, of_types(["null"]))
    return found


def numbers_of(place: Place) -> NumberSet | None:
    """What keywords say of a number; None where they say nothing."""
    schema = place.schema
    found = {k: exact(schema[k]) for k in ("minimum", "maximum", "multipleOf") if k in schema}
    low = (found["minimum"], schema.get("exclusiveMinimum") is True) if "minimum" in found else None
    high = (found["maximum"], schema.get("exclusiveMaximum") is True) if "maximum" in found else None
    if "exclusiveMinimum" in schema and not isinstance(schema["exclusiveMinimum"], bool):
        low = max([b for b in (low, (exact(schema["exclusiveMinimum"]), True)) if b])
    if "exclusiveMaximum" in schema and not isinstance(schema["exclusiveMaximum"], bool):
        bounds = [b for b in (high, (exact(schema["exclusiveMaximum"]), True)) if b]
        high = min(bounds, key=lambda b: (b[0], not b[1]))
    step = found.get("multipleOf")
    if low is None and high is None and step is None:
        return None
    return NumberSet(low=low, high=high, multiples=frozenset([step]) if step is not None else frozenset())


def evaluates_alone(schema: dict[str, Any], keyword: str) -> bool:
    """An unevaluated... keyword that no keyword beside it feeds from deeper down."""
    return (
        keyword in schema
        and not (_IN_PLACE & schema.keys())
        and not (keyword == "unevaluatedItems" and "contains" in schema)
    )
