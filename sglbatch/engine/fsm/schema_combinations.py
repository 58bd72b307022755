"""What a schema says by other schemas of the same value: $ref, allOf, anyOf, oneOf, not, if."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.schema_documents import Documents
from sglbatch.engine.fsm.schema_emptiness import Emptiness
from sglbatch.engine.fsm.schema_keywords import types_of
from sglbatch.engine.fsm.schema_node import ANY, NONE, Node, NodeOf, Place, node_and, node_or
from sglbatch.errors import UnsupportedSchemaError


class CombinationReader:
    """Reads the keywords that combine schemas.

    Args:
        node_of: reads a place's schema.
        unenforced: see ``SchemaReader``.
    """

    def __init__(
        self,
        documents: Documents,
        node_of: NodeOf,
        emptiness: Emptiness,
        *,
        budget: Budget,
        unenforced: list[str] | None,
    ) -> None:
        self._documents = documents
        self._node_of = node_of
        self._emptiness = emptiness
        self._budget = budget
        self._unenforced = unenforced

    def allowed(self, place: Place) -> Iterator[Callable[[], Node]]:
        """For each keyword, what satisfies it."""
        readers: dict[str, Callable[[Place], Node]] = {
            "$ref": lambda p: self.referred(p, True),
            "allOf": self._all_of,
            "anyOf": self._any_of,
            "oneOf": self._one_of,
            "not": lambda p: self._unless(p, "not", self._not),
            "if": lambda p: self._unless(p, "if", self._if),
        }
        for keyword, reader in readers.items():
            if keyword in place.schema:
                yield partial(reader, place)

    def referred(self, place: Place, positive: bool) -> Node:
        """What satisfies the schema that ``$ref`` points at, or what breaks it."""
        return self._node_of(self._documents.resolve(place), positive)

    def _all_of(self, place: Place) -> Node:
        found = ANY
        for child in self._documents.children(place, "allOf"):
            found = node_and(found, self._node_of(child, True), self._budget)
        return found

    def _any_of(self, place: Place) -> Node:
        found = NONE
        for child in self._documents.children(place, "anyOf"):
            found = node_or(found, self._node_of(child, True))
        return found

    def _one_of(self, place: Place) -> Node:
        """The branches, each less what the others allow too."""
        children = self._documents.children(place, "oneOf")
        around = types_of(place)
        found = NONE
        for i, child in enumerate(children):
            branch = node_and(around, self._node_of(child, True), self._budget)
            for other in (*children[:i], *children[i + 1 :]):
                if branch.is_empty:
                    break
                both = node_and(branch, self._node_of(other, True), self._budget)
                if not self._emptiness.holds(both):
                    branch = self._less(place, branch, other)
            found = node_or(found, branch)
        return found

    def _less(self, place: Place, branch: Node, other: Place) -> Node:
        try:
            return node_and(branch, self._node_of(other, False), self._budget)
        except UnsupportedSchemaError as error:
            if self._unenforced is not None:
                self._unenforced.append(f"oneOf at {place.path}")
                return branch
            raise UnsupportedSchemaError(
                "oneOf",
                place.path,
                f"its branches overlap, and {error.keyword} at {error.path} cannot be turned around",
                hint="use anyOf, or tell the branches apart by a const property",
            ) from error

    def _unless(self, place: Place, keyword: str, read: Callable[[Place], Node]) -> Node:
        """Conditions on what must not hold; left to validation where that is allowed."""
        try:
            return read(place)
        except UnsupportedSchemaError as error:
            if self._unenforced is None:
                raise
            self._unenforced.append(f"{keyword} at {place.path} ({error.keyword})")
            return ANY

    def _not(self, place: Place) -> Node:
        return self._node_of(self._documents.child(place, "not"), False)

    def _if(self, place: Place) -> Node:
        schema = place.schema
        if "then" not in schema and "else" not in schema:
            return ANY
        condition = self._documents.child(place, "if")
        then = self._node_of(self._documents.child(place, "then"), True) if "then" in schema else ANY
        other = self._node_of(self._documents.child(place, "else"), True) if "else" in schema else ANY
        return node_or(
            node_and(self._node_of(condition, True), then, self._budget),
            node_and(self._node_of(condition, False), other, self._budget),
        )

    # --- what does not satisfy them ---

    def failing(self, place: Place) -> Iterator[Node]:
        """For each keyword, the values that break it."""
        schema = place.schema
        if "$ref" in schema:
            yield self.referred(place, False)
        if "not" in schema:
            yield self._node_of(self._documents.child(place, "not"), True)
        for child in self._documents.children(place, "allOf") if "allOf" in schema else ():
            yield self._node_of(child, False)
        if "anyOf" in schema:
            found = ANY
            for child in self._documents.children(place, "anyOf"):
                found = node_and(found, self._node_of(child, False), self._budget)
            yield found
        if "oneOf" in schema:
            yield from self._none_or_two(self._documents.children(place, "oneOf"))
        if "if" in schema:
            yield from self._failing_if(place)

    def _none_or_two(self, children: list[Place]) -> Iterator[Node]:
        none = ANY
        for i, child in enumerate(children):
            none = node_and(none, self._node_of(child, False), self._budget)
            for other in children[:i]:
                yield node_and(self._node_of(child, True), self._node_of(other, True), self._budget)
        yield none

    def _failing_if(self, place: Place) -> Iterator[Node]:
        condition = self._documents.child(place, "if")
        for keyword, holds in (("then", True), ("else", False)):
            if keyword in place.schema:
                wrong = self._node_of(self._documents.child(place, keyword), False)
                yield node_and(self._node_of(condition, holds), wrong, self._budget)
