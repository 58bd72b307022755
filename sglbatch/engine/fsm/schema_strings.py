"""What a schema says of strings: lengths, patterns, formats."""

from __future__ import annotations

from collections.abc import Iterator

from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.schema_formats import EXACT_FORMATS, FORMATS, UNHELD_FORMATS, format_automaton
from sglbatch.engine.fsm.schema_keywords import invalid, leave, limits_of, type_names
from sglbatch.engine.fsm.schema_node import Node, Place
from sglbatch.engine.fsm.schema_patterns import pattern_automaton, python_reads
from sglbatch.engine.fsm.schema_texts import ALL_TEXTS, TextSet, text_and, text_not
from sglbatch.engine.fsm.stored import AutomatonStore
from sglbatch.errors import ConstraintError, UnsupportedSchemaError


class StringReader:
    """Reads the keywords of strings, and the patterns of names; ``SchemaReader`` explains the arguments."""

    def __init__(
        self, *, formats: bool, unenforced: list[str] | None, budget: Budget, store: AutomatonStore | None
    ) -> None:
        self._formats = formats
        self._unenforced = unenforced
        self._budget = budget
        self._store = store
        self._patterns: dict[str, TextSet | None] = {}

    def allowed(self, place: Place, *, may_leave: bool = False) -> list[TextSet] | None:
        """What keywords say of a text; None where they say nothing.

        Args:
            may_leave: a pattern that cannot be held may be left to validation.
        """
        schema = place.schema
        sets: list[TextSet] = []
        if "minLength" in schema or "maxLength" in schema:
            least, most = limits_of(place, "minLength", "maxLength")
            sets.append(TextSet(least=least, most=most))
        if "pattern" in schema:
            pattern = self._pattern_or_left(place) if may_leave else self.pattern(place, schema["pattern"], "pattern")
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

    def failing(self, place: Place) -> Iterator[Node]:
        """The strings that break a keyword."""
        name = self._format(place)
        if name is not None and name not in EXACT_FORMATS:
            raise UnsupportedSchemaError("format", place.path, f"what is not in format {name!r} cannot be told exactly")
        sets = self.allowed(place)
        if sets is None:
            return
        others = [ALL_TEXTS] if not sets else text_not(sets[0], self._budget)
        yield Node(strings=tuple(others))

    def pattern(self, place: Place, pattern: str, keyword: str) -> TextSet | None:
        """The texts that a pattern under ``keyword`` matches; None when there are none.

        Raises ConstraintError: invalid-schema, constraint-too-large; UnsupportedSchemaError.
        """
        if pattern not in self._patterns:
            try:
                automaton = pattern_automaton(pattern, self._budget, self._store)
            except ConstraintError as error:
                if error.code == "invalid-regex":
                    raise invalid(place, keyword, error.message) from error
                if error.code == "unsupported-regex":
                    raise UnsupportedSchemaError(keyword, place.path, error.message, hint=error.hint) from error
                raise
            self._patterns[pattern] = None if automaton is None else TextSet(base=automaton)
        return self._patterns[pattern]

    def _pattern_or_left(self, place: Place) -> TextSet | None:
        try:
            return self.pattern(place, place.schema["pattern"], "pattern")
        except UnsupportedSchemaError as error:
            if not python_reads(place.schema["pattern"]):
                raise  # then validation cannot take its place either
            if self._unenforced is None:
                error.hint = f"{error.hint}; or --allow-unenforced, which validates the finished value instead"
                raise
            self._unenforced.append(f"pattern at {place.path}")
            return ALL_TEXTS

    def _format(self, place: Place) -> str | None:
        """The format that is a condition here; one that the specification does not name only describes."""
        name = place.schema.get("format")
        if not self._formats or name is None:
            return None
        if name in UNHELD_FORMATS and "string" in type_names(place):
            leave(self._unenforced, place, "format", f"no automaton holds {name!r}")
        return name if name in FORMATS else None
