"""The constraints that are a job's own, looked at before a model is loaded."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sglbatch.engine.fsm import SchemaConstraint
from sglbatch.errors import ConstraintError
from sglbatch.job.prepare import Prepared
from sglbatch.lang.calls import ModelCall, PendingCall
from sglbatch.types import Constraint, Generate


def check_constraints(calls: Iterable[ModelCall | PendingCall], ready: Prepared) -> None:
    """Compiles the job's own constraints, so that a bad one ends it before a model is loaded.

    Raises:
        ConstraintError: naming the template, or the file of --schema.
    """
    for _, constraint in _own_constraints(calls, ready):
        try:
            ready.compiler.compile(constraint)
        except ConstraintError as error:
            given = ready.record is not None and constraint.source == ready.record.constraint.source
            files = ready.template.function.source_files
            error.where = str(ready.config.schema_file or "--schema") if given else place_of(constraint.source, files)
            raise


def unenforced_parts(calls: Iterable[ModelCall | PendingCall], ready: Prepared) -> list[str]:
    """What of the job's own schemas is only validated afterwards, as "keyword at path, of call".

    Raises:
        ConstraintError: as ``check_constraints``.
    """
    found: dict[str, None] = {}
    for name, constraint in _own_constraints(calls, ready):
        compiled = ready.compiler.compile(constraint)
        if isinstance(compiled, SchemaConstraint):
            found.update(dict.fromkeys(f"{place}, of {name}" for place in compiled.unenforced or ()))
    return list(found)


def place_of(text: str, files: Sequence[Path]) -> str:
    """``file:line`` of the first string of the template's files that is ``text``, else the first file alone."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value == text:
                return f"{file}:{node.lineno}"
    return str(files[0])


def _own_constraints(calls: Iterable[ModelCall | PendingCall], ready: Prepared) -> Iterator[tuple[str, Constraint]]:
    """The constraints that are not made from a row's values, each with the name of a call that has it.

    One that is made from them is that row's error, which the backend gives. A regex is the job's own when it stands in
    the template's source, a schema also when all the calls of its name have it.
    """
    written = ready.template.function.strings()
    by_name: dict[str, set[Constraint]] = defaultdict(set)
    for call in calls:
        question = call.question if isinstance(call, ModelCall) else call.operation
        if isinstance(question, Generate) and question.constraint is not None:
            by_name[call.name].add(question.constraint)
    for name, constraints in sorted(by_name.items()):
        for constraint in sorted(constraints, key=lambda c: c.source):
            shared = len(constraints) == 1 and constraint.kind == "json_schema"
            if shared or constraint.source in written:
                yield name, constraint
