"""What a schema says of arrays: their items, how many there are, what they contain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from sglbatch.engine.fsm.schema_documents import Documents
from sglbatch.engine.fsm.schema_keywords import count_of, evaluates_alone, leave, limits_of
from sglbatch.engine.fsm.schema_node import (
    ANY_VALUE,
    ArraySpec,
    Conj,
    Node,
    Place,
    breaking,
    finite_values,
    only,
    satisfying,
)
from sglbatch.errors import UnsupportedSchemaError

ARRAY_KEYWORDS: Final = frozenset(
    {"items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems", "unevaluatedItems"}
)


class ArrayReader:
    """Reads the keywords of arrays.

    Args:
        node: what satisfies a conjunction.
        unenforced: see ``SchemaReader``.
    """

    def __init__(self, documents: Documents, node: Callable[[Conj], Node], *, unenforced: list[str] | None) -> None:
        self._documents = documents
        self._node = node
        self._unenforced = unenforced

    def allowed(self, place: Place) -> Node:
        """Any value, but of arrays only those that the keywords allow."""
        schema = place.schema
        prefix_keyword = "prefixItems" if "prefixItems" in schema else "items"
        listed = isinstance(schema.get(prefix_keyword), list)
        prefix = self._documents.children(place, prefix_keyword) if listed else []
        rest = "additionalItems" if listed and prefix_keyword == "items" else "items"
        if rest not in schema and evaluates_alone(schema, "unevaluatedItems"):
            rest = "unevaluatedItems"
        rest_value = satisfying(self._documents.child(place, rest)) if rest in schema else ANY_VALUE
        least, most = limits_of(place, "minItems", "maxItems")
        spec = ArraySpec(
            prefix=tuple(satisfying(child) for child in prefix),
            rest=rest_value,
            least=least,
            most=most,
            contains=self._contains(place),
            unique=schema.get("uniqueItems") is True,
            path=place.path,
        )
        if spec.unique and not self._can_hold_unique(spec):
            leave(
                self._unenforced, place, "uniqueItems", "only lists of a few known values can be kept without repeats"
            )
            spec = replace(spec, unique=False)
        empty = spec.most is not None and spec.least > spec.most
        return only(arrays=[] if empty else [spec])

    def failing(self, place: Place) -> Iterator[Node]:
        """For each keyword, the arrays that break it."""
        schema = place.schema
        if "minItems" in schema and (least := count_of(place, "minItems")):
            yield Node(arrays=(ArraySpec(most=least - 1),))
        if "maxItems" in schema:
            yield Node(arrays=(ArraySpec(least=count_of(place, "maxItems") + 1),))
        if "contains" in schema:
            yield Node(arrays=(ArraySpec(rest=breaking(self._documents.child(place, "contains"))),))
        if "prefixItems" not in schema and isinstance(schema.get("items"), list):
            yield from self._failing_prefix(place, "items")
        if "prefixItems" in schema:
            yield from self._failing_prefix(place, "prefixItems")
            if "items" in schema:
                raise UnsupportedSchemaError("items", place.path, "what breaks it behind prefixItems")
        elif isinstance(schema.get("items"), dict | bool):
            child = self._documents.child(place, "items")
            yield Node(arrays=(ArraySpec(contains=((breaking(child), satisfying(child), 1, None),)),))

    def _failing_prefix(self, place: Place, keyword: str) -> Iterator[Node]:
        for i, child in enumerate(self._documents.children(place, keyword)):
            yield Node(arrays=(ArraySpec(prefix=(*(ANY_VALUE,) * i, breaking(child)), least=i + 1),))

    def _contains(self, place: Place) -> tuple[tuple[Conj, Conj, int, int | None], ...]:
        schema = place.schema
        if "contains" not in schema:
            return ()
        child = self._documents.child(place, "contains")
        least = count_of(place, "minContains") if "minContains" in schema else 1
        most = count_of(place, "maxContains") if "maxContains" in schema else None
        if not least and most is None:
            return ()
        if most is not None:
            self._node(breaking(child))  # refuses what cannot be turned around
        return ((satisfying(child), breaking(child), least, most),)

    def _can_hold_unique(self, spec: ArraySpec) -> bool:
        """At most one item, or items of a finite list of strings and numbers."""
        if spec.most is not None and spec.most <= 1:
            return True
        return not spec.prefix and not spec.contains and finite_values(self._node(spec.rest)) is not None
