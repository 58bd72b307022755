"""The lattice of column types: what two values have in common, or that only JSON text holds both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Literal, TypeAlias

Tag: TypeAlias = Literal["null", "bool", "int", "float", "text", "list", "struct", "json"]

_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1
_EXACT_FLOAT: Final = 2**53


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A type in the lattice. null is below everything, json above; int is below float; the rest does not mix.

    Args:
        item: of a list.
        fields: of a struct, in first-seen order.
        is_enum: text of few distinct values, by declaration.
        wide: an int with values that a float does not hold exactly, so that it does not mix with float.
        reason: of json: why no column type holds the values.
    """

    tag: Tag
    item: Kind | None = None
    fields: tuple[tuple[str, Kind], ...] = ()
    is_enum: bool = False
    wide: bool = False
    reason: str = ""


NULL: Final = Kind(tag="null")
BOOL: Final = Kind(tag="bool")
INT: Final = Kind(tag="int")
WIDE_INT: Final = Kind(tag="int", wide=True)
FLOAT: Final = Kind(tag="float")
TEXT: Final = Kind(tag="text")


def kind_of(value: Any) -> Kind:  # noqa: PLR0911  one case a type
    """The kind of a JSON-like value."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return _int_kind(value)
    if isinstance(value, float):
        return FLOAT
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        return _list(reduce(merge, map(kind_of, value), NULL))
    assert isinstance(value, dict), f"not a JSON-like value: {type(value)}"
    return _struct({name: kind_of(item) for name, item in value.items()})


def merge(a: Kind, b: Kind) -> Kind:
    """The least kind that holds the values of both."""
    if a == b or b.tag == "null" or a.tag == "json":
        return a
    if a.tag == "null" or b.tag == "json":
        return b
    if a.tag != b.tag:
        return _merge_numbers(a, b)
    if a.tag in ("int", "text"):
        return WIDE_INT if a.tag == "int" else TEXT
    if a.tag == "list":
        assert a.item is not None and b.item is not None
        return _list(merge(a.item, b.item))
    assert a.tag == "struct"
    return _merge_structs(dict(a.fields), dict(b.fields))


def _merge_numbers(a: Kind, b: Kind) -> Kind:
    if {a.tag, b.tag} == {"int", "float"}:
        if a.wide or b.wide:
            return Kind(tag="json", reason="mixes floats with integers that a float does not hold exactly")
        return FLOAT
    return Kind(tag="json", reason=f"mixes {_NAMES[a.tag]} and {_NAMES[b.tag]}")


_NAMES: Final[dict[Tag, str]] = {
    "bool": "true/false",
    "int": "integers",
    "float": "floats",
    "text": "text",
    "list": "lists",
    "struct": "objects",
}


def _int_kind(value: int) -> Kind:
    if not _INT64_MIN <= value <= _INT64_MAX:
        return Kind(tag="json", reason="has integers beyond 64 bits")
    return INT if -_EXACT_FLOAT <= value <= _EXACT_FLOAT else WIDE_INT


def _list(item: Kind) -> Kind:
    return item if item.tag == "json" else Kind(tag="list", item=item)


def _struct(fields: dict[str, Kind]) -> Kind:
    if not fields:
        return Kind(tag="json", reason="has objects without fields")
    beyond = next((kind for kind in fields.values() if kind.tag == "json"), None)
    return beyond or Kind(tag="struct", fields=tuple(fields.items()))


def _merge_structs(a: dict[str, Kind], b: dict[str, Kind]) -> Kind:
    if a.keys() != b.keys():
        return Kind(tag="json", reason="has objects with different fields")
    return _struct({name: merge(kind, b[name]) for name, kind in a.items()})
