"""``sglbatch check``: what a schema compiles to, and which instances it accepts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglbatch.engine.automaton_cache import AutomatonCache
from sglbatch.engine.fsm import SchemaConstraint
from sglbatch.engine.fsm.compiled import parse_schema
from sglbatch.errors import EXIT_DONE, EXIT_FAILED_ROWS, ConstraintError, SglbatchError
from sglbatch.planner import escape_controls


def check(
    schema: Path,
    instances: Path | None,
    *,
    compact: bool,
    allow_unenforced: bool,
    as_json: bool,
) -> int:
    """Prints what the schema compiles to and, for each line of ``instances``, whether it is accepted.

    Returns 0, or 1 where an instance is not accepted.

    Raises:
        SglbatchError: ``cannot-read``; what ``SchemaConstraint`` raises, with the file's name.
    """
    begin = time.perf_counter()
    try:
        compiled = SchemaConstraint(
            parse_schema(_text(schema)),
            separators="compact" if compact else "json",
            allow_unenforced=allow_unenforced,
            store=AutomatonCache(),
        )
    except ConstraintError as error:
        error.where = str(schema)
        raise
    seconds = time.perf_counter() - begin
    verdicts = list(_verdicts(compiled, instances)) if instances is not None else []
    num_accepted = sum(accepted for _, accepted, _ in verdicts)
    if as_json:
        print(json.dumps(_as_json(compiled, seconds, verdicts), indent=2))
    else:
        print(f"{schema}: compiled in {seconds * 1000:.1f} ms; {_enforced(compiled)}")
        for place in compiled.unenforced or ():
            print(f"only validated afterwards: {escape_controls(place)}")
        for line, accepted, text in verdicts:
            print(f"{instances}:{line}: {'accepted' if accepted else 'rejected'}: {escape_controls(text[:100])}")
        if instances is not None:
            print(f"{num_accepted:,} of {len(verdicts):,} accepted")
    return EXIT_DONE if num_accepted == len(verdicts) else EXIT_FAILED_ROWS


def _enforced(compiled: SchemaConstraint) -> str:
    return f"{len(compiled.unenforced)} parts are only validated" if compiled.unenforced else "all of it is enforced"


def _verdicts(compiled: SchemaConstraint, instances: Path) -> Iterator[tuple[int, bool, str]]:
    for number, line in enumerate(_text(instances).split("\n"), start=1):
        if line.strip():
            yield number, compiled.accepts(line), line


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SglbatchError("cannot-read", f"the file cannot be read: {error}", where=str(path)) from error


def _as_json(compiled: SchemaConstraint, seconds: float, verdicts: list[tuple[int, bool, str]]) -> dict[str, Any]:
    return {
        "compile_s": seconds,
        "unenforced": compiled.unenforced or [],
        "instances": [{"line": line, "accepted": accepted} for line, accepted, _ in verdicts],
    }
