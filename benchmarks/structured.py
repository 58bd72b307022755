"""What forced runs save, whether they change anything, and whether what is generated is valid.

    python benchmarks/structured.py instances --maskbench maskbench_dev.parquet [--sample N]
    python benchmarks/structured.py model --maskbench maskbench_dev.parquet [--rows N] [--schemas N]
    python benchmarks/structured.py orders [--rows N]
    python benchmarks/structured.py job --maskbench maskbench_dev.parquet --folder DIR [--rows N] [--schemas N]

instances: valid instances are written as the constraint writes them and their tokens fed one by one; a forced run
counts as no step. Properties stand in the schema's order, so only instances that have them so are counted.

model: greedy answers of smollm2-135m under real schemas, with jump-forward and with the same tokens one a step, which
must give the same ids.

orders: a task with known answers, with forced runs and with plain masking (no forced runs at all).

job: a whole `sglbatch run --complete` under real schemas as they are; the same command continues one that was stopped.

Each adds its figures to --out, a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from jsonschema.validators import validator_for
from structured_job import run_job

import sglbatch
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.fsm import Forced, SchemaConstraint, TokenMasks
from sglbatch.engine.fsm.guide import Guide, forced_bytes, whole_characters
from sglbatch.errors import ConstraintError
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, Request, Result, Text

MODEL = "smollm2-135m"
SUBJECTS = ("a library", "a small shop", "a hospital", "a football club", "a bakery", "a travel agency")
MAX_SCHEMA_LEN = 600
"""Characters of a schema that is put into a prompt."""

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["instances", "model", "orders", "job"])
    parser.add_argument("--maskbench", type=Path)
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--schemas", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--folder", type=Path, help="of the job")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = measure(options)
    print(json.dumps(figures, indent=1))
    if options.out:
        known = json.loads(options.out.read_text()) if options.out.exists() else {}
        known[options.what] = {**figures, "machine": machine()}
        options.out.write_text(json.dumps(known, indent=1) + "\n")


def measure(options: argparse.Namespace) -> Figures:
    if options.what == "orders":
        return measure_orders(options.rows)
    rows = pq.read_table(options.maskbench).to_pylist()
    if options.what == "instances":
        return measure_instances(random.Random(0).sample(rows, options.sample))
    if options.what == "model":
        return measure_model(closed_schemas(rows, options.schemas), options.rows, options.max_tokens)
    tokenizer = sglbatch.load_tokenizer(MODEL)
    schemas = completable_schemas(rows, options.schemas, tokenizer, options.max_tokens)
    subjects = [SUBJECTS[i // len(schemas) % len(SUBJECTS)] for i in range(options.rows)]
    data = [{"schema": schemas[i % len(schemas)], "subject": s, "number": i} for i, s in enumerate(subjects)]
    return {"schemas": len(schemas), **run_job(data, MODEL, options.folder, max_tokens=options.max_tokens)}


def machine() -> Figures:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
    }


# --- instances ---------------------------------------------------------------------------------


def measure_instances(rows: list[dict[str, Any]]) -> Figures:
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
    return {
        "schemas": len(rows),
        "valid_instances": num_instances,
        "not_in_the_schemas_order": num_skipped,
        "tokens": num_tokens,
        "forced": num_forced,
        "share_of_decode_steps_saved": round(num_forced / num_tokens, 4),
    }


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


# --- a model under real schemas ----------------------------------------------------------------


def measure_model(schemas: list[str], num_rows: int, max_tokens: int) -> Figures:
    engine = sglbatch.Runtime(MODEL, retain=False)
    requests = []
    for i in range(num_rows):
        schema, subject = schemas[i % len(schemas)], SUBJECTS[i // len(schemas) % len(SUBJECTS)]
        user = f"Schema: {schema}\nWrite one JSON object that fits it, for {subject} (case {i})."
        requests.append(request(engine.tokenizer, i, user, schema, max_tokens))
    jumped, fast = answer(engine, requests)
    engine.jump_forward = False
    one_a_step, slow = answer(engine, requests)
    pairs = list(zip(jumped, one_a_step, strict=True))
    return {
        "rows": num_rows,
        "schemas": len(schemas),
        "max_tokens": max_tokens,
        "same_text": sum(a.text == b.text for a, b in pairs),
        "same_ids": sum(a.output_ids == b.output_ids for a, b in pairs),
        "jump_forward": fast,
        "one_a_step": slow,
        **validity(requests, jumped),
        **canonicity(requests, jumped, engine.tokenizer),
    }


def validity(requests: list[Request], results: list[Result]) -> Figures:
    finished = [(q, r) for q, r in zip(requests, results, strict=True) if r.error is None]
    return {
        "finished": len(finished),
        "valid_of_finished": sum(is_valid(schema_of(q), r.text) for q, r in finished),
        "errors": sorted({r.error.code for r in results if r.error is not None}),
    }


def is_valid(schema: str, text: str) -> bool:
    value = json.loads(schema)
    kind = validator_for(value)
    return bool(kind(value, format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text)))


def canonicity(requests: list[Request], results: list[Result], tokenizer: Tokenizer) -> Figures:
    """Every forced run of the answers against the tokenizer's own tokens of the bytes that had to follow."""
    masks = TokenMasks(tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.vocab_size)
    compiled = {schema: SchemaConstraint(json.loads(schema)) for schema in set(map(schema_of, requests))}
    num_runs = num_canonical = 0
    for asked, result in zip(requests, results, strict=True):
        guide = masks.guide(compiled[schema_of(asked)])
        forced = Forced(guide, tokenizer.encode)
        state, ids = guide.start, list(result.output_ids)
        while ids:
            num = len(forced.tokens(state))
            if 0 < num <= len(ids):
                canonical = tokenizer.encode(whole_characters(forced_bytes(guide, state)).decode())
                num_runs += 1
                num_canonical += ids[:num] == canonical[:num]
            for token in ids[: num or 1]:
                state = guide.advance(state, token)
            del ids[: num or 1]
    return {"forced_runs": num_runs, "canonical_forced_runs": num_canonical}


def schema_of(asked: Request) -> str:
    operation = asked.operation
    assert isinstance(operation, Generate) and operation.constraint is not None
    return operation.constraint.source


def closed_schemas(rows: list[dict[str, Any]], number: int) -> list[str]:
    """Schemas of a few properties, closed, as calls of functions have them."""
    found: list[str] = []
    for row in random.Random(1).sample(rows, len(rows)):
        schema = json.loads(row["schema"])
        if not isinstance(schema, dict) or not 2 <= len(schema.get("properties", {})) <= 6 or len(row["schema"]) > 1200:
            continue
        closed = {**schema, "additionalProperties": False}
        try:
            SchemaConstraint(closed)
        except ConstraintError:
            continue
        found.append(json.dumps(closed))
        if len(found) == number:
            break
    return found


def completable_schemas(rows: list[dict[str, Any]], number: int, tokenizer: Tokenizer, max_tokens: int) -> list[str]:
    """Schemas as they are, of which some value fits ``max_tokens``."""
    masks = TokenMasks(tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.vocab_size)
    found: list[str] = []
    for row in random.Random(2).sample(rows, len(rows)):
        if len(row["schema"]) > MAX_SCHEMA_LEN:
            continue
        try:
            guide = masks.guide(SchemaConstraint(json.loads(row["schema"])))
        except ConstraintError:
            continue
        if len(Forced(guide, tokenizer.encode).completion(guide.start)) <= max_tokens:
            found.append(row["schema"])
        if len(found) == number:
            break
    return found


def request(tokenizer: Tokenizer, number: int, user: str, schema: str, max_tokens: int) -> Request:
    text = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    return prompt_request(tokenizer, number, text, schema, max_tokens)


def prompt_request(tokenizer: Tokenizer, number: int, prompt: str, schema: str, max_tokens: int) -> Request:
    (prompt_ids,) = tokenizer.encode_prompts([(Text(prompt, frozenset(tokenizer.specials)),)])
    return Request(
        request_id=number,
        program_id=number,
        prompt_ids=np.asarray(prompt_ids),
        operation=Generate(
            max_tokens=max_tokens, temperature=0.0, constraint=Constraint(kind="json_schema", source=schema)
        ),
        seed=number,
    )


def answer(engine: LocalEngine, requests: list[Request]) -> tuple[list[Result], Figures]:
    jumped, steps = engine.num_jumped_tokens, engine.stats().steps
    engine.submit(requests)
    results: list[Result] = []
    begin = time.perf_counter()
    while engine.has_unfinished:
        results += engine.step()
    seconds = time.perf_counter() - begin
    results.sort(key=lambda result: result.request_id)
    num_tokens = sum(result.usage.generated_tokens for result in results)
    saved = engine.num_jumped_tokens - jumped
    figures = {
        "tokens": num_tokens,
        "seconds": round(seconds, 1),
        "steps": engine.stats().steps - steps,
        "tokens_without_a_step": saved,
        "share_of_decode_steps_saved": round(saved / num_tokens, 4),
    }
    print(figures, flush=True)
    return results, figures


# --- a task with known answers -----------------------------------------------------------------

ORDER = json.dumps(
    {
        "type": "object",
        "properties": {
            "item": {"type": "string", "maxLength": 30},
            "count": {"type": "integer", "minimum": 1, "maximum": 100},
            "category": {"enum": ["food", "kitchen", "garden", "office"]},
            "express": {"type": "boolean"},
        },
        "required": ["item", "count", "category", "express"],
        "additionalProperties": False,
    }
)
ITEMS = {
    "food": ("apples", "lemons", "loaves of bread", "jars of honey", "bags of rice"),
    "kitchen": ("kettles", "frying pans", "teapots", "spoons", "knives"),
    "garden": ("spades", "flower pots", "rakes", "hoses", "seed packets"),
    "office": ("pencils", "notebooks", "staplers", "envelopes", "folders"),
}
EXAMPLES = """\
Message: Please send me 3 bags of flour. No hurry.
Order: {"item": "bags of flour", "count": 3, "category": "food", "express": false}

Message: I need 2 desk lamps by tomorrow!
Order: {"item": "desk lamps", "count": 2, "category": "office", "express": true}

Message: Please send me 12 ladles. No hurry.
Order: {"item": "ladles", "count": 12, "category": "kitchen", "express": false}

Message: I need 5 watering cans by tomorrow!
Order: {"item": "watering cans", "count": 5, "category": "garden", "express": true}

"""


class NoRuns(Forced):
    """Plain masking: nothing is forced, and the model picks among the legal tokens at each place."""

    def tokens(self, state: int) -> tuple[int, ...]:
        return ()


def orders(number: int) -> list[tuple[str, dict[str, Any]]]:
    """Messages and the orders in them."""
    draw = random.Random(3)
    found = []
    for _ in range(number):
        category = draw.choice(sorted(ITEMS))
        item, count, express = draw.choice(ITEMS[category]), draw.randint(2, 99), draw.random() < 0.5
        message = f"I need {count} {item} by tomorrow!" if express else f"Please send me {count} {item}. No hurry."
        found.append((message, {"item": item, "count": count, "category": category, "express": express}))
    return found


def measure_orders(num_rows: int) -> Figures:
    engine = sglbatch.Runtime(MODEL, retain=False)
    known = orders(num_rows)
    requests = [
        prompt_request(engine.tokenizer, i, f"{EXAMPLES}Message: {message}\nOrder: ", ORDER, 64)
        for i, (message, _) in enumerate(known)
    ]
    forced, fast = answer(engine, requests)
    engine._forced.clear()
    engine._forced_runs = lambda guide: NoRuns(guide, engine.tokenizer.encode)  # type: ignore[method-assign]
    plain, slow = answer(engine, requests)
    return {
        "rows": num_rows,
        "differing_texts": sum(a.text != b.text for a, b in zip(forced, plain, strict=True)),
        "differing_ids": sum(a.output_ids != b.output_ids for a, b in zip(forced, plain, strict=True)),
        "forced_runs": {**fast, **accuracy(forced, known)},
        "plain_masking": {**slow, **accuracy(plain, known)},
    }


def accuracy(results: list[Result], known: list[tuple[str, dict[str, Any]]]) -> Figures:
    values = [json.loads(r.text) if r.error is None else {} for r in results]
    truths = [truth for _, truth in known]
    names = ("item", "count", "category", "express")
    right = {name: sum(v.get(name) == t[name] for v, t in zip(values, truths, strict=True)) for name in names}
    return {"right": {**right, "all": sum(v == t for v, t in zip(values, truths, strict=True))}}


if __name__ == "__main__":
    main()
