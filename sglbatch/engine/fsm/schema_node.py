"""What a schema allows at one place, by JSON type: a union of simple conditions, closed under "and" and "or".

The values inside arrays and objects stay unread ("conjunctions" of schemas), so that recursive schemas are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.schema_numbers import ALL_NUMBERS, NumberSet, number_and
from sglbatch.engine.fsm.schema_texts import ALL_TEXTS, TextSet, text_and
from sglbatch.errors import ConstraintError

MAX_ALTERNATIVES: Final = 256
"""Alternatives of one type at one place; more come only from schemas that multiply out."""


@dataclass(frozen=True, eq=False)
class Place:
    """A schema at its place in a document. Compared by identity: the reader keeps one for each place.

    Args:
        path: JSON pointer fragment.
        base: URI that relative references start from.
        draft: 4, 6, 7 or 2020.
    """

    schema: Any
    path: str
    base: str
    draft: int

    @property
    def old(self) -> bool:
        """``$ref`` hides its siblings."""
        return self.draft <= 7


Conj: TypeAlias = frozenset[tuple[Place, bool]]
"""Schemas that a value must satisfy (True) or must not satisfy (False), all at once; empty: any value."""

ANY_VALUE: Final[Conj] = frozenset()
_NEVER: Final = Place(False, "#", "", 2020)
NO_VALUE: Final[Conj] = frozenset([(_NEVER, True)])


def satisfying(place: Place) -> Conj:
    """The values that satisfy one schema."""
    if place.schema is True or place.schema == {}:
        return ANY_VALUE
    return NO_VALUE if place.schema is False else frozenset([(place, True)])


def breaking(place: Place) -> Conj:
    """The values that do not satisfy it."""
    return frozenset([(place, False)])


@dataclass(frozen=True, eq=False)
class ArraySpec:
    """Arrays: ``prefix`` for the first items, ``rest`` for the others.

    Args:
        least, most: number of items.
        contains: (condition, its opposite or None, least, most): how many items must satisfy the condition.
        unique: no two items are equal.
    """

    prefix: tuple[Conj, ...] = ()
    rest: Conj = ANY_VALUE
    least: int = 0
    most: int | None = None
    contains: tuple[tuple[Conj, Conj, int, int | None], ...] = ()
    unique: bool = False
    path: str = "#"

    def item(self, index: int) -> Conj:
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True, eq=False)
class ObjectSpec:
    """Objects.

    Args:
        props: what each known name holds, in the order in which they are written.
        required: names that must be there; each is among ``props``.
        classes: what the other names hold; together the classes are all names, and no name is in two.
        least, most: number of properties.
        needs: (names, value): for each, some property has such a name and such a value.
    """

    props: dict[str, Conj] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    classes: tuple[tuple[TextSet, Conj], ...] = ((ALL_TEXTS, ANY_VALUE),)
    least: int = 0
    most: int | None = None
    needs: tuple[tuple[TextSet, Conj], ...] = ()
    path: str = "#"

    def value_of(self, name: str) -> Conj:
        if name in self.props:
            return self.props[name]
        return next(value for names, value in self.classes if names.holds(name))


@dataclass(frozen=True, eq=False)
class Node:
    """The allowed values: any of these."""

    null: bool = False
    bools: frozenset[bool] = frozenset()
    numbers: tuple[NumberSet, ...] = ()
    strings: tuple[TextSet, ...] = ()
    arrays: tuple[ArraySpec, ...] = ()
    objects: tuple[ObjectSpec, ...] = ()

    @property
    def is_empty(self) -> bool:
        """No value at all, as far as this place alone says."""
        return not (self.null or self.bools or self.numbers or self.strings or self.arrays or self.objects)


ANY: Final = Node(
    null=True,
    bools=frozenset([True, False]),
    numbers=(ALL_NUMBERS,),
    strings=(ALL_TEXTS,),
    arrays=(ArraySpec(),),
    objects=(ObjectSpec(),),
)
NONE: Final = Node()


def of_types(types: Iterable[str]) -> Node:
    """Every value of these types of JSON Schema."""
    names = set(types)
    numbers = {"number", "integer"} & names
    return Node(
        null="null" in names,
        bools=ANY.bools if "boolean" in names else frozenset(),
        numbers=(() if not numbers else (ALL_NUMBERS,) if "number" in numbers else (NumberSet(integer=True),)),
        strings=ANY.strings if "string" in names else (),
        arrays=ANY.arrays if "array" in names else (),
        objects=ANY.objects if "object" in names else (),
    )


NodeOf: TypeAlias = Callable[[Place, bool], Node]
"""Reads one schema: what satisfies it (True), or what breaks it (False)."""


def only(
    *,
    numbers: Iterable[NumberSet] = ANY.numbers,
    strings: Iterable[TextSet] = ANY.strings,
    arrays: Iterable[ArraySpec] = ANY.arrays,
    objects: Iterable[ObjectSpec] = ANY.objects,
) -> Node:
    """Any value, but of the types that are given only these."""
    return Node(
        null=True,
        bools=ANY.bools,
        numbers=tuple(numbers),
        strings=tuple(strings),
        arrays=tuple(arrays),
        objects=tuple(objects),
    )


def finite_values(node: Node) -> list[Any] | None:
    """The values as Python ones, when they are few and no arrays or objects."""
    if node.arrays or node.objects or any(n.values is None for n in node.numbers):
        return None
    if any(s.words is None for s in node.strings):
        return None
    words = {w for s in node.strings for w in s.words or ()}
    numbers = {v for n in node.numbers for v in n.values or ()}
    found = [*sorted(words), *sorted(numbers), *sorted(node.bools), *([None] if node.null else [])]
    return found if len(found) <= 64 else None


T = TypeVar("T")


def node_and(a: Node, b: Node, budget: Budget) -> Node:
    """The values of both. Raises ConstraintError (constraint-too-large)."""
    if a is ANY:
        return b
    if b is ANY:
        return a
    return Node(
        null=a.null and b.null,
        bools=a.bools & b.bools,
        numbers=_pairs(a.numbers, b.numbers, number_and),
        strings=_pairs(a.strings, b.strings, lambda x, y: text_and(x, y, budget)),
        arrays=_pairs(a.arrays, b.arrays, _array_and),
        objects=_pairs(a.objects, b.objects, lambda x, y: _object_and(x, y, budget)),
    )


def node_or(a: Node, b: Node) -> Node:
    """The values of either."""
    if a is ANY or b is ANY:
        return ANY
    return Node(
        null=a.null or b.null,
        bools=a.bools | b.bools,
        numbers=_union(a.numbers, b.numbers, ALL_NUMBERS),
        strings=_union(a.strings, b.strings, ALL_TEXTS),
        arrays=_union(a.arrays, b.arrays, ANY.arrays[0]),
        objects=_union(a.objects, b.objects, ANY.objects[0]),
    )


def _union(a: tuple[T, ...], b: tuple[T, ...], everything: T) -> tuple[T, ...]:
    if everything in a or everything in b:
        return (everything,)
    joined = tuple(dict.fromkeys((*a, *b)))
    _check_number(len(joined))
    return joined


def _pairs(a: tuple[T, ...], b: tuple[T, ...], both: Callable[[T, T], T | None]) -> tuple[T, ...]:
    _check_number(len(a) * len(b) // 4)
    found = tuple(dict.fromkeys(made for x in a for y in b if (made := both(x, y)) is not None))
    _check_number(len(found))
    return found


def _check_number(number: int) -> None:
    if number > MAX_ALTERNATIVES:
        raise ConstraintError(
            "constraint-too-large",
            f"the schema multiplies out to more than {MAX_ALTERNATIVES} alternatives at one place",
            hint="use fewer anyOf, oneOf or dependencies beside each other",
        )


def _array_and(a: ArraySpec, b: ArraySpec) -> ArraySpec | None:
    if a is ANY.arrays[0] or b is ANY.arrays[0]:
        return b if a is ANY.arrays[0] else a
    most = min((m for m in (a.most, b.most) if m is not None), default=None)
    least = max(a.least, b.least)
    if most is not None and least > most:
        return None
    return ArraySpec(
        prefix=tuple(a.item(i) | b.item(i) for i in range(max(len(a.prefix), len(b.prefix)))),
        rest=a.rest | b.rest,
        least=least,
        most=most,
        contains=a.contains + b.contains,
        unique=a.unique or b.unique,
        path=a.path if a.unique or a.contains else b.path,
    )


def _object_and(a: ObjectSpec, b: ObjectSpec, budget: Budget) -> ObjectSpec | None:
    if a is ANY.objects[0] or b is ANY.objects[0]:
        return b if a is ANY.objects[0] else a
    most = min((m for m in (a.most, b.most) if m is not None), default=None)
    least = max(a.least, b.least)
    required = a.required | b.required
    if most is not None and max(least, len(required)) > most:
        return None
    props = {name: a.value_of(name) | b.value_of(name) for name in (*a.props, *b.props)}
    if any(props[name] >= NO_VALUE for name in required):
        return None
    classes = tuple(
        (names, x_value | y_value)
        for x, x_value in a.classes
        for y, y_value in b.classes
        if (names := text_and(x, y, budget)) is not None
    )
    return ObjectSpec(
        props=props,
        required=required,
        classes=classes,
        least=least,
        most=most,
        needs=a.needs + b.needs,
        path=a.path if a.least else b.path,
    )


def require(spec: ObjectSpec, names: Iterable[str]) -> ObjectSpec:
    """The objects that have these names too."""
    extra = {name: spec.value_of(name) for name in names if name not in spec.props}
    return replace(spec, props=spec.props | extra, required=spec.required | frozenset(names))
