"""Reads JSON Schema (drafts 7 and 2020-12, and what older ones have in common with them) into nodes.

A node says what is allowed at one place. Keywords that apply to the same value (allOf, $ref, if, ...) are multiplied
out at once; schemas of items and properties stay conjunctions until somebody asks for their node. What the keywords
of one kind say, and what breaks them, is read by a module of its own: ``schema_enums``, ``_strings``, ``_arrays``,
``_objects``, ``_names``, ``_combinations``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.schema_arrays import ARRAY_KEYWORDS, ArrayReader
from sglbatch.engine.fsm.schema_combinations import CombinationReader
from sglbatch.engine.fsm.schema_documents import Documents
from sglbatch.engine.fsm.schema_emptiness import Emptiness
from sglbatch.engine.fsm.schema_enums import EnumReader
from sglbatch.engine.fsm.schema_keywords import (
    TYPES,
    evaluates_alone,
    invalid,
    leave,
    numbers_of,
    type_names,
    types_of,
)
from sglbatch.engine.fsm.schema_names import NameReader
from sglbatch.engine.fsm.schema_node import ANY, NONE, Conj, Node, Place, node_and, node_or, of_types, only, satisfying
from sglbatch.engine.fsm.schema_numbers import NumberSet, number_not
from sglbatch.engine.fsm.schema_objects import OBJECT_KEYWORDS, ObjectReader
from sglbatch.engine.fsm.schema_shapes import Shapes
from sglbatch.engine.fsm.schema_strings import StringReader
from sglbatch.engine.fsm.stored import AutomatonStore
from sglbatch.errors import UnsupportedSchemaError

_NOT_TURNED: Final = frozenset(
    {"uniqueItems", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "minContains", "maxContains"}
)
"""Keywords whose opposite is not written out."""


class SchemaReader:
    """The nodes of one schema document.

    Args:
        draft: see ``Documents``.
        formats: ``format`` is a condition; else it only describes, as the specification's default is.
        unenforced: collects "keyword at path" of what is left to validation; None refuses it.
        store: keeps the automata of patterns.
    """

    def __init__(
        self,
        document: Any,
        *,
        draft: int,
        formats: bool,
        unenforced: list[str] | None,
        budget: Budget,
        store: AutomatonStore | None = None,
    ) -> None:
        self._documents = documents = Documents(document, draft=draft)
        self._shapes = Shapes(documents)
        self._shapes.check(documents.root)
        self._unenforced = unenforced
        self._budget = budget
        self._nodes: dict[Conj, Node] = {}
        self._literals: dict[tuple[Place, bool], Node] = {}
        self._reading: list[tuple[Place, bool]] = []
        self._enums = EnumReader(budget)
        self._strings = StringReader(formats=formats, unenforced=unenforced, budget=budget, store=store)
        self._arrays = ArrayReader(documents, self.node, unenforced=unenforced)
        names = NameReader(documents, self._literal, self._strings, budget)
        self._objects = ObjectReader(documents, self._literal, names, budget)
        self._combinations = CombinationReader(
            documents, self._literal, Emptiness(self.node), budget=budget, unenforced=unenforced
        )
        self.root: Conj = satisfying(documents.root)

    def node(self, conj: Conj) -> Node:
        """What satisfies every schema of ``conj``.

        Raises ConstraintError: invalid-schema, constraint-too-large; UnsupportedSchemaError.
        """
        if conj not in self._nodes:
            found = ANY
            for place, positive in sorted(conj, key=lambda literal: (literal[0].path, not literal[1])):
                found = node_and(found, self._literal(place, positive), self._budget)
            self._budget.spend(200)
            self._nodes[conj] = found
        return self._nodes[conj]

    def _literal(self, place: Place, positive: bool) -> Node:
        """What satisfies one schema, or what breaks it."""
        place = self._documents.in_its_draft(place)
        literal = (place, positive)
        if literal not in self._literals:
            self._shapes.check(place)  # what a reference points at may stand where no schema is looked for
            if literal in self._reading:
                raise invalid(place, "$ref", "the reference leads back to itself without a value in between")
            self._reading.append(literal)
            try:
                self._literals[literal] = self._read(place, positive)
            finally:
                self._reading.pop()
        return self._literals[literal]

    def _read(self, place: Place, positive: bool) -> Node:
        schema = place.schema
        if isinstance(schema, bool):
            return ANY if schema is positive else NONE
        if "$ref" in schema and place.old:
            return self._combinations.referred(place, positive)
        return self._satisfying(place) if positive else self._breaking(place)

    # --- what satisfies a schema ---

    def _satisfying(self, place: Place) -> Node:
        found = types_of(place)
        for condition in self._conditions(place):
            if found.is_empty:
                return NONE
            found = node_and(found, condition(), self._budget)
        return found

    def _conditions(self, place: Place) -> Iterator[Callable[[], Node]]:
        """The keywords of a schema, each as what satisfies it; those of other values come last."""
        schema = place.schema
        numbers, strings = numbers_of(place), self._strings.allowed(place, may_leave=True)
        if numbers is not None:
            yield partial(only, numbers=[numbers])
        if strings is not None:
            yield partial(only, strings=strings)
        if ARRAY_KEYWORDS & schema.keys():
            yield partial(self._arrays.allowed, place)
        if OBJECT_KEYWORDS & schema.keys():
            yield partial(self._objects.allowed, place)
        yield from self._objects.dependencies(place)
        for keyword in ("enum", "const"):
            if keyword in schema:
                yield partial(self._enums.allowed, place, keyword)
        yield from self._combinations.allowed(place)
        self._refuse_unknown(place)

    def _refuse_unknown(self, place: Place) -> None:
        schema = place.schema
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                raise UnsupportedSchemaError(keyword, place.path, "references by dynamic scope are not followed")
        for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword in schema and schema[keyword] is not True and not evaluates_alone(schema, keyword):
                leave(self._unenforced, place, keyword, f"it depends on other keywords; use {plain} instead")

    # --- what breaks it ---

    def _breaking(self, place: Place) -> Node:
        self._refuse_unknown(place)
        found = NONE
        for part in self._failures(place):
            found = node_or(found, part)
        return found

    def _failures(self, place: Place) -> Iterator[Node]:
        """For each keyword, the values that break it."""
        schema = place.schema
        for keyword in sorted(_NOT_TURNED & schema.keys()):
            raise UnsupportedSchemaError(keyword, place.path, "what breaks it cannot be enforced")
        if "type" in schema:
            yield _other_types(place)
        if "enum" in schema or "const" in schema:
            yield self._enums.failing(place)
        numbers = numbers_of(place)
        if numbers is not None:
            yield Node(numbers=tuple(number_not(numbers)))
        yield from self._strings.failing(place)
        yield from self._arrays.failing(place)
        yield from self._objects.failing(place)
        yield from self._combinations.failing(place)


def _other_types(place: Place) -> Node:
    names = set(type_names(place))
    found = of_types(set(TYPES) - names - {"number", "integer"})
    if "number" in names:
        return found
    others = NumberSet(integer=False) if "integer" in names else NumberSet()
    return node_or(found, Node(numbers=(others,)))
