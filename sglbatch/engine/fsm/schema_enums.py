"""What a schema says of single values: enum and const."""

from __future__ import annotations

import json
from typing import Any

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.schema_keywords import is_number
from sglbatch.engine.fsm.schema_node import (
    ANY,
    ANY_VALUE,
    NO_VALUE,
    ArraySpec,
    Conj,
    Node,
    ObjectSpec,
    Place,
    breaking,
    node_and,
    only,
    satisfying,
)
from sglbatch.engine.fsm.schema_numbers import NumberSet, exact
from sglbatch.engine.fsm.schema_texts import ALL_TEXTS, TextSet, words_set


class EnumReader:
    """Reads ``enum`` and ``const``. An item of a listed array or object is a place of its own, with a ``const``."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._items: dict[tuple[int, str], Place] = {}

    def allowed(self, place: Place, keyword: str) -> Node:
        """The values that ``keyword`` lists."""
        values = place.schema["enum"] if keyword == "enum" else [place.schema["const"]]
        objects = tuple(self._object(place, v) for v in values if isinstance(v, dict))
        arrays = tuple(self._array(place, v) for v in values if isinstance(v, list))
        numbers = frozenset(exact(v) for v in values if is_number(v))
        words = words_set(v for v in values if isinstance(v, str))
        return Node(
            null=None in values,
            bools=frozenset(v for v in values if isinstance(v, bool)),
            numbers=(NumberSet(values=numbers),) if numbers else (),
            strings=(words,) if words else (),
            arrays=arrays,
            objects=objects,
        )

    def failing(self, place: Place) -> Node:
        """The values that neither keyword lists."""
        found = ANY
        for keyword in ("enum", "const"):
            if keyword in place.schema:
                values = place.schema["enum"] if keyword == "enum" else [place.schema["const"]]
                found = node_and(found, _other_than(self.allowed(place, keyword)), self._budget)
                for value in values:
                    if isinstance(value, list | dict):
                        found = node_and(found, self._unlike(place, value), self._budget)
        return found

    def _object(self, place: Place, value: dict[str, Any]) -> ObjectSpec:
        return ObjectSpec(
            props={name: satisfying(self._item(place, item)) for name, item in value.items()},
            required=frozenset(value),
            classes=((ALL_TEXTS, NO_VALUE),),
        )

    def _array(self, place: Place, value: list[Any]) -> ArraySpec:
        items = tuple(satisfying(self._item(place, item)) for item in value)
        return ArraySpec(prefix=items, rest=NO_VALUE, least=len(value), most=len(value))

    def _item(self, place: Place, item: Any) -> Place:
        key = (id(item), json.dumps(item, sort_keys=True))
        if key not in self._items:
            self._items[key] = Place({"const": item}, place.path, place.base, 2020)
        return self._items[key]

    def _unlike(self, place: Place, value: Any) -> Node:
        """Everything but one array or one object."""

        def other(item: Any) -> Conj:
            return breaking(self._item(place, item))

        if isinstance(value, list):
            size = len(value)
            arrays = [ArraySpec(least=size + 1)] + ([ArraySpec(most=size - 1)] if size else [])
            for i, item in enumerate(value):
                arrays.append(ArraySpec(prefix=(*(ANY_VALUE,) * i, other(item)), least=i + 1))
            return only(arrays=arrays)
        objects = [ObjectSpec(needs=((TextSet(excluded=frozenset(value)), ANY_VALUE),))]
        for name, item in value.items():
            objects.append(ObjectSpec(props={name: NO_VALUE}))
            objects.append(ObjectSpec(props={name: other(item)}, required=frozenset([name])))
        return only(objects=objects)


def _other_than(same: Node) -> Node:
    """Everything but these; arrays and objects all stay."""
    words = frozenset(w for s in same.strings for w in s.words or ())
    numbers = frozenset(v for n in same.numbers for v in n.values or ())
    return Node(
        null=not same.null,
        bools=ANY.bools - same.bools,
        numbers=(NumberSet(excluded=numbers),) if numbers else ANY.numbers,
        strings=(TextSet(excluded=words),) if words else ANY.strings,
        arrays=ANY.arrays,
        objects=ANY.objects,
    )
