"""Whether a schema is one at all: what the value of each keyword must look like, wherever the keyword stands.

All of a document is looked at before anything of it is read, so that readers need not ask. The meta-schemas say the
same, but to check against them takes about as long as compiling or longer, does not reach what only a ``$ref`` makes a
schema, and refuses what does no harm: a description that is null, a name that is required twice, an older draft's way
in a document that names no draft. Keywords that only describe are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from sglbatch.engine.fsm.schema_documents import Documents
from sglbatch.engine.fsm.schema_keywords import TYPES, invalid, is_number
from sglbatch.engine.fsm.schema_node import Place


class _Shape(NamedTuple):
    """What a keyword's value must be, and the steps to each of the schemas in it."""

    fits: Callable[[Any], bool]
    expected: str
    schemas: Callable[[Any], Iterable[tuple[str | int, ...]]] = lambda value: ()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _are_types(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else _are_names(value) and bool(value) and set(value) <= set(TYPES)


def _are_dependencies(value: Any) -> bool:
    return isinstance(value, dict) and all(_are_names(needed) for needed in value.values() if isinstance(needed, list))


def _indices(value: list[Any]) -> list[tuple[str | int, ...]]:
    return [(i,) for i in range(len(value))]


_SCHEMA: Final = _Shape(lambda value: True, "a schema", lambda value: [()])
_SCHEMAS: Final = _Shape(lambda value: isinstance(value, list) and bool(value), "a list of schemas", _indices)
_PREFIX: Final = _Shape(lambda value: isinstance(value, list), "a list of schemas", _indices)
_ITEMS: Final = _Shape(
    lambda value: True, "a schema or a list of schemas", lambda v: _indices(v) if isinstance(v, list) else [()]
)
_NAMED_SCHEMAS: Final = _Shape(
    lambda value: isinstance(value, dict), "an object of schemas", lambda value: [(name,) for name in value]
)
_DEPENDENCIES: Final = _Shape(
    _are_dependencies,
    "an object of schemas and lists of names",
    lambda value: [(name,) for name, needed in value.items() if not isinstance(needed, list)],
)
_NAMES: Final = _Shape(_are_names, "a list of names")
_NAMED_NAMES: Final = _Shape(
    lambda value: isinstance(value, dict) and all(map(_are_names, value.values())), "an object of lists of names"
)
_COUNT: Final = _Shape(_is_count, "a whole number of at least 0")
_NUMBER: Final = _Shape(is_number, "a number")
_LIMIT: Final = _Shape(lambda value: is_number(value) or isinstance(value, bool), "a number, or true or false")
_TEXT: Final = _Shape(_is_text, "text")

_SHAPES: Final[Mapping[str, _Shape]] = {
    "type": _Shape(_are_types, f"one of {', '.join(TYPES)}, or a list of them"),
    "enum": _Shape(lambda value: isinstance(value, list), "a list of values"),
    "multipleOf": _Shape(lambda value: is_number(value) and value > 0, "a number above 0"),
    "uniqueItems": _Shape(lambda value: isinstance(value, bool), "true or false"),
    "pattern": _Shape(_is_text, "a regex as text"),
    "prefixItems": _PREFIX,
    "items": _ITEMS,
    "required": _NAMES,
    "dependentRequired": _NAMED_NAMES,
    "dependencies": _DEPENDENCIES,
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _LIMIT),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("$schema", "$id", "$ref", "$anchor", "$dynamicAnchor", "format"), _TEXT),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _SCHEMAS),
    **dict.fromkeys(("$defs", "definitions", "properties", "patternProperties", "dependentSchemas"), _NAMED_SCHEMAS),
    **dict.fromkeys(("not", "if", "then", "else", "contains", "additionalItems", "unevaluatedItems"), _SCHEMA),
    **dict.fromkeys(("additionalProperties", "propertyNames", "unevaluatedProperties"), _SCHEMA),
}


def _shape_of(keyword: str, place: Place) -> _Shape | None:
    """None for what is no keyword, or only describes."""
    if keyword == "items" and "prefixItems" in place.schema:
        return _SCHEMA
    if keyword == "id":
        return _TEXT if place.draft == 4 else None
    return _SHAPES.get(keyword)


class Shapes:
    """Holds the schemas of one document to their shapes, each once."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._seen: set[Place] = set()

    def check(self, place: Place) -> None:
        """Looks at a schema and at all that stand in it.

        Raises ConstraintError: invalid-schema, with the keyword's path.
        """
        stack = [place]
        while stack:
            place = self._documents.in_its_draft(stack.pop())
            if place not in self._seen:
                stack += self._inner(place)
                self._seen.add(place)

    def _inner(self, place: Place) -> Iterator[Place]:
        """The schemas that stand in one whose keywords are as they must be."""
        if isinstance(place.schema, bool):
            return
        if not isinstance(place.schema, dict):
            raise invalid(place, None, "a schema is an object, true or false")
        for keyword, value in place.schema.items():
            shape = _shape_of(keyword, place)
            if shape is None:
                continue
            if not shape.fits(value):
                raise invalid(place, keyword, f"it must be {shape.expected}")
            for steps in shape.schemas(value):
                yield self._documents.child(place, keyword, *steps)
