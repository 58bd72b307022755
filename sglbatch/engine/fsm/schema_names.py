"""What a schema says of the property names that it does not list: patterns, what is additional, propertyNames."""

from __future__ import annotations

from collections.abc import Iterator

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.schema_documents import Documents
from sglbatch.engine.fsm.schema_keywords import evaluates_alone
from sglbatch.engine.fsm.schema_node import (
    ANY_VALUE,
    NO_VALUE,
    Conj,
    Node,
    NodeOf,
    ObjectSpec,
    Place,
    breaking,
    only,
    satisfying,
)
from sglbatch.engine.fsm.schema_strings import StringReader
from sglbatch.engine.fsm.schema_texts import ALL_TEXTS, TextSet, text_and, text_not, without_words


class NameReader:
    """Reads patternProperties, additionalProperties and propertyNames; ``node_of`` reads a place's schema."""

    def __init__(self, documents: Documents, node_of: NodeOf, strings: StringReader, budget: Budget) -> None:
        self._documents = documents
        self._node_of = node_of
        self._strings = strings
        self._budget = budget
        self._parts: dict[tuple[str, ...], list[tuple[TextSet, tuple[int, ...]]]] = {}

    def by_patterns(self, place: Place, name: str) -> Conj:
        """What the patterns that match ``name`` say of its value."""
        found: Conj = ANY_VALUE
        for pattern in place.schema.get("patternProperties", {}):
            names = self._strings.pattern(place, pattern, "patternProperties")
            if names is not None and names.holds(name):
                found |= satisfying(self._documents.child(place, "patternProperties", pattern))
        return found

    def classes(self, place: Place) -> Iterator[tuple[TextSet, Conj]]:
        """All names by what they match: the patterns' values, or what is additional."""
        schema = place.schema
        patterns = schema.get("patternProperties", {})
        keyword = "additionalProperties"
        if keyword not in schema and evaluates_alone(schema, "unevaluatedProperties"):
            keyword = "unevaluatedProperties"
        rest = satisfying(self._documents.child(place, keyword)) if keyword in schema else ANY_VALUE
        values = [satisfying(self._documents.child(place, "patternProperties", pattern)) for pattern in patterns]
        for names, matched in self._partition(place, tuple(patterns)):
            yield names, frozenset().union(*(values[i] for i in matched)) if matched else rest

    def named_only(self, place: Place) -> Node:
        """Any value, but of objects only those whose names all satisfy propertyNames."""
        allowed = self._node_of(self._documents.child(place, "propertyNames"), True).strings
        classes: list[tuple[TextSet, Conj]] = []
        rest = [ALL_TEXTS]
        for names in allowed:
            classes += [(both, ANY_VALUE) for part in rest if (both := text_and(part, names, self._budget)) is not None]
            others = text_not(names, self._budget)
            rest = [b for part in rest for o in others if (b := text_and(part, o, self._budget)) is not None]
        classes += [(part, NO_VALUE) for part in _disjoint(rest, self._budget)]
        return only(objects=[ObjectSpec(classes=tuple(classes))])

    def failing(self, place: Place) -> Iterator[Node]:
        """Objects with a property that its pattern, additionalProperties or propertyNames does not allow."""
        schema = place.schema
        patterns = tuple(schema.get("patternProperties", {}))
        for pattern in patterns:
            names = self._strings.pattern(place, pattern, "patternProperties")
            if names is not None:
                wrong = breaking(self._documents.child(place, "patternProperties", pattern))
                yield Node(objects=(ObjectSpec(needs=((names, wrong),)),))
        if "additionalProperties" in schema:
            wrong = breaking(self._documents.child(place, "additionalProperties"))
            known = schema.get("properties", {})
            for part, matched in self._partition(place, patterns):
                names = None if matched else without_words(part, known, self._budget)
                if names is not None:
                    yield Node(objects=(ObjectSpec(needs=((names, wrong),)),))
        if "propertyNames" in schema:
            for names in self._node_of(self._documents.child(place, "propertyNames"), False).strings:
                yield Node(objects=(ObjectSpec(needs=((names, ANY_VALUE),)),))

    def _partition(self, place: Place, patterns: tuple[str, ...]) -> list[tuple[TextSet, tuple[int, ...]]]:
        """All names, in parts by which of the patterns they match."""
        if patterns not in self._parts:
            parts: list[tuple[TextSet, tuple[int, ...]]] = [(ALL_TEXTS, ())]
            for i, pattern in enumerate(patterns):
                names = self._strings.pattern(place, pattern, "patternProperties")
                if names is None:
                    continue
                inside = [(text_and(part, names, self._budget), (*m, i)) for part, m in parts]
                outside = [
                    (text_and(part, other, self._budget), m)
                    for part, m in parts
                    for other in text_not(names, self._budget)
                ]
                parts = [(part, m) for part, m in (*inside, *outside) if part is not None]
            self._parts[patterns] = parts
        return self._parts[patterns]


def _disjoint(parts: list[TextSet], budget: Budget) -> list[TextSet]:
    """The same texts in parts that do not overlap."""
    found: list[TextSet] = []
    for part in parts:
        pieces = [part]
        for earlier in found:
            others = text_not(earlier, budget)
            pieces = [b for piece in pieces for o in others if (b := text_and(piece, o, budget)) is not None]
        found += pieces
    return found
