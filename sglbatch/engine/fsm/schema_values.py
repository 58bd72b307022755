"""The parts for JSON values, arrays and objects, made from the nodes of a schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Final

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.schema_node import ArraySpec, Conj, Node, ObjectSpec, finite_values
from sglbatch.engine.fsm.schema_numbers import NumberSet, number_automaton, number_text
from sglbatch.engine.fsm.schema_parts import (
    INFINITE,
    Literal,
    Local,
    Matched,
    Move,
    OneOf,
    Part,
    Quoted,
    breadth_first,
    json_bytes,
)
from sglbatch.engine.fsm.schema_reader import SchemaReader
from sglbatch.engine.fsm.schema_texts import TextSet, text_and, without_words
from sglbatch.errors import ConstraintError, UnsupportedSchemaError

Sequence = tuple[tuple[Part, Local], ...]
MAX_COUNTED_ITEMS: Final = 2_000
"""Largest minItems, and maxItems beside contains: the machine counts that far."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How values are written.

    Args:
        comma, colon: separators with the blank behind them, if any.
        any_order: properties may come in any order (to judge a finished value), not only in the schema's.
    """

    comma: bytes = b", "
    colon: bytes = b": "
    any_order: bool = False


class Parts:
    """Makes the parts of one schema, each once, and knows what they cost at least.

    Args:
        like: other parts of the same schema, to share strings and numbers with.
    """

    def __init__(self, reader: SchemaReader, form: Form, budget: Budget, *, like: Parts | None = None) -> None:
        self.form = form
        self.reader = reader
        self.budget = budget
        self._values: dict[Conj, Value] = {}
        self._literals: dict[bytes, Literal] = {}
        self._strings: dict[TextSet, Part] = like._strings if like else {}
        self._numbers: dict[NumberSet, Part | None] = like._numbers if like else {}
        self.costs: dict[Conj, int] = {}
        self._find_costs(reader.root)

    def value(self, conj: Conj) -> Value:
        if conj not in self._values:
            self._values[conj] = Value(self, self.reader.node(conj))
        return self._values[conj]

    def literal(self, data: bytes) -> Literal:
        if data not in self._literals:
            self._literals[data] = Literal(data)
        return self._literals[data]

    def string(self, texts: TextSet) -> Part:
        if texts not in self._strings:
            words = texts.words
            self._strings[texts] = Quoted(texts) if words is None else OneOf(map(json_bytes, sorted(words)))
        return self._strings[texts]

    def number(self, numbers: NumberSet) -> Part | None:
        if numbers not in self._numbers:
            if numbers.values is not None:
                self._numbers[numbers] = OneOf(number_text(v).encode() for v in numbers.values if _has_text(v))
            else:
                automaton = number_automaton(numbers)
                self._numbers[numbers] = Matched(automaton) if automaton is not None else None
        return self._numbers[numbers]

    def cost(self, conj: Conj) -> int:
        """Bytes of the shortest value; INFINITE when there is none."""
        return self.costs.get(conj, INFINITE)

    def _find_costs(self, root: Conj) -> None:
        """The least fixpoint: a recursive schema's values cost what their shortest ones do."""
        found = breadth_first(root, self._successors)
        changed = True
        while changed:
            changed = False
            for conj in reversed(found):
                cost = self.value(conj).fresh_cost()
                self.budget.spend(20)
                if cost < self.cost(conj):
                    self.costs[conj] = cost
                    changed = True
        for value in self._values.values():
            value.settle()

    def _successors(self, conj: Conj) -> Iterable[Conj]:
        self.budget.spend(100)
        return self.value(conj).children()


class Value:
    """Any value that a node allows."""

    start: Local = 0

    def __init__(self, parts: Parts, node: Node) -> None:
        self._parts = parts
        self._node = node
        self._nested: list[ArrayPart | ObjectPart] = [ArrayPart(parts, spec) for spec in node.arrays]
        self._nested += [ObjectPart(parts, spec) for spec in node.objects]
        self._choices: list[Part] | None = None

    def children(self) -> Iterator[Conj]:
        for part in self._nested:
            yield from part.children()

    def _parts_of_it(self) -> list[Part]:
        node, parts = self._node, self._parts
        words = [b"null"] if node.null else []
        words += [b"true"] if True in node.bools else []
        words += [b"false"] if False in node.bools else []
        found: list[Part | None] = [OneOf(words)] if words else []
        found += [parts.number(numbers) for numbers in node.numbers]
        found += [parts.string(texts) for texts in node.strings]
        return [part for part in (*found, *self._nested) if part is not None]

    def fresh_cost(self) -> int:
        for part in self._nested:
            part.forget()
        if self._choices is None:
            self._choices = self._parts_of_it()
        return min((part.cost(part.start) for part in self._choices), default=INFINITE)

    def settle(self) -> None:
        """All costs are final: only what can be completed stays."""
        for part in self._nested:
            part.forget()
        self._choices = [part for part in self._parts_of_it() if part.cost(part.start) < INFINITE]

    def moves(self, local: Local) -> list[Move]:
        return []

    def ends(self, local: Local) -> bool:
        return False

    def opens(self, local: Local) -> Iterable[Sequence]:
        assert self._choices is not None
        return [((part, part.start),) for part in self._choices]

    def is_free(self, local: Local) -> bool:
        return False

    def cost(self, local: Local) -> int:
        assert self._choices is not None
        return min((part.cost(part.start) for part in self._choices), default=INFINITE)


class ArrayPart:
    """An array. The state is (items written, how many satisfied each ``contains``, values written if unique).

    Numbers are counted up to the largest that matters.
    """

    start: Local = None

    def __init__(self, parts: Parts, spec: ArraySpec) -> None:
        self._parts = parts
        self._spec = spec
        self._costs: dict[Local, int] = {}
        self._finite: list[bytes] | None = None
        """The texts of unique items, shortest first."""
        if spec.unique and (spec.most is None or spec.most > 1):
            plain = not spec.prefix and not spec.contains
            values = finite_values(parts.reader.node(spec.rest)) if plain else None
            if values is None:
                raise UnsupportedSchemaError("uniqueItems", spec.path, "only lists of a few known values can be kept")
            texts = [number_text(v).encode() if isinstance(v, Fraction) else json_bytes(v) for v in values]
            self._finite = sorted(texts, key=len)
        counted = max(spec.least, len(spec.prefix), (spec.most or 0) if spec.contains else 0)
        if counted > MAX_COUNTED_ITEMS:
            raise ConstraintError(
                "constraint-too-large", f"an array of {counted} items is too long to count", hint="use smaller bounds"
            )

    def children(self) -> Iterator[Conj]:
        spec = self._spec
        items = {spec.item(i) for i in range(len(spec.prefix) + 1)}
        for item in sorted(items, key=len):
            for extra, _ in self._options((0,) * len(spec.contains)):
                yield item | extra

    def _options(self, matched: tuple[int, ...]) -> Iterator[tuple[Conj, tuple[int, ...]]]:
        """What an item may be beside its own schema, and the counts after it."""
        choices: list[list[tuple[Conj, int]]] = []
        for (condition, opposite, least, most), number in zip(self._spec.contains, matched, strict=True):
            cap = least if most is None else most
            inside = [(condition, min(number + 1, cap))] if most is None or number < most else []
            choices.append([*inside, (opposite if most is not None else frozenset(), number)])
        for combination in product(*choices):
            conj: Conj = frozenset().union(*(extra for extra, _ in combination))
            yield conj, tuple(number for _, number in combination)

    def forget(self) -> None:
        self._costs.clear()

    def _first(self) -> Local:
        return (0, (0,) * len(self._spec.contains), frozenset())

    def moves(self, local: Local) -> list[Move]:
        return []

    def ends(self, local: Local) -> bool:
        return bool(local == "end")

    def _next(self, local: Local) -> Iterator[tuple[Conj, Part | None, Local]]:
        """The items that may come next: their conjunction, or for a unique one its only text."""
        spec = self._spec
        index, matched, seen = local
        if spec.most is not None and index >= spec.most:
            return
        after = index + 1 if spec.most is not None else min(index + 1, max(1, spec.least, len(spec.prefix)))
        if self._finite is not None:
            for i, text in enumerate(self._finite):
                if i not in seen:
                    yield frozenset(), self._parts.literal(text), (index + 1, matched, seen | {i})
            return
        for extra, counts in self._options(matched):
            yield spec.item(index) | extra, None, (after, counts, seen)

    def _may_close(self, local: Local) -> bool:
        index, matched, _ = local
        wanted = (least for _, _, least, _ in self._spec.contains)
        return index >= self._spec.least and all(n >= least for n, least in zip(matched, wanted, strict=True))

    def opens(self, local: Local) -> Iterable[Sequence]:
        literal = self._parts.literal
        if local is None:
            return [((literal(b"["), 0), (self, self._first()))]
        if local == "end":
            return []
        found: list[Sequence] = [((literal(b"]"), 0), (self, "end"))] if self._may_close(local) else []
        comma = () if local[0] == 0 else ((literal(self._parts.form.comma), 0),)
        for conj, part, after in self._next(local):
            if part is None and self._parts.cost(conj) >= INFINITE:
                continue
            if self.cost(after) >= INFINITE:
                continue
            item = part if part is not None else self._parts.value(conj)
            found.append((*comma, (item, item.start), (self, after)))
        return found

    def is_free(self, local: Local) -> bool:
        return False

    def cost(self, local: Local) -> int:
        if local is None:
            spec = self._spec
            zeros = (0,) * len(spec.contains)
            if self._finite is None:  # the deep end first, so that nothing recurses far
                for index in range(max(spec.least, len(spec.prefix)), 0, -1):
                    if spec.most is None or index <= spec.most:
                        self._local_cost((index, zeros, frozenset()))
            return 1 + self._local_cost(self._first())
        return 0 if local == "end" else self._local_cost(local)

    def _local_cost(self, local: Local) -> int:
        if self._may_close(local):
            return 1
        if local not in self._costs:
            self._costs[local] = INFINITE  # a way back to here is no way on
            comma = len(self._parts.form.comma) if local[0] else 0
            best = INFINITE
            for conj, part, after in self._next(local):
                own = part.cost(part.start) if part is not None else self._parts.cost(conj)
                if own < INFINITE:
                    best = min(best, comma + own + self._local_cost(after))
                if part is not None and best < INFINITE:
                    break  # they can be taken in any order, so the shortest come first
            self._costs[local] = min(best, INFINITE)
        return self._costs[local]


class ObjectPart:
    """An object. The state is (place, number of names, number of surely distinct names, needs met).

    The place is the number of listed properties written or passed over, one more behind a name that is not listed; in
    any order it is the set of those written, as bits. The needs met are bits too. Names are counted up to the largest
    number that matters.
    """

    start: Local = None

    def __init__(self, parts: Parts, spec: ObjectSpec) -> None:
        self._parts = parts
        self._spec = spec
        self._names = list(spec.props)
        self._keys = [json_bytes(name) + parts.form.colon for name in self._names]
        self._required = [name in spec.required for name in self._names]
        left, self._num_required_from = 0, [0, 0]
        for needed in reversed(self._required):
            left += needed
            self._num_required_from.insert(0, left)
        self._all_met = (1 << len(spec.needs)) - 1
        self._classes: list[tuple[TextSet, Conj, int]] | None = None
        self._costs: dict[Local, int] = {}
        if spec.least > max(1, len(self._names) + 1) and not parts.form.any_order and self._open_classes():
            raise UnsupportedSchemaError(
                "minProperties", spec.path, "names that the schema does not list could repeat each other"
            )

    def children(self) -> Iterator[Conj]:
        for name in self._names:
            for value, _ in self._values_of(name, 0):
                yield value
        for _, value, _ in self._open_classes():
            yield value

    def forget(self) -> None:
        self._costs.clear()

    def _values_of(self, name: str, met: int) -> list[tuple[Conj, int]]:
        """What a listed property may hold, and the needs that are met then."""
        found = [(self._spec.props[name], met)]
        for i, (names, value) in enumerate(self._spec.needs):
            if not met >> i & 1 and names.holds(name):
                found += [(conj | value, bits | 1 << i) for conj, bits in found]
        return found

    def _open_classes(self) -> list[tuple[TextSet, Conj, int]]:
        """(names, value, needs met) of properties that are not listed; they may overlap where there are needs."""
        if self._classes is None:
            self._classes = []
            for names, value in self._spec.classes:
                if not any(place.schema is False for place, positive in value if positive):
                    self._add_class(names, value)
        return self._classes

    def _add_class(self, names: TextSet, value: Conj) -> None:
        assert self._classes is not None
        budget = self._parts.budget
        others = without_words(names, self._names, budget) if self._names else names
        found = [(others, value, 0)] if others is not None else []
        for i, (needed, wanted) in enumerate(self._spec.needs):
            found += [
                (both, conj | wanted, met | 1 << i)
                for known, conj, met in found
                if (both := text_and(known, needed, budget)) is not None
            ]
        self._classes += found

    def moves(self, local: Local) -> list[Move]:
        return []

    def ends(self, local: Local) -> bool:
        return bool(local == "end")

    def _first(self) -> Local:
        return (0, 0, 0, 0)

    def _may_close(self, local: Local) -> bool:
        done, _, distinct, met = local
        if distinct < self._spec.least or met != self._all_met:
            return False
        if not self._parts.form.any_order:
            return bool(self._num_required_from[done] == 0)
        return all(bool(done >> i & 1) for i, needed in enumerate(self._required) if needed)

    def _next_props(self, local: Local) -> Iterator[tuple[int, Conj, Local]]:
        """The listed properties that may come next, with what each may hold, and the state after it."""
        done, names, distinct, met = local
        most = self._spec.most
        if most is not None and names >= most:
            return
        after_names = names + 1 if most is not None else 0
        after_distinct = min(distinct + 1, self._spec.least)
        any_order = self._parts.form.any_order
        for i in range(0 if any_order else done, len(self._names)):
            if any_order and done >> i & 1:
                continue
            if not any_order and most is not None and self._num_required_from[i + 1] > most - names - 1:
                continue
            place = done | 1 << i if any_order else i + 1
            for value, bits in self._values_of(self._names[i], met):
                yield i, value, (place, after_names, after_distinct, bits)
            if self._required[i] and not any_order:
                return

    def _next_others(self, local: Local) -> Iterator[tuple[TextSet, Conj, Local]]:
        """The properties that are not listed and may come next, and the state after each."""
        done, names, distinct, met = local
        most = self._spec.most
        if most is not None and names >= most:
            return
        any_order = self._parts.form.any_order
        if not any_order and self._num_required_from[done]:
            return
        end = len(self._names) + 1
        place = done | 1 << len(self._names) if any_order else end
        # Other names may repeat each other, so that all of them together are sure to be one name only.
        is_distinct = any_order or done != end
        after_distinct = min(distinct + is_distinct, self._spec.least)
        for texts, value, bits in self._open_classes():
            yield texts, value, (place, names + 1 if most is not None else 0, after_distinct, met | bits)

    def opens(self, local: Local) -> Iterable[Sequence]:
        literal = self._parts.literal
        if local is None:
            return [((literal(b"{"), 0), (self, self._first()))]
        if local == "end":
            return []
        found: list[Sequence] = [((literal(b"}"), 0), (self, "end"))] if self._may_close(local) else []
        comma = self._parts.form.comma if local[0] else b""
        for i, conj, after in self._next_props(local):
            if self._parts.cost(conj) < INFINITE and self.cost(after) < INFINITE:
                value = self._parts.value(conj)
                found.append(((literal(comma + self._keys[i]), 0), (value, 0), (self, after)))
        head = ((literal(comma), 0),) if comma else ()
        colon = literal(self._parts.form.colon)
        for names, conj, after in self._next_others(local):
            if self._parts.cost(conj) < INFINITE and self.cost(after) < INFINITE:
                name, value = self._parts.string(names), self._parts.value(conj)
                found.append((*head, (name, name.start), (colon, 0), (value, 0), (self, after)))
        return found

    def is_free(self, local: Local) -> bool:
        return False

    def cost(self, local: Local) -> int:
        if local is None:
            if not self._parts.form.any_order and self._spec.most is None and not self._spec.least:
                for done in range(len(self._names), 0, -1):  # the deep end first, so that nothing recurses far
                    self._local_cost((done, 0, 0, 0))
            return 1 + self._local_cost(self._first())
        return 0 if local == "end" else self._local_cost(local)

    def _local_cost(self, local: Local) -> int:
        if self._may_close(local):
            return 1
        if self._parts.form.any_order:
            return self._any_order_cost(local)
        if local not in self._costs:
            self._costs[local] = INFINITE  # a way back to here is no way on
            comma = len(self._parts.form.comma) if local[0] else 0
            best = INFINITE
            for i, conj, after in self._next_props(local):
                own = self._parts.cost(conj)
                if own < INFINITE:
                    best = min(best, comma + len(self._keys[i]) + own + self._local_cost(after))
            colon = len(self._parts.form.colon)
            for names, conj, after in self._next_others(local):
                name, own = self._parts.string(names), self._parts.cost(conj)
                if own < INFINITE and after != local:
                    best = min(best, comma + name.cost(name.start) + colon + own + self._local_cost(after))
            self._costs[local] = min(best, INFINITE)
        return self._costs[local]

    def _any_order_cost(self, local: Local) -> int:
        """Only whether it can be completed at all, as far as the listed names say."""
        needed = (n for i, n in enumerate(self._names) if self._required[i] and not local[0] >> i & 1)
        return INFINITE if any(self._parts.cost(self._spec.props[n]) >= INFINITE for n in needed) else 1


def _has_text(value: Fraction) -> bool:
    """A decimal fraction; multiples of a third and the like have no end."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
