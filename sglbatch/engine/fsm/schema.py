"""JSON Schema to a machine over bytes: what a constraint of kind json_schema becomes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.machine import Machine
from sglbatch.engine.fsm.schema_numbers import number_text
from sglbatch.engine.fsm.schema_parts import INFINITE, json_bytes
from sglbatch.engine.fsm.schema_patterns import python_reads
from sglbatch.engine.fsm.schema_reader import SchemaReader
from sglbatch.engine.fsm.schema_values import Form, Parts
from sglbatch.engine.fsm.stored import AutomatonStore
from sglbatch.errors import ConstraintError, UnsupportedSchemaError
from sglbatch.json_places import check_finite

MAX_DEPTH = 256
"""Nesting of a value that is judged."""


class SchemaConstraint:
    """A compiled schema.

    Args:
        schema: a JSON Schema as a Python value.
        separators: "json" writes ", " and ": ", "compact" no blanks.
        draft: of a schema that does not say.
        formats: ``format`` is a condition.
        allow_unenforced: leave out what cannot be enforced, for validation afterwards; see ``unenforced``.
        store: keeps the automata of patterns that took long.

    Raises:
        ConstraintError: invalid-schema, unsatisfiable-schema, constraint-too-large; UnsupportedSchemaError.
    """

    def __init__(
        self,
        schema: Any,
        *,
        separators: Literal["json", "compact"] = "json",
        draft: Literal["7", "2020-12"] = "2020-12",
        formats: bool = True,
        allow_unenforced: bool = False,
        store: AutomatonStore | None = None,
    ) -> None:
        self.schema = schema
        self.unenforced: list[str] | None = [] if allow_unenforced else None
        self._budget = Budget()
        check_finite(schema)
        comma, colon = (b", ", b": ") if separators == "json" else (b",", b":")
        self._form = Form(comma=comma, colon=colon)
        try:
            self._reader = SchemaReader(
                schema,
                draft=7 if draft == "7" else 2020,
                formats=formats,
                unenforced=self.unenforced,
                budget=self._budget,
                store=store,
            )
            self._parts = Parts(self._reader, self._form, self._budget)
        except RecursionError as error:
            raise ConstraintError(
                "constraint-too-large", "the schema is nested too deeply", hint="use fewer levels, or $ref"
            ) from error
        if self._parts.cost(self._reader.root) >= INFINITE:
            raise ConstraintError(
                "unsatisfiable-schema", "no value satisfies the schema", hint="look for an empty enum or crossed bounds"
            )
        if self.unenforced:
            _check_validated(schema, "#")
        self._any_order: Machine | None = None
        dialect = schema.get("$schema") if isinstance(schema, dict) else None
        self._goes_by_digits = isinstance(dialect, str) and bool(_UP_TO_DRAFT_4.fullmatch(dialect))

    def machine(self, alphabet: frozenset[int] | None = None) -> Machine:
        """The machine of the texts to generate, properties in the schema's order."""
        return Machine(self._parts.value(self._reader.root), alphabet)

    def shortest(self) -> str:
        """A shortest text that the schema allows, as it is generated."""
        machine = self.machine()
        data, state = bytearray(), machine.start
        while machine.cost(state):
            row = machine.row(state).tolist()
            byte = next(b for b in range(256) if row[b] >= 0 and machine.cost(row[b]) < machine.cost(state))
            data.append(byte)
            state = row[byte]
        return data.decode()

    def accepts(self, text: str) -> bool:
        """Whether ``text`` is JSON whose value can be generated.

        The value counts, not how it is written: it is judged in the constraint's own form (its separators, escapes and
        plain decimals), with the properties of an object in any order.
        """
        try:
            value = json.loads(text, parse_float=Decimal, parse_constant=_no_constant, object_pairs_hook=_distinct)
            data = self.canonical(value)
        except (ValueError, RecursionError):
            return False
        if self._any_order is None:
            form = Form(comma=self._form.comma, colon=self._form.colon, any_order=True)
            self._any_order = Machine(self._parts_like(form).value(self._reader.root))
        return self._any_order.accepts(data)

    def _parts_like(self, form: Form) -> Parts:
        return Parts(self._reader, form, self._budget, like=self._parts)

    def _is_integer(self, value: Decimal | float) -> bool:
        """Whether a whole number, written so, is an integer to the schema's draft."""
        return isinstance(value, int) or not self._goes_by_digits

    def canonical(self, value: Any) -> bytes:
        """A JSON value in the constraint's form, its properties in the order that they have."""
        if isinstance(value, Mapping):
            pairs = (json_bytes(name) + self._form.colon + self.canonical(item) for name, item in value.items())
            return b"{" + self._form.comma.join(pairs) + b"}"
        if isinstance(value, list):
            return b"[" + self._form.comma.join(map(self.canonical, value)) + b"]"
        if isinstance(value, Decimal | int | float) and not isinstance(value, bool):
            text = _plain(value)
            return text + b".0" if not self._is_integer(value) and text.lstrip(b"-").isdigit() else text
        return json_bytes(value)


def _check_validated(schema: Any, path: str) -> None:
    """What is left to validation must be read there: by Python's ``re``, which knows fewer constructs than ECMA 262.

    Raises UnsupportedSchemaError for a pattern that may be neither held nor validated.
    """
    if isinstance(schema, list):
        for i, item in enumerate(schema):
            _check_validated(item, f"{path}/{i}")
    if not isinstance(schema, dict):
        return
    named = schema.get("patternProperties")
    patterns = [("pattern", schema.get("pattern"))]
    patterns += [("patternProperties", name) for name in (named if isinstance(named, dict) else ())]
    for keyword, pattern in patterns:
        if isinstance(pattern, str) and not python_reads(pattern):
            reason = f"validation, which other parts of the schema are left to, cannot read {pattern!r}"
            raise UnsupportedSchemaError(keyword, path, reason, hint="write it in the syntax of Python's re module")
    for name, value in schema.items():
        _check_validated(value, f"{path}/{name}")


_UP_TO_DRAFT_4 = re.compile(r"https?://json-schema\.org/draft-0[34]/schema#?")
"""There an integer is a number that is written without a fraction; later ones go by the value."""


def _plain(value: Decimal | float) -> bytes:
    """A number without an exponent, unless it would be very long."""
    exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if exact and not -20 <= exact.adjusted() <= 19:
        digits = exact.normalize().as_tuple()
        mantissa = "".join(map(str, digits.digits))
        assert isinstance(digits.exponent, int)
        exponent = digits.exponent + len(mantissa) - 1
        fraction = f".{mantissa[1:]}" if len(mantissa) > 1 else ""
        return f"{'-' if digits.sign else ''}{mantissa[0]}{fraction}e{exponent}".encode()
    return number_text(Fraction(exact)).encode()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found
