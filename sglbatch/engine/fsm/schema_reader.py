"""Reads JSON Schema (drafts 7 and 2020-12, and what older ones have in common with them) into nodes.

A node says what is allowed at one place. Keywords that apply to the same value (allOf, $ref, if, ...) are multiplied
out at once; schemas of items and properties stay conjunctions until somebody asks for their node.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.schema_documents import Documents
from sglbatch.engine.fsm.schema_formats import EXACT_FORMATS, FORMATS, UNHELD_FORMATS, format_automaton
from sglbatch.engine.fsm.schema_node import (
    ANY,
    ANY_VALUE,
    NO_VALUE,
    NONE,
    ArraySpec,
    Conj,
    Node,
    ObjectSpec,
    Place,
    node_and,
    node_or,
    of_types,
    require,
)
from sglbatch.engine.fsm.schema_numbers import NumberSet, exact, number_not
from sglbatch.engine.fsm.schema_patterns import pattern_automaton, python_reads
from sglbatch.engine.fsm.schema_texts import ALL_TEXTS, TextSet, text_and, text_not, without_words, words_set
from sglbatch.engine.fsm.stored import AutomatonStore
from sglbatch.errors import ConstraintError, UnsupportedSchemaError

TYPES: Final = ("null", "boolean", "object", "array", "number", "string", "integer")
MAX_COUNT: Final = 1 << 40
_EMPTINESS_DEPTH: Final = 4
"""Levels looked into when two branches of a oneOf are compared."""

_REST: Final = frozenset(TYPES)


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
        self._documents = Documents(document, draft=draft)
        self._formats = formats
        self._unenforced = unenforced
        self._budget = budget
        self._store = store
        self._nodes: dict[Conj, Node] = {}
        self._literals: dict[tuple[Place, bool], Node] = {}
        self._in_draft: dict[Place, Place] = {}
        self._reading: list[tuple[Place, bool]] = []
        self._patterns: dict[str, TextSet | None] = {}
        self._classes: dict[tuple[str, ...], list[tuple[TextSet, tuple[int, ...]]]] = {}
        self._values: dict[tuple[int, str], Place] = {}
        self._empty: dict[tuple[Conj, int], bool] = {}
        self.root: Conj = self._holds(self._documents.root)

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

    # --- one schema ---

    def _literal(self, place: Place, positive: bool) -> Node:
        place = self._in_its_draft(place)
        literal = (place, positive)
        if literal not in self._literals:
            if literal in self._reading:
                raise _invalid(place, "$ref", "the reference leads back to itself without a value in between")
            self._reading.append(literal)
            try:
                self._literals[literal] = self._holding(place) if positive else self._failing(place)
            finally:
                self._reading.pop()
        return self._literals[literal]

    def _in_its_draft(self, place: Place) -> Place:
        """The schema without keywords that came after its draft."""
        later = {keyword for since, words in _LATER.items() if place.draft < since for keyword in words}
        if not later or not isinstance(place.schema, dict) or not later & place.schema.keys():
            return place
        if place not in self._in_draft:
            known = {keyword: value for keyword, value in place.schema.items() if keyword not in later}
            self._in_draft[place] = replace(place, schema=known)
        return self._in_draft[place]

    def _holding(self, place: Place) -> Node:
        schema = place.schema
        if isinstance(schema, bool):
            return ANY if schema else NONE
        if not isinstance(schema, dict):
            raise _invalid(place, None, "a schema is an object, true or false")
        if "$ref" in schema and place.old:
            return self._literal(self._target(place), True)
        found = self._types(place)
        for condition in self._conditions(place):
            if found.is_empty:
                return NONE
            found = node_and(found, condition(), self._budget)
        return found

    def _conditions(self, place: Place) -> Iterator[Callable[[], Node]]:
        """The keywords of a schema, each as what satisfies it; those of other values come last."""
        schema = place.schema
        readers: dict[str, Callable[[Place], Node]] = {
            "enum": lambda p: self._one_of_values(p, "enum"),
            "const": lambda p: self._one_of_values(p, "const"),
            "$ref": lambda p: self._literal(self._target(p), True),
            "allOf": self._all_of,
            "anyOf": self._any_of,
            "oneOf": self._one_of,
            "not": lambda p: self._unless("not", p, lambda: self._literal(self._child(p, "not"), False)),
            "if": lambda p: self._unless("if", p, lambda: self._if(p)),
        }
        numbers, strings = self._numbers(place), self._strings(place, may_leave=True)
        if numbers is not None:
            yield lambda: _only(place, numbers=numbers)
        if strings is not None:
            yield lambda: _only(place, strings=strings)
        if _ARRAY_KEYWORDS & schema.keys():
            yield lambda: self._array(place)
        if _OBJECT_KEYWORDS & schema.keys():
            yield lambda: self._object(place)
        for keyword in ("dependentRequired", "dependencies", "dependentSchemas"):
            if keyword in schema:
                yield from self._dependencies(place, keyword)
        for keyword, reader in readers.items():
            if keyword in schema:
                yield lambda reader=reader: reader(place)  # type: ignore[misc]
        self._refuse_unknown(place)

    def _refuse_unknown(self, place: Place) -> None:
        schema = place.schema
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                raise UnsupportedSchemaError(keyword, place.path, "references by dynamic scope are not followed")
        for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword in schema and schema[keyword] is not True and not self._evaluates_alone(schema, keyword):
                self._leave(place, keyword, f"it depends on other keywords; use {plain} instead")

    def _types(self, place: Place) -> Node:
        types = place.schema.get("type")
        if types is None:
            return ANY
        names = [types] if isinstance(types, str) else types
        if not isinstance(names, list) or any(name not in TYPES for name in names):
            raise _invalid(place, "type", f"it must be one of {', '.join(TYPES)}, or a list of them")
        found = of_types(names)
        if place.schema.get("nullable") is True:  # OpenAPI 3.0
            found = node_or(found, of_types(["null"]))
        return found

    def _unless(self, keyword: str, place: Place, read: Callable[[], Node]) -> Node:
        """Conditions on what must not hold; left to validation where that is allowed."""
        try:
            return read()
        except UnsupportedSchemaError as error:
            if self._unenforced is None:
                raise
            self._unenforced.append(f"{keyword} at {place.path} ({error.keyword})")
            return ANY

    def _leave(self, place: Place, keyword: str, reason: str) -> None:
        if self._unenforced is None:
            raise UnsupportedSchemaError(
                keyword, place.path, reason, hint="--allow-unenforced validates the finished value instead"
            )
        self._unenforced.append(f"{keyword} at {place.path}")

    # --- combinations ---

    def _all_of(self, place: Place) -> Node:
        found = ANY
        for child in self._children(place, "allOf"):
            found = node_and(found, self._literal(child, True), self._budget)
        return found

    def _any_of(self, place: Place) -> Node:
        found = NONE
        for child in self._children(place, "anyOf"):
            found = node_or(found, self._literal(child, True))
        return found

    def _one_of(self, place: Place) -> Node:
        """The branches, each less what the others allow too."""
        children = self._children(place, "oneOf")
        around = self._types(place) if "type" in place.schema else ANY
        found = NONE
        for i, child in enumerate(children):
            branch = node_and(around, self._literal(child, True), self._budget)
            for j, other in enumerate(children):
                if j == i or branch.is_empty:
                    continue
                both = node_and(branch, self._literal(other, True), self._budget)
                if self._is_empty_node(both, _EMPTINESS_DEPTH):
                    continue
                branch = self._less(place, branch, other)
            found = node_or(found, branch)
        return found

    def _less(self, place: Place, branch: Node, other: Place) -> Node:
        try:
            return node_and(branch, self._literal(other, False), self._budget)
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

    def _if(self, place: Place) -> Node:
        schema = place.schema
        if "then" not in schema and "else" not in schema:
            return ANY
        condition = self._child(place, "if")
        then = self._literal(self._child(place, "then"), True) if "then" in schema else ANY
        other = self._literal(self._child(place, "else"), True) if "else" in schema else ANY
        return node_or(
            node_and(self._literal(condition, True), then, self._budget),
            node_and(self._literal(condition, False), other, self._budget),
        )

    # --- values ---

    def _one_of_values(self, place: Place, keyword: str) -> Node:
        values = place.schema["enum"] if keyword == "enum" else [place.schema["const"]]
        if not isinstance(values, list):
            raise _invalid(place, keyword, "it must be a list of values")
        objects = tuple(self._object_value(place, v) for v in values if isinstance(v, dict))
        arrays = tuple(self._array_value(place, v) for v in values if isinstance(v, list))
        numbers = frozenset(exact(v) for v in values if _is_number(v))
        words = words_set(v for v in values if isinstance(v, str))
        return Node(
            null=None in values,
            bools=frozenset(v for v in values if isinstance(v, bool)),
            numbers=(NumberSet(values=numbers),) if numbers else (),
            strings=(words,) if words else (),
            arrays=arrays,
            objects=objects,
        )

    def _object_value(self, place: Place, value: dict[str, Any]) -> ObjectSpec:
        return ObjectSpec(
            props={name: self._value(place, item) for name, item in value.items()},
            required=frozenset(value),
            classes=((ALL_TEXTS, NO_VALUE),),
        )

    def _array_value(self, place: Place, value: list[Any]) -> ArraySpec:
        size = len(value)
        return ArraySpec(prefix=tuple(self._value(place, v) for v in value), rest=NO_VALUE, least=size, most=size)

    def _value(self, place: Place, value: Any) -> Conj:
        key = (id(value), json.dumps(value, sort_keys=True))
        if key not in self._values:
            self._values[key] = Place({"const": value}, place.path, place.base, 2020)
        return self._holds(self._values[key])

    # --- numbers and strings ---

    def _numbers(self, place: Place) -> NumberSet | None:
        schema = place.schema
        found = {k: self._number(place, k) for k in ("minimum", "maximum", "multipleOf") if k in schema}
        low = (found["minimum"], schema.get("exclusiveMinimum") is True) if "minimum" in found else None
        high = (found["maximum"], schema.get("exclusiveMaximum") is True) if "maximum" in found else None
        if "exclusiveMinimum" in schema and not isinstance(schema["exclusiveMinimum"], bool):
            low = max([b for b in (low, (self._number(place, "exclusiveMinimum"), True)) if b])
        if "exclusiveMaximum" in schema and not isinstance(schema["exclusiveMaximum"], bool):
            bounds = [b for b in (high, (self._number(place, "exclusiveMaximum"), True)) if b]
            high = min(bounds, key=lambda b: (b[0], not b[1]))
        step = found.get("multipleOf")
        if step is not None and step <= 0:
            raise _invalid(place, "multipleOf", "it must be above 0")
        if low is None and high is None and step is None:
            return None
        return NumberSet(low=low, high=high, multiples=frozenset([step]) if step is not None else frozenset())

    def _number(self, place: Place, keyword: str) -> Any:
        value = place.schema[keyword]
        if not _is_number(value):
            raise _invalid(place, keyword, "it must be a number")
        return exact(value)

    def _strings(self, place: Place, *, may_leave: bool = False) -> list[TextSet] | None:
        """What keywords say of a text; None where they say nothing.

        Args:
            may_leave: a pattern that cannot be held may be left to validation.
        """
        schema = place.schema
        sets: list[TextSet] = []
        if "minLength" in schema or "maxLength" in schema:
            least = self._count(place, "minLength") if "minLength" in schema else 0
            sets.append(TextSet(least=least, most=self._count(place, "maxLength") if "maxLength" in schema else None))
        if "pattern" in schema:
            pattern = self._pattern_or_left(place) if may_leave else self._pattern(place, schema["pattern"], "pattern")
            if pattern is None:
                return []
            sets.append(pattern)
        if (name := self._format(place)) is not None:
            sets.append(TextSet(base=format_automaton(name)))
        if not sets:
            return None
        joined: TextSet | None = ALL_TEXTS
        for other in sets:
            joined = text_and(joined, other, self._budget) if joined is not None else None
        return [joined] if joined is not None else []

    def _format(self, place: Place) -> str | None:
        """The format that is a condition here; one that the specification does not name only describes."""
        name = place.schema.get("format")
        if not self._formats or not isinstance(name, str):
            return None
        if name in UNHELD_FORMATS and "string" in self._type_names(place):
            self._leave(place, "format", f"no automaton holds {name!r}")
        return name if name in FORMATS else None

    def _type_names(self, place: Place) -> Iterable[str]:
        types = place.schema.get("type", TYPES)
        return [types] if isinstance(types, str) else types

    def _pattern_or_left(self, place: Place) -> TextSet | None:
        try:
            return self._pattern(place, place.schema["pattern"], "pattern")
        except UnsupportedSchemaError as error:
            if not python_reads(place.schema["pattern"]):
                raise  # then validation cannot take its place either
            if self._unenforced is None:
                error.hint = f"{error.hint}; or --allow-unenforced, which validates the finished value instead"
                raise
            self._unenforced.append(f"pattern at {place.path}")
            return ALL_TEXTS

    def _pattern(self, place: Place, pattern: Any, keyword: str) -> TextSet | None:
        if not isinstance(pattern, str):
            raise _invalid(place, keyword, "it must be a regex as text")
        if pattern not in self._patterns:
            try:
                automaton = pattern_automaton(pattern, self._budget, self._store)
            except ConstraintError as error:
                if error.code == "invalid-regex":
                    raise _invalid(place, keyword, error.message) from error
                if error.code == "unsupported-regex":
                    raise UnsupportedSchemaError(keyword, place.path, error.message, hint=error.hint) from error
                raise
            self._patterns[pattern] = None if automaton is None else TextSet(base=automaton)
        return self._patterns[pattern]

    def _count(self, place: Place, keyword: str) -> int:
        value = place.schema[keyword]
        if not _is_number(value) or value < 0 or value != int(value):
            raise _invalid(place, keyword, "it must be a whole number of at least 0")
        return min(int(value), MAX_COUNT)

    # --- arrays ---

    def _array(self, place: Place) -> Node:
        schema = place.schema
        prefix_keyword = "prefixItems" if "prefixItems" in schema else "items"
        listed = isinstance(schema.get(prefix_keyword), list)
        prefix = self._children(place, prefix_keyword, may_be_empty=True) if listed else []
        rest = "additionalItems" if listed and prefix_keyword == "items" else "items"
        if rest not in schema and self._evaluates_alone(schema, "unevaluatedItems"):
            rest = "unevaluatedItems"
        spec = ArraySpec(
            prefix=tuple(self._holds(child) for child in prefix),
            rest=self._holds(self._child(place, rest)) if rest in schema else ANY_VALUE,
            least=self._count(place, "minItems") if "minItems" in schema else 0,
            most=self._count(place, "maxItems") if "maxItems" in schema else None,
            contains=self._contains(place),
            unique=schema.get("uniqueItems") is True,
            path=place.path,
        )
        if spec.unique and not self._can_hold_unique(spec):
            self._leave(place, "uniqueItems", "only lists of a few known values can be kept without repeats")
            spec = replace(spec, unique=False)
        empty = spec.most is not None and spec.least > spec.most
        return _only(place, arrays=[] if empty else [spec])

    def _contains(self, place: Place) -> tuple[tuple[Conj, Conj, int, int | None], ...]:
        schema = place.schema
        if "contains" not in schema:
            return ()
        child = self._child(place, "contains")
        least = self._count(place, "minContains") if "minContains" in schema and not place.old else 1
        most = self._count(place, "maxContains") if "maxContains" in schema and not place.old else None
        if not least and most is None:
            return ()
        opposite: Conj = frozenset([(child, False)])
        if most is not None:
            self.node(opposite)  # refuses what cannot be turned around
        return ((self._holds(child), opposite, least, most),)

    def _can_hold_unique(self, spec: ArraySpec) -> bool:
        """At most one item, or items of a finite list of strings and numbers."""
        if spec.most is not None and spec.most <= 1:
            return True
        return not spec.prefix and not spec.contains and self.finite_values(spec.rest) is not None

    def finite_values(self, conj: Conj) -> list[Any] | None:
        """The values as Python ones, when they are few and no arrays or objects."""
        node = self.node(conj)
        if node.arrays or node.objects or any(n.values is None for n in node.numbers):
            return None
        if any(s.words is None for s in node.strings):
            return None
        words = {w for s in node.strings for w in s.words or ()}
        numbers = {v for n in node.numbers for v in n.values or ()}
        found = [*sorted(words), *sorted(numbers), *sorted(node.bools), *([None] if node.null else [])]
        return found if len(found) <= 64 else None

    # --- objects ---

    def _object(self, place: Place) -> Node:
        schema = place.schema
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise _invalid(place, "properties", "it must be an object of schemas")
        spec = ObjectSpec(
            props={},
            classes=tuple(self._name_classes(place)),
            least=self._count(place, "minProperties") if "minProperties" in schema else 0,
            most=self._count(place, "maxProperties") if "maxProperties" in schema else None,
            path=place.path,
        )
        props: dict[str, Conj] = {}
        for name in properties:
            own = self._holds(self._documents.child(place, "properties", name))
            props[name] = own | self._by_patterns(place, name)
        spec = replace(spec, props=props)
        spec = require(spec, self._names(place, "required"))
        empty = spec.most is not None and max(spec.least, len(spec.required)) > spec.most
        found = _only(place, objects=[] if empty else [spec])
        if "propertyNames" in schema:
            found = node_and(found, self._named_only(place), self._budget)
        return found

    def _names(self, place: Place, keyword: str) -> list[str]:
        names = place.schema.get(keyword, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise _invalid(place, keyword, "it must be a list of names")
        return names

    def _by_patterns(self, place: Place, name: str) -> Conj:
        found: Conj = ANY_VALUE
        for pattern in place.schema.get("patternProperties", {}):
            names = self._pattern(place, pattern, "patternProperties")
            if names is not None and names.holds(name):
                found |= self._holds(self._documents.child(place, "patternProperties", pattern))
        return found

    def _name_classes(self, place: Place) -> Iterator[tuple[TextSet, Conj]]:
        """All names by what they match: the patterns' values, or what is additional."""
        schema = place.schema
        patterns = schema.get("patternProperties", {})
        if not isinstance(patterns, dict):
            raise _invalid(place, "patternProperties", "it must be an object of schemas")
        keyword = "additionalProperties"
        if keyword not in schema and self._evaluates_alone(schema, "unevaluatedProperties"):
            keyword = "unevaluatedProperties"
        rest = self._holds(self._child(place, keyword)) if keyword in schema else ANY_VALUE
        for names, matched in self._partition(place, tuple(patterns)):
            values = [
                self._holds(self._documents.child(place, "patternProperties", list(patterns)[i])) for i in matched
            ]
            yield names, frozenset().union(*values) if values else rest

    def _partition(self, place: Place, patterns: tuple[str, ...]) -> list[tuple[TextSet, tuple[int, ...]]]:
        """All names, in parts by which of the patterns they match."""
        if patterns not in self._classes:
            parts: list[tuple[TextSet, tuple[int, ...]]] = [(ALL_TEXTS, ())]
            for i, pattern in enumerate(patterns):
                names = self._pattern(place, pattern, "patternProperties")
                if names is None:
                    continue
                inside = [(text_and(part, names, self._budget), (*m, i)) for part, m in parts]
                outside = [
                    (text_and(part, other, self._budget), m)
                    for part, m in parts
                    for other in text_not(names, self._budget)
                ]
                parts = [(part, m) for part, m in (*inside, *outside) if part is not None]
            self._classes[patterns] = parts
        return self._classes[patterns]

    def _named_only(self, place: Place) -> Node:
        """Objects whose names all satisfy propertyNames."""
        allowed = self._literal(self._child(place, "propertyNames"), True).strings
        classes: list[tuple[TextSet, Conj]] = []
        rest = [ALL_TEXTS]
        for names in allowed:
            classes += [(both, ANY_VALUE) for part in rest if (both := text_and(part, names, self._budget)) is not None]
            others = text_not(names, self._budget)
            rest = [b for part in rest for o in others if (b := text_and(part, o, self._budget)) is not None]
        classes += [(part, NO_VALUE) for part in _disjoint(rest, self._budget)]
        return _only(place, objects=[ObjectSpec(classes=tuple(classes))])

    def _dependencies(self, place: Place, keyword: str) -> Iterator[Callable[[], Node]]:
        given = place.schema[keyword]
        if not isinstance(given, dict):
            raise _invalid(place, keyword, "it must be an object")
        for name, needed in given.items():
            yield lambda name=name, needed=needed: self._dependency(place, keyword, name, needed)  # type: ignore[misc]

    def _dependency(self, place: Place, keyword: str, name: str, needed: Any) -> Node:
        without = _only(place, objects=[ObjectSpec(props={name: NO_VALUE})])
        present = ObjectSpec(props={name: ANY_VALUE}, required=frozenset([name]))
        if isinstance(needed, list):
            if not all(isinstance(n, str) for n in needed):
                raise _invalid(place, keyword, "it must list names")
            return node_or(without, Node(objects=(require(present, needed),)))
        having = self._literal(self._documents.child(place, keyword, name), True)
        return node_or(without, node_and(Node(objects=(present,)), having, self._budget))

    # --- what does not satisfy a schema ---

    def _failing(self, place: Place) -> Node:
        schema = place.schema
        if isinstance(schema, bool):
            return NONE if schema else ANY
        if not isinstance(schema, dict):
            raise _invalid(place, None, "a schema is an object, true or false")
        if "$ref" in schema and place.old:
            return self._literal(self._target(place), False)
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
            yield self._other_types(place)
        if "enum" in schema or "const" in schema:
            yield self._other_values(place)
        numbers = self._numbers(place)
        if numbers is not None:
            yield Node(numbers=tuple(number_not(numbers)))
        yield from self._failing_strings(place)
        yield from self._failing_arrays(place)
        yield from self._failing_objects(place)
        if "$ref" in schema:
            yield self._literal(self._target(place), False)
        if "not" in schema:
            yield self._literal(self._child(place, "not"), True)
        for child in self._children(place, "allOf") if "allOf" in schema else ():
            yield self._literal(child, False)
        if "anyOf" in schema:
            found = ANY
            for child in self._children(place, "anyOf"):
                found = node_and(found, self._literal(child, False), self._budget)
            yield found
        if "oneOf" in schema:
            yield from self._none_or_two(self._children(place, "oneOf"))
        if "if" in schema:
            yield from self._failing_if(place)

    def _none_or_two(self, children: list[Place]) -> Iterator[Node]:
        none = ANY
        for i, child in enumerate(children):
            none = node_and(none, self._literal(child, False), self._budget)
            for other in children[:i]:
                yield node_and(self._literal(child, True), self._literal(other, True), self._budget)
        yield none

    def _failing_if(self, place: Place) -> Iterator[Node]:
        condition = self._child(place, "if")
        for keyword, holds in (("then", True), ("else", False)):
            if keyword in place.schema:
                wrong = self._literal(self._child(place, keyword), False)
                yield node_and(self._literal(condition, holds), wrong, self._budget)

    def _other_types(self, place: Place) -> Node:
        names = set(self._type_names(place))
        self._types(place)
        found = of_types(_REST - names - {"number", "integer"})
        if "number" in names:
            return found
        others = NumberSet(integer=False) if "integer" in names else NumberSet()
        return node_or(found, Node(numbers=(others,)))

    def _other_values(self, place: Place) -> Node:
        found = ANY
        for keyword in ("enum", "const"):
            if keyword in place.schema:
                values = place.schema["enum"] if keyword == "enum" else [place.schema["const"]]
                found = node_and(found, self._other_than(place, self._one_of_values(place, keyword)), self._budget)
                for value in values:
                    if isinstance(value, list | dict):
                        found = node_and(found, self._unlike(place, value), self._budget)
        return found

    @staticmethod
    def _other_than(place: Place, same: Node) -> Node:
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

    def _unlike(self, place: Place, value: Any) -> Node:
        """Everything but one array or one object."""

        def other(item: Any) -> Conj:
            return frozenset((known, False) for known, _ in self._value(place, item))

        if isinstance(value, list):
            size = len(value)
            arrays = [ArraySpec(least=size + 1)] + ([ArraySpec(most=size - 1)] if size else [])
            for i, item in enumerate(value):
                arrays.append(ArraySpec(prefix=(*(ANY_VALUE,) * i, other(item)), least=i + 1))
            return _only(place, arrays=arrays)
        objects = [ObjectSpec(needs=((TextSet(excluded=frozenset(value)), ANY_VALUE),))]
        for name, item in value.items():
            objects.append(ObjectSpec(props={name: NO_VALUE}))
            objects.append(ObjectSpec(props={name: other(item)}, required=frozenset([name])))
        return _only(place, objects=objects)

    def _failing_strings(self, place: Place) -> Iterator[Node]:
        name = self._format(place)
        if name is not None and name not in EXACT_FORMATS:
            raise UnsupportedSchemaError("format", place.path, f"what is not in format {name!r} cannot be told exactly")
        sets = self._strings(place)
        if sets is None:
            return
        others = [ALL_TEXTS] if not sets else text_not(sets[0], self._budget)
        yield Node(strings=tuple(others))

    def _failing_arrays(self, place: Place) -> Iterator[Node]:
        schema = place.schema
        if "minItems" in schema and (least := self._count(place, "minItems")):
            yield Node(arrays=(ArraySpec(most=least - 1),))
        if "maxItems" in schema:
            yield Node(arrays=(ArraySpec(least=self._count(place, "maxItems") + 1),))
        if "contains" in schema:
            yield Node(arrays=(ArraySpec(rest=frozenset([(self._child(place, "contains"), False)])),))
        if "prefixItems" not in schema and isinstance(schema.get("items"), list):
            yield from self._failing_prefix(self._children(place, "items", may_be_empty=True))
        if "prefixItems" in schema:
            yield from self._failing_prefix(self._children(place, "prefixItems", may_be_empty=True))
            if "items" in schema:
                raise UnsupportedSchemaError("items", place.path, "what breaks it behind prefixItems")
        elif isinstance(schema.get("items"), dict | bool):
            child = self._child(place, "items")
            wrong: Conj = frozenset([(child, False)])
            yield Node(arrays=(ArraySpec(contains=((wrong, self._holds(child), 1, None),)),))

    @staticmethod
    def _failing_prefix(children: list[Place]) -> Iterator[Node]:
        for i, child in enumerate(children):
            wrong: Conj = frozenset([(child, False)])
            yield Node(arrays=(ArraySpec(prefix=(*(ANY_VALUE,) * i, wrong), least=i + 1),))

    def _failing_objects(self, place: Place) -> Iterator[Node]:
        schema = place.schema
        for name in self._names(place, "required"):
            yield Node(objects=(ObjectSpec(props={name: NO_VALUE}),))
        if "minProperties" in schema and (least := self._count(place, "minProperties")):
            yield Node(objects=(ObjectSpec(most=least - 1),))
        if "maxProperties" in schema:
            yield Node(objects=(ObjectSpec(least=self._count(place, "maxProperties") + 1),))
        for name in schema.get("properties", {}):
            child = self._documents.child(place, "properties", name)
            wrong: Conj = frozenset([(child, False)])
            yield Node(objects=(ObjectSpec(props={name: wrong}, required=frozenset([name])),))
        yield from self._failing_names(place)
        yield from self._failing_dependencies(place)

    def _failing_names(self, place: Place) -> Iterator[Node]:
        """Objects with a property that its pattern, additionalProperties or propertyNames does not allow."""
        schema = place.schema
        patterns = tuple(schema.get("patternProperties", {}))
        for pattern in patterns:
            names = self._pattern(place, pattern, "patternProperties")
            if names is not None:
                wrong = frozenset([(self._documents.child(place, "patternProperties", pattern), False)])
                yield Node(objects=(ObjectSpec(needs=((names, wrong),)),))
        if "additionalProperties" in schema:
            wrong = frozenset([(self._child(place, "additionalProperties"), False)])
            for part, matched in self._partition(place, patterns):
                known = schema.get("properties", {})
                names = None if matched else without_words(part, known, self._budget)
                if names is not None:
                    yield Node(objects=(ObjectSpec(needs=((names, wrong),)),))
        if "propertyNames" in schema:
            for names in self._literal(self._child(place, "propertyNames"), False).strings:
                yield Node(objects=(ObjectSpec(needs=((names, ANY_VALUE),)),))

    def _failing_dependencies(self, place: Place) -> Iterator[Node]:
        for keyword in ("dependentRequired", "dependencies", "dependentSchemas"):
            for name, needed in place.schema.get(keyword, {}).items():
                if isinstance(needed, list):
                    for other in needed:
                        if other != name:
                            props = {name: ANY_VALUE, other: NO_VALUE}
                            yield Node(objects=(ObjectSpec(props=props, required=frozenset([name])),))
                else:
                    present = Node(objects=(ObjectSpec(props={name: ANY_VALUE}, required=frozenset([name])),))
                    wrong = self._literal(self._documents.child(place, keyword, name), False)
                    yield node_and(present, wrong, self._budget)

    # --- emptiness ---

    def _is_empty_node(self, node: Node, depth: int) -> bool:
        """Surely no value; False where that takes a deeper look."""
        if node.null or node.bools or node.numbers or node.strings:
            return False
        arrays = all(self._is_empty_array(spec, depth) for spec in node.arrays)
        return arrays and all(self._is_empty_object(spec, depth) for spec in node.objects)

    def _is_empty_array(self, spec: ArraySpec, depth: int) -> bool:
        return any(self.is_surely_empty(spec.item(i), depth - 1) for i in range(min(spec.least, 16)))

    def _is_empty_object(self, spec: ObjectSpec, depth: int) -> bool:
        return any(self.is_surely_empty(spec.props[name], depth - 1) for name in spec.required)

    def is_surely_empty(self, conj: Conj, depth: int) -> bool:
        if not conj or depth <= 0:
            return False
        key = (conj, depth)
        if key not in self._empty:
            self._empty[key] = self._is_empty_node(self.node(conj), depth)
        return self._empty[key]

    # --- places ---

    @staticmethod
    def _holds(place: Place) -> Conj:
        if place.schema is True or place.schema == {}:
            return ANY_VALUE
        return NO_VALUE if place.schema is False else frozenset([(place, True)])

    def _child(self, place: Place, keyword: str) -> Place:
        return self._documents.child(place, keyword)

    def _children(self, place: Place, keyword: str, *, may_be_empty: bool = False) -> list[Place]:
        schemas = place.schema[keyword]
        if not isinstance(schemas, list) or not (schemas or may_be_empty):
            raise _invalid(place, keyword, "it must be a list of schemas")
        return [self._documents.child(place, keyword, i) for i in range(len(schemas))]

    def _target(self, place: Place) -> Place:
        return self._documents.resolve(place)

    def _evaluates_alone(self, schema: dict[str, Any], keyword: str) -> bool:
        """An unevaluated... keyword that no keyword beside it feeds from deeper down."""
        return (
            keyword in schema
            and not (_IN_PLACE & schema.keys())
            and not (keyword == "unevaluatedItems" and "contains" in schema)
        )


_LATER: Final = {
    6: ("const", "contains", "propertyNames"),
    7: ("if",),
    2020: ("dependentRequired", "dependentSchemas", "prefixItems", "unevaluatedItems", "unevaluatedProperties"),
}
"""Draft -> keywords that are none before it."""

_IN_PLACE: Final = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies"}
)
_ARRAY_KEYWORDS: Final = frozenset(
    {"items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems", "unevaluatedItems"}
)
_OBJECT_KEYWORDS: Final = frozenset(
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
_NOT_TURNED: Final = frozenset(
    {"uniqueItems", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "minContains", "maxContains"}
)
"""Keywords whose opposite is not written out."""


def _only(
    place: Place,
    *,
    numbers: NumberSet | None = None,
    strings: list[TextSet] | None = None,
    arrays: list[ArraySpec] | None = None,
    objects: list[ObjectSpec] | None = None,
) -> Node:
    """Any value, but of one type only these."""
    return Node(
        null=True,
        bools=ANY.bools,
        numbers=ANY.numbers if numbers is None else (numbers,),
        strings=ANY.strings if strings is None else tuple(strings),
        arrays=ANY.arrays if arrays is None else tuple(arrays),
        objects=ANY.objects if objects is None else tuple(objects),
    )


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _invalid(place: Place, keyword: str | None, message: str) -> ConstraintError:
    where = place.path if keyword is None else f"{place.path}/{keyword}"
    return ConstraintError("invalid-schema", f"{where}: {message}", hint="correct the schema")
