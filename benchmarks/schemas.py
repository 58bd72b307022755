"""How many real JSON Schemas are compiled, and whether what they accept is right, beside llguidance alone.

    python benchmarks/schemas.py --maskbench maskbench_dev.parquet --suite json_schema_test_suite.parquet [--sample N]

maskbench: rows of (name, schema, tests: [(valid, data)]). An instance counts as accepted when ``accepts`` says so: its
value is judged in the constraint's own form, with an object's properties in any order; for llguidance (byte tokens, its
own white space) the instance is written as json.dumps writes it, in its own order. A schema that takes longer than the
limit counts as not compiled.

test suite: the required parts, ``format`` describing only, as the suite has it.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from llguidance import LLMatcher, LLTokenizer

from sglbatch.engine.fsm import SchemaConstraint
from sglbatch.errors import ConstraintError, UnsupportedSchemaError

LIMIT_S = 10.0
Accepts = Callable[[str], bool]
"""Whether an instance, as JSON text, is accepted."""


@dataclass
class Score:
    """Counts of one engine over maskbench."""

    schemas: int = 0
    compiled: int = 0
    all_right: int = 0
    valid: int = 0
    valid_accepted: int = 0
    invalid: int = 0
    invalid_accepted: int = 0
    seconds: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, tests: list[dict[str, Any]], accepts: Accepts) -> None:
        self.compiled += 1
        right = True
        for test in tests:
            accepted = accepts(test["data"])
            if test["valid"]:
                self.valid += 1
                self.valid_accepted += accepted
            else:
                self.invalid += 1
                self.invalid_accepted += accepted
            right = right and accepted == test["valid"]
        self.all_right += right
        if not right:
            self.wrong.append(name)

    def line(self, label: str) -> str:
        times = sorted(self.seconds)
        return (
            f"{label:<12}{self.compiled / self.schemas:>9.2%}{_share(self.valid_accepted, self.valid):>10}"
            f"{self.invalid_accepted:>9,} of {self.invalid:<7,}{self.all_right / self.schemas:>9.2%}"
            f"{1000 * statistics.median(times):>10.1f}"
            f"{1000 * times[int(len(times) * 0.99)]:>9.0f}{1000 * times[-1]:>9.0f}"
        )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


class OverLimit(Exception):
    """A schema took too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def over(number: int, frame: Any) -> None:
        raise OverLimit

    previous = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def ours(schema: str) -> Accepts:
    return SchemaConstraint(json.loads(schema)).accepts


def llguidance_alone(tokenizer: LLTokenizer) -> Callable[[str], Accepts]:
    def compile_it(schema: str) -> Accepts:
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
        if matcher.get_error():
            raise ConstraintError("refused", matcher.get_error().split("\n")[0][:60])

        def accepts(text: str) -> bool:
            data = json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "surrogatepass")
            matcher.reset()
            return bool(matcher.validate_tokens(list(data)) == len(data) and _ends(matcher, data))

        return accepts

    return compile_it


def _ends(matcher: LLMatcher, data: bytes) -> bool:
    return bool(matcher.consume_tokens(list(data)) and matcher.is_accepting())


def judge(rows: list[dict[str, Any]], compile_it: Callable[[str], Accepts], limit_s: float) -> Score:
    score = Score()
    for row in rows:
        score.schemas += 1
        begin = time.perf_counter()
        try:
            with time_limit(limit_s):
                accepts = compile_it(row["schema"])
        except OverLimit:
            score.refused["over the time limit"] += 1
            continue
        except (ConstraintError, ValueError) as error:
            reason = error.keyword if isinstance(error, UnsupportedSchemaError) else getattr(error, "code", "refused")
            score.refused[reason if reason != "refused" else str(error)] += 1
            continue
        finally:
            score.seconds.append(time.perf_counter() - begin)
        score.add(row["name"], row["tests"], accepts)
    return score


def judge_suite(rows: list[dict[str, Any]]) -> Counter[str]:
    """Groups of the test suite: right on all tests, refused, or wrong."""
    found: Counter[str] = Counter()
    for row in rows:
        draft = "7" if row["draft"] == "draft7" else "2020-12"
        try:
            compiled = SchemaConstraint(json.loads(row["schema"]), draft=draft, formats=False)
        except ConstraintError as error:
            nothing = error.code == "unsatisfiable-schema" and not any(test["valid"] for test in row["tests"])
            found["right" if nothing else "refused"] += 1
            continue
        right = all(compiled.accepts(test["data"]) == test["valid"] for test in row["tests"])
        found["right" if right else "wrong"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maskbench", type=Path, required=True)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--sample", type=int, help="only so many schemas, drawn with seed 0")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    options = parser.parse_args()
    rows = pq.read_table(options.maskbench).to_pylist()
    if options.sample:
        rows = random.Random(0).sample(rows, options.sample)
    print(f"{len(rows):,} schemas of {options.maskbench.name}")
    print(f"{'':<12}{'compiled':>9}{'valid':>10}{'invalid accepted':>20}{'all right':>9}", end="")
    print(f"{'median ms':>10}{'p99':>9}{'max':>9}")
    tokenizer = LLTokenizer("byte")
    for label, compile_it in (("sglbatch", ours), ("llguidance", llguidance_alone(tokenizer))):
        score = judge(rows, compile_it, options.limit_s)
        print(score.line(label))
        print(f"  refused: {', '.join(f'{k} {n}' for k, n in score.refused.most_common(12))}")
        print(f"  wrong: {', '.join(score.wrong[:12]) or 'none'}", flush=True)
    if options.suite:
        found = judge_suite(pq.read_table(options.suite).to_pylist())
        print(f"test suite: {found['right']} groups right, {found['refused']} refused, {found['wrong']} wrong")


if __name__ == "__main__":
    main()
