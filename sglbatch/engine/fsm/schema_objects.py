"""What a schema says of objects: their properties, how many there are, what one property asks of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.schema_documents import Documents
from sglbatch.engine.fsm.schema_keywords import count_of, limits_of
from sglbatch.engine.fsm.schema_names import NameReader
from sglbatch.engine.fsm.schema_node import (
    ANY_VALUE,
    NO_VALUE,
    Node,
    NodeOf,
    ObjectSpec,
    Place,
    breaking,
    node_and,
    node_or,
    only,
    require,
    satisfying,
)

OBJECT_KEYWORDS: Final = frozenset(
    {
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "unevaluatedProperties",
    }
)
_DEPENDENCY_KEYWORDS: Final = ("dependentRequired", "dependencies", "dependentSchemas")


class ObjectReader:
    """Reads the keywords of objects; ``node_of`` reads a place's schema."""

    def __init__(self, documents: Documents, node_of: NodeOf, names: NameReader, budget: Budget) -> None:
        self._documents = documents
        self._node_of = node_of
        self._names = names
        self._budget = budget

    def allowed(self, place: Place) -> Node:
        """Any value, but of objects only those that the keywords allow; ``dependencies`` gives the rest of them."""
        schema = place.schema
        properties = schema.get("properties", {})
        classes = tuple(self._names.classes(place))
        least, most = limits_of(place, "minProperties", "maxProperties")
        props = {
            name: satisfying(self._documents.child(place, "properties", name)) | self._names.by_patterns(place, name)
            for name in properties
        }
        spec = ObjectSpec(props=props, classes=classes, least=least, most=most, path=place.path)
        spec = require(spec, schema.get("required", ()))
        empty = most is not None and max(least, len(spec.required)) > most
        found = only(objects=[] if empty else [spec])
        if "propertyNames" in schema:
            found = node_and(found, self._names.named_only(place), self._budget)
        return found

    def failing(self, place: Place) -> Iterator[Node]:
        """For each keyword, the objects that break it."""
        schema = place.schema
        for name in schema.get("required", ()):
            yield Node(objects=(ObjectSpec(props={name: NO_VALUE}),))
        if "minProperties" in schema and (least := count_of(place, "minProperties")):
            yield Node(objects=(ObjectSpec(most=least - 1),))
        if "maxProperties" in schema:
            yield Node(objects=(ObjectSpec(least=count_of(place, "maxProperties") + 1),))
        for name in schema.get("properties", {}):
            wrong = breaking(self._documents.child(place, "properties", name))
            yield Node(objects=(ObjectSpec(props={name: wrong}, required=frozenset([name])),))
        yield from self._names.failing(place)
        yield from self._failing_dependencies(place)

    # --- what one property asks of others ---

    def dependencies(self, place: Place) -> Iterator[Callable[[], Node]]:
        """For each property that asks something of others, what satisfies it."""
        for keyword in _DEPENDENCY_KEYWORDS:
            for name, needed in place.schema.get(keyword, {}).items():
                yield partial(self._dependency, place, keyword, name, needed)

    def _dependency(self, place: Place, keyword: str, name: str, needed: Any) -> Node:
        without = only(objects=[ObjectSpec(props={name: NO_VALUE})])
        present = _having(name)
        if isinstance(needed, list):
            return node_or(without, Node(objects=(require(present, needed),)))
        having = self._node_of(self._documents.child(place, keyword, name), True)
        return node_or(without, node_and(Node(objects=(present,)), having, self._budget))

    def _failing_dependencies(self, place: Place) -> Iterator[Node]:
        for keyword in _DEPENDENCY_KEYWORDS:
            for name, needed in place.schema.get(keyword, {}).items():
                present = _having(name)
                if isinstance(needed, list):
                    for other in needed:
                        if other != name:
                            yield Node(objects=(replace(present, props=present.props | {other: NO_VALUE}),))
                else:
                    wrong = self._node_of(self._documents.child(place, keyword, name), False)
                    yield node_and(Node(objects=(present,)), wrong, self._budget)


def _having(name: str) -> ObjectSpec:
    """The objects that have this property."""
    return ObjectSpec(props={name: ANY_VALUE}, required=frozenset([name]))
