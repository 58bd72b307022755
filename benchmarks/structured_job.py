"""A whole job under real schemas, for structured.py: one row, one schema, one record."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jsonschema.validators import validator_for

TEMPLATE = '''\
"""Columns read: schema, subject, number."""

import sglbatch as sgl


@sgl.function(temperature=0.7)
def records(s, schema, subject, number):
    s += f"Schema: {schema}\\nJSON for {subject} {number}: " + sgl.gen("record", json_schema=schema)
'''


def run_job(rows: list[dict[str, Any]], model: str, folder: Path, *, max_tokens: int) -> dict[str, Any]:
    """Runs or continues the job in ``folder`` and checks every finished record against its row's schema."""
    folder.mkdir(parents=True, exist_ok=True)
    template, data, output = folder / "records.py", folder / "rows.jsonl", folder / "records.jsonl"
    template.write_text(TEMPLATE)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "sglbatch", "run", str(template), str(data), "--model", model, "-o", str(output)]
    command += ["--max-tokens", str(max_tokens), "--complete", "--max-failures", "100%"]
    begin = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - begin
    records = [json.loads(line) for line in output.read_text().splitlines()]
    errors = Counter(record["_error"]["code"] for record in records if record["_error"])
    valid = 0
    for row, record in zip(rows, records, strict=True):
        schema = json.loads(row["schema"])
        kind = validator_for(schema)
        check = kind(schema, format_checker=kind.FORMAT_CHECKER)
        valid += record["_error"] is None and check.is_valid(record["record"])
    return {
        "rows": len(rows),
        "max_tokens": max_tokens,
        "finished": len(records) - errors.total(),
        "valid_of_finished": valid,
        "errors": dict(errors),
        "seconds_of_the_last_run": round(seconds, 1),
    }
