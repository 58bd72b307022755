"""The output's columns: learned from all rows in a first pass, filled in a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from sglbatch.data.kinds import NULL, TEXT, Kind, kind_of, merge
from sglbatch.data.outputrow import RESERVED_COLUMNS, Column, OutputRow
from sglbatch.data.schema_kinds import fits, json_parts, kind_of_schema, shaped, with_json_text
from sglbatch.data.values import clean_text, convert, normalise, text_bytes, to_json
from sglbatch.types import VarType

Key: TypeAlias = tuple[int, str]
"""(section, name): a kept column and a variable may have one name."""

_KEPT, _VARIABLE, _RETURN, _EXTRA = range(4)
_LARGE_BYTES: Final = 1 << 30
_JSON_GROWTH: Final = 6
"""Bytes of JSON text for one byte of text, at most (a control character is \\u00xx)."""

_DECLARED_TAGS: Final = {
    "text": ("text",),
    "enum": ("text",),
    "int": ("int",),
    "float": ("float",),
    "bool": ("bool",),
    "json": ("bool", "int", "float", "text", "list", "struct"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputColumn:
    """A column of the output.

    Args:
        kind: what it holds; ``json``, also inside, is JSON text in Parquet.
        is_enum: text of few distinct values (a dictionary in Parquet).
        is_large: its text may pass what 32-bit offsets hold.
    """

    name: str
    declared: VarType | None
    kind: Kind
    is_enum: bool
    is_large: bool
    has_json: bool


@dataclass(kw_only=True, slots=True)
class _Learned:
    """What the first pass knows of a column so far."""

    declared: VarType | None
    kind: Kind = NULL
    fits_schema: bool = True
    num_text_bytes: int = 0
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, value: Any) -> None:
        value = _typed(value, self.notes, self.declared)
        self.kind = merge(self.kind, kind_of(value))
        schema_kind = _schema_kind(self.declared)
        self.fits_schema = self.fits_schema and schema_kind is not None and fits(value, schema_kind)
        self.num_text_bytes += text_bytes(value)


class ColumnSet:
    """All columns of an output but ``_error``, ``_finish`` and ``_usage``, in output order."""

    def __init__(
        self,
        columns: Sequence[OutputColumn],
        keys: Sequence[Key],
        finish_names: Sequence[str],
        means_names: Sequence[str] = (),
    ) -> None:
        self.columns = columns
        self.finish_names = finish_names
        self.means_names = means_names
        self._by_key = dict(zip(keys, columns, strict=True))

    @staticmethod
    def learn(rows: Iterable[OutputRow], columns: Sequence[Column]) -> tuple[ColumnSet, list[str]]:
        """The columns and what the user should know about them.

        Args:
            rows: every row, once; the later pass must see the same ones.
            columns: the variables known before; others are found in the rows.
        """
        learned = {(_VARIABLE, column.name): _Learned(declared=column.declared) for column in columns}
        finish_names: dict[str, None] = {}
        means_names: dict[str, None] = {}
        for row in rows:
            for key, value in _cells(row):
                if key not in learned:
                    learned[key] = _Learned(declared=None)
                learned[key].add(value)
            finish_names.update(dict.fromkeys(clean_text(name, Counter()) for name in row.finish))
            means_names.update(dict.fromkeys(clean_text(name, Counter()) for name in row.means))
        finish_names.update(dict.fromkeys(clean_text(column.name, Counter()) for column in columns if column.asked))
        keys = sorted(learned, key=lambda key: key[0])
        warnings: list[str] = []
        names = _distinct_names(keys, warnings)
        finished = [_finish(name, learned[key], warnings) for name, key in zip(names, keys, strict=True)]
        return ColumnSet(finished, keys, list(finish_names), list(means_names)), warnings

    def record(self, row: OutputRow, *, json_as_text: bool, notes: Counter[str]) -> dict[str, Any]:
        """column name -> value, in column order; null where the row has none.

        Args:
            json_as_text: a ``json`` column's values become JSON text; else they stay values.
            notes: counts values that JSON text could not hold as they are.
        """
        record: dict[str, Any] = dict.fromkeys(column.name for column in self.columns)

        def as_text(value: Any) -> Any:
            return to_json(value, notes) if json_as_text else value

        told: Counter[str] = Counter()  # the first pass has told of these
        for key, value in _cells(row):
            column = self._by_key[key]
            typed = _typed(value, told, column.declared)
            record[column.name] = with_json_text(typed, column.kind, as_text) if column.has_json else typed
        return record


def _typed(value: Any, notes: Counter[str], declared: VarType | None) -> Any:
    """A program's value in the type that is declared for it, as far as it fits."""
    converted = convert(normalise(value, notes), declared)
    kind = _schema_kind(declared)
    return converted if kind is None else shaped(converted, kind)


def _schema_kind(declared: VarType | None) -> Kind | None:
    """The kind of a variable with a JSON Schema."""
    if declared is None or not declared.schema:
        return None
    kind = kind_of_schema(declared.schema)
    return Kind(tag="list", item=kind) if declared.is_list else kind


def _cells(row: OutputRow) -> Iterator[tuple[Key, Any]]:
    yield from (((_KEPT, name), value) for name, value in row.kept.items())
    yield from (((_VARIABLE, name), value) for name, value in row.values.items())
    if row.has_returned:
        yield (_RETURN, "_return"), row.returned
    yield from (((_EXTRA, name), value) for name, value in row.extras.items())


def _distinct_names(keys: Sequence[Key], warnings: list[str]) -> list[str]:
    """A name for every column. The job refuses collisions it can see before the run; one that a row made is renamed."""
    names: list[str] = []
    for section, wanted in keys:
        clean = name = clean_text(wanted, Counter())
        number = 2
        while name in names or (name in RESERVED_COLUMNS and section != _RETURN):
            name = f"{clean}_{number}"
            number += 1
        if name != wanted:
            warnings.append(f"column {clean!r} is named {name!r}, because another column has its name")
        names.append(name)
    return names


def _finish(name: str, learned: _Learned, warnings: list[str]) -> OutputColumn:
    warnings.extend(f"column {name!r}: {count} {note}" for note, count in sorted(learned.notes.items()))
    declared = learned.declared
    kind = learned.kind
    schema_kind = _schema_kind(declared)
    if schema_kind is not None and learned.fits_schema:
        kind = schema_kind
    elif kind.tag == "null":
        kind = _declared_kind(declared)
    elif declared is not None and not _fits(kind, declared):
        reason = kind.reason or "has other values"
        shape = f"a list of {declared.kind}" if declared.is_list else declared.kind
        kind = Kind(tag="json", reason=f"is declared {shape} but {reason}")
    json_in = json_parts(kind)
    if kind.tag == "json":
        warnings.append(f"column {name!r} {kind.reason}: it has no one type (JSON text in Parquet)")
    elif json_in:
        warnings.append(f"column {name!r} has no one type for {', '.join(json_in)} (JSON text in Parquet)")
    growth = _JSON_GROWTH if json_in else 1
    is_enum = kind.is_enum or (declared is not None and declared.kind == "enum" and kind.tag == "text")
    return OutputColumn(
        name=name,
        declared=declared,
        kind=kind,
        is_enum=is_enum,
        is_large=learned.num_text_bytes * growth > _LARGE_BYTES,
        has_json=bool(json_in),
    )


def _declared_kind(declared: VarType | None) -> Kind:
    """The kind of a column without values."""
    if declared is None or declared.kind == "json":
        return TEXT
    tag = _DECLARED_TAGS[declared.kind][0]
    item = Kind(tag=tag)  # type: ignore[arg-type]
    return Kind(tag="list", item=item) if declared.is_list else item


def _fits(kind: Kind, declared: VarType) -> bool:
    if declared.is_list:
        return (
            kind.tag == "list" and kind.item is not None and kind.item.tag in ("null", *_DECLARED_TAGS[declared.kind])
        )
    return kind.tag in _DECLARED_TAGS[declared.kind]
