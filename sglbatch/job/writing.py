"""From finished rows on disk to the output file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglbatch.data import Column, OutputRow, Rows, WriteReport, check_collisions, write_output
from sglbatch.errors import SglbatchError
from sglbatch.job.config import RunConfig
from sglbatch.job.rows import FinishedRow, RowStore
from sglbatch.lang.vartypes import merge_types

SAVED_COLUMNS = {"transcript": "_transcript", "logprobs": "_logprobs"}
"""Of ``--save``, by what it names."""


def kept_columns(config: RunConfig, columns: Sequence[str]) -> list[str]:
    """The input columns that go to the output.

    Raises:
        SglbatchError: ``unknown-column``.
    """
    if config.keep == ("all",):
        return list(columns)
    for name in config.keep:
        if name not in columns:
            raise SglbatchError(
                "unknown-column", f"--keep names no column {name!r}", hint=f"choose from: {', '.join(columns)}"
            )
    return list(config.keep)


def write_rows(target: Path, store: RowStore, *, inputs: Rows | None, config: RunConfig) -> WriteReport:
    """Writes every finished row of ``store`` to ``target`` in input order.

    Args:
        inputs: for the kept columns; None when there are none.

    Raises:
        SglbatchError: ``cannot-write``; ``column-collision`` when a kept column and a variable have the same name.
    """
    columns = _columns(store)
    kept = kept_columns(config, inputs.columns) if inputs else []
    names = check_collisions(kept, [*columns, *extra_columns(config)], config.keep_prefix)

    def rows() -> Iterator[OutputRow]:
        for row in store:
            yield _output_row(row, config=config, kept=_kept_values(inputs, row.index, names))

    return write_output(target, rows, columns=list(columns.values()))


def _columns(store: RowStore) -> dict[str, Column]:
    """Every variable of any row, set or not, with the type that all rows which declare one agree on."""
    columns: dict[str, Column] = {}
    for row in store:
        for name in row.dtypes | row.values:
            before = columns.get(name, Column(name=name))
            declared, known = row.dtypes.get(name), before.declared
            kind = merge_types(declared, known) if declared and known else declared or known
            asked = before.asked or name not in row.values
            columns[name] = Column(name=name, declared=kind, asked=asked)
    return columns


def extra_columns(config: RunConfig) -> list[str]:
    """What ``--save`` adds to the output."""
    return [column for name, column in SAVED_COLUMNS.items() if name in config.save]


def _kept_values(inputs: Rows | None, index: int, names: Mapping[str, str]) -> dict[str, Any]:
    if inputs is None or not names:
        return {}
    values = inputs.get(index).values or {}
    return {output_name: values.get(column) for column, output_name in names.items()}


def _output_row(row: FinishedRow, *, config: RunConfig, kept: dict[str, Any]) -> OutputRow:
    return OutputRow(
        values=row.values,
        returned=row.returned,
        has_returned=row.returned is not None,
        error=row.error,
        finish=row.finish,
        means=row.means,
        usage=row.usage,
        kept=kept,
        extras={column: getattr(row, name) or None for name, column in SAVED_COLUMNS.items() if name in config.save},
    )
