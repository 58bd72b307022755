"""A template: a program whose parameters are bound to the columns of the data."""

from __future__ import annotations

import difflib
import inspect
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglbatch.errors import SglbatchError
from sglbatch.lang.function import SglFunction
from sglbatch.lang.program import NO_OVERRIDE, Program
from sglbatch.lang.sampling import Sampling, SamplingOverride
from sglbatch.lang.schemas import Record
from sglbatch.types import ErrorInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a template. ``nullable``: None may arrive (annotated so, or the default is None)."""

    name: str
    required: bool
    default: Any
    nullable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A loaded template.

    Args:
        parameters: what the data must give; those fixed by ``--param`` are left out.
        source_hash: changes with the file and the modules it imports from its own folder.
    """

    name: str
    path: Path
    function: SglFunction
    parameters: tuple[Parameter, ...]
    source_hash: str

    def bind(self, columns: Sequence[str], mapping: Mapping[str, str]) -> Binding:
        """Find a column for every parameter.

        Args:
            mapping: parameter -> column, where they differ (``--map``).

        Raises:
            SglbatchError: ``unknown-parameter``, ``unknown-column``.
        """
        names = [parameter.name for parameter in self.parameters]
        for name, column in mapping.items():
            if name not in names:
                raise unknown_name("parameter", name, names, self, "--map {}=" + column)
            if column not in columns:
                raise unknown_name("column", column, columns, self, f"--map {name}={{}}")
        sources: dict[str, str] = {}
        for parameter in self.parameters:
            column = mapping.get(parameter.name, parameter.name)
            if column in columns:
                sources[parameter.name] = column
            elif parameter.required:
                raise self._no_column(parameter.name, columns)
        return Binding(template=self, sources=sources)

    def record(self, schema: str) -> Record:
        """The schema for the last gen of the function.

        Raises:
            SglbatchError: ``no-record``, ``uncertain-record``, ``constrained-record``, ``invalid-argument``.
        """
        function = self.function.function
        source = textwrap.dedent(inspect.getsource(function))
        first_line = function.__code__.co_firstlineno
        return Record.of(schema, source, file=str(self.function.source), first_line=first_line)

    def _no_column(self, name: str, columns: Sequence[str]) -> SglbatchError:
        near = nearest(name, columns)
        listed = ", ".join(columns) or "none"
        hint = f"--map {name}={shlex.quote(near)}" if near else f"--map {name}=COLUMN, or --param {name}=VALUE"
        if len(columns) == 1 and (delimiter := next((d for d in ";\t|" if d in columns[0]), None)):
            hint = f"is the file separated by {delimiter!r}? A .csv has commas, a .tsv has tabs"
        return SglbatchError(
            "unknown-column",
            f"the parameter {name!r} has no column in the data, which has: {listed}",
            hint=hint,
            where=str(self.path),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """A template over data with certain columns. ``sources``: parameter -> column; the others have defaults."""

    template: Template
    sources: Mapping[str, str]

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments a row gives, as its values are; a column the row lacks falls back to the default."""
        required = {parameter.name for parameter in self.template.parameters if parameter.required}
        return {
            name: values.get(column) for name, column in self.sources.items() if column in values or name in required
        }

    def null_error(self, arguments: Mapping[str, Any]) -> ErrorInfo | None:
        """The row's error where null arrives for a parameter that does not expect it."""
        for parameter in self.template.parameters:
            if arguments.get(parameter.name, "") is None and not parameter.nullable:
                column = self.sources[parameter.name]
                return ErrorInfo(
                    code="null-value",
                    message=f"the column {column!r} is null (annotate the parameter as `{parameter.name}: str | None` "
                    "to receive None)",
                )
        return None

    def program(
        self,
        values: Mapping[str, Any],
        *,
        program_id: int,
        row_key: str,
        sampling: Sampling | None = None,
        forced: SamplingOverride = NO_OVERRIDE,
        record: Record | None = None,
    ) -> Program:
        """The program of one row; a row with an unexpected null ends with that error at once."""
        arguments = self.arguments(values)
        return Program(
            self.template.function,
            arguments,
            program_id=program_id,
            row_key=row_key,
            sampling=sampling,
            forced=forced,
            record=record,
            error=self.null_error(arguments),
        )


def nearest(name: str, names: Sequence[str]) -> str | None:
    lowered = {other.lower(): other for other in names}
    close = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.5)
    return lowered[close[0]] if close else None


def unknown_name(what: str, name: str, names: Sequence[str], template: Template, flag: str) -> SglbatchError:
    near = nearest(name, names)
    listed = ", ".join(names) or "none"
    return SglbatchError(
        f"unknown-{what}",
        f"there is no {what} {name!r}; there are: {listed}",
        hint=flag.format(near) if near else f"choose one of these {what}s, or leave the option out",
        where=str(template.path),
    )
