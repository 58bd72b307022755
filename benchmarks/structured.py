"""What forced runs save, and whether they change anything.

    python benchmarks/structured.py instances --maskbench maskbench_dev.parquet [--sample N]
    python benchmarks/structured.py model --maskbench maskbench_dev.parquet [--rows N] [--schemas N]

instances: valid instances are written as the constraint writes them and their tokens fed one by one; a forced run
counts as no step. Properties stand in the schema's order, so only instances that have them so are counted.

model: greedy answers of smollm2-135m under real schemas, with jump-forward and with the same tokens one a step, which
must give the same ids.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from jsonschema import Draft202012Validator

import sglbatch
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.fsm import Forced, SchemaConstraint, TokenMasks
from sglbatch.engine.fsm.guide import Guide
from sglbatch.errors import ConstraintError
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, Request, Result, Text

MODEL = "smollm2-135m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["instances", "model"])
    parser.add_argument("--maskbench", type=Path, required=True)
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--schemas", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    rows = pq.read_table(options.maskbench).to_pylist()
    if options.what == "instances":
        measure_instances(random.Random(0).sample(rows, options.sample))
    else:
        measure_model(rows, options)


def measure_instances(rows: list[dict[str, Any]]) -> None:
    tokenizer = sglbatch.load_tokenizer(MODEL)
    masks = TokenMasks(tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.vocab_size)
    num_tokens = num_forced = num_instances = num_skipped = 0
    for row in rows:
        try:
            constraint = SchemaConstraint(json.loads(row["schema"]))
            guide = masks.guide(constraint)
        except ConstraintError:
            continue
        forced = Forced(guide, tokenizer.encode)
        for test in row["tests"]:
            data = constraint.canonical(json.loads(test["data"])) if test["valid"] else b""
            counted = walk(guide, forced, tokenizer, data) if data else None
            if counted is None:
                num_skipped += test["valid"]
                continue
            num_instances += 1
            num_tokens += counted[0]
            num_forced += counted[1]
    print(f"{num_instances:,} valid instances ({num_skipped:,} not in the schema's order): {num_tokens:,} tokens")
    print(f"forced: {num_forced:,}, {num_forced / num_tokens:.1%} of the decode steps")


def walk(guide: Guide, forced: Forced, tokenizer: Tokenizer, data: bytes) -> tuple[int, int] | None:
    """(tokens, forced ones among them) of a text; None where it is not one of the constraint's."""
    state, num_tokens, num_forced = guide.start, 0, 0
    try:
        while data:
            run = forced.tokens(state)
            tokens = run or tokenizer.encode(data.decode())[:1]
            for token in tokens:
                piece = guide.bytes_of(token)
                if not data.startswith(piece):
                    return None
                state = guide.advance(state, token)
                if state < 0:
                    return None
                data = data[len(piece) :]
            num_tokens += len(tokens)
            num_forced += len(run)
    except UnicodeDecodeError:
        return None
    return (num_tokens, num_forced) if guide.may_end(state) else None


def measure_model(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    engine = sglbatch.Runtime(MODEL, retain=False)
    schemas = chosen_schemas(rows, options.schemas)
    requests = [
        request(engine.tokenizer, i, schemas[i % len(schemas)], options.max_tokens) for i in range(options.rows)
    ]
    modes = {"jump-forward": True, "one a step": False}
    answers: dict[str, list[Result]] = {}
    for label, jump_forward in modes.items():
        engine.jump_forward = jump_forward
        answers[label] = answer(engine, requests, label)
    same = sum((a.text, a.output_ids) == (b.text, b.output_ids) for a, b in zip(*answers.values(), strict=True))
    print(f"same text and ids: {same} of {len(requests)}")
    report_validity(requests, answers["jump-forward"])


def report_validity(requests: list[Request], results: list[Result]) -> None:
    finished = [(q, r) for q, r in zip(requests, results, strict=True) if r.error is None]
    valid = 0
    for asked, result in finished:
        operation = asked.operation
        assert isinstance(operation, Generate) and operation.constraint is not None
        validator = Draft202012Validator(json.loads(operation.constraint.source))
        valid += validator.is_valid(json.loads(result.text))
    print(f"finished: {len(finished)} of {len(results)}; valid of finished: {valid / max(1, len(finished)):.1%}")


def chosen_schemas(rows: list[dict[str, Any]], number: int) -> list[str]:
    """Closed schemas of a few properties, as calls of functions have them."""
    found = []
    for row in random.Random(1).sample(rows, len(rows)):
        schema = json.loads(row["schema"])
        if not isinstance(schema, dict) or not 2 <= len(schema.get("properties", {})) <= 6 or len(row["schema"]) > 1200:
            continue
        try:
            SchemaConstraint({**schema, "additionalProperties": False})
        except ConstraintError:
            continue
        found.append(json.dumps({**schema, "additionalProperties": False}))
        if len(found) == number:
            break
    return found


def request(tokenizer: Tokenizer, number: int, schema: str, max_tokens: int) -> Request:
    subjects = ("a library", "a small shop", "a hospital", "a football club", "a bakery", "a travel agency")
    user = f"Write one JSON object for {subjects[number % len(subjects)]} (case {number}). Its schema: {schema}"
    text = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    (prompt_ids,) = tokenizer.encode_prompts([(Text(text, frozenset(tokenizer.specials)),)])
    return Request(
        request_id=number,
        program_id=number,
        prompt_ids=np.asarray(prompt_ids),
        operation=Generate(
            max_tokens=max_tokens, temperature=0.0, constraint=Constraint(kind="json_schema", source=schema)
        ),
        seed=number,
    )


def answer(engine: LocalEngine, requests: list[Request], label: str) -> list[Result]:
    jumped = engine.num_jumped_tokens
    engine.submit(requests)
    results: list[Result] = []
    begin = time.perf_counter()
    while engine.has_unfinished:
        results += engine.step()
    seconds = time.perf_counter() - begin
    results.sort(key=lambda result: result.request_id)
    num_tokens = sum(result.usage.generated_tokens for result in results)
    saved = engine.num_jumped_tokens - jumped
    print(
        f"{label}: {num_tokens:,} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s; "
        f"{saved:,} ({saved / num_tokens:.1%}) took no step of their own",
        flush=True,
    )
    return results


if __name__ == "__main__":
    main()
