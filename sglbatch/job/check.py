"""``sglbatch check``: what a schema compiles to, and which instances it accepts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sglbatch.engine.automaton_cache import AutomatonCache
from sglbatch.engine.fsm import SchemaConstraint
from sglbatch.engine.fsm.compiled import parse_schema
from sglbatch.errors import EXIT_DONE, EXIT_FAILED_ROWS, ConstraintError, SglbatchError
from sglbatch.lang.schemas import Checks
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
    source = _text(schema)
    try:
        compiled = SchemaConstraint(
            parse_schema(source),
            separators="compact" if compact else "json",
            allow_unenforced=allow_unenforced,
            store=AutomatonCache(),
        )
    except ConstraintError as error:
        error.where = str(schema)
        raise
    seconds = time.perf_counter() - begin
    verdicts = list(_verdicts(compiled, source, instances)) if instances is not None else []
    num_accepted = sum(verdict.reason is None for verdict in verdicts)
    if as_json:
        print(json.dumps(_as_json(compiled, seconds, verdicts), indent=2))
    else:
        print(f"{schema}: compiled in {seconds * 1000:.1f} ms; {_enforced(compiled)}")
        for place in compiled.unenforced or ():
            print(f"only validated afterwards: {escape_controls(place)}")
        for verdict in verdicts:
            print(f"{instances}:{escape_controls(verdict.render())}")
        if instances is not None:
            print(f"{num_accepted:,} of {len(verdicts):,} accepted")
    return EXIT_DONE if num_accepted == len(verdicts) else EXIT_FAILED_ROWS


def _enforced(compiled: SchemaConstraint) -> str:
    num = len(compiled.unenforced or ())
    return f"{num} part{' is' if num == 1 else 's are'} only validated" if num else "all of it is enforced"


class _Verdict(NamedTuple):
    """Of one line (from 1): why its value is not accepted, or None."""

    line: int
    text: str
    reason: str | None

    def render(self) -> str:
        verdict, shown = ("accepted", self.text) if self.reason is None else ("rejected", self.reason)
        return f"{self.line}: {verdict}: {shown if len(shown) <= 200 else shown[:200] + '…'}"


def _verdicts(compiled: SchemaConstraint, source: str, instances: Path) -> Iterator[_Verdict]:
    checks = Checks()
    for number, line in enumerate(_text(instances).split("\n"), start=1):
        if line.strip():
            reason = checks.problem(source, line)
            if reason is None and not compiled.accepts(line):
                reason = "it is valid, but not among the values that are generated"
            yield _Verdict(number, line.strip(), reason)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SglbatchError("cannot-read", f"the file cannot be read: {error}", where=str(path)) from error


def _as_json(compiled: SchemaConstraint, seconds: float, verdicts: list[_Verdict]) -> dict[str, Any]:
    return {
        "compile_s": seconds,
        "unenforced": compiled.unenforced or [],
        "instances": [{"line": v.line, "accepted": v.reason is None, "reason": v.reason} for v in verdicts],
    }
