"""The ways in which the GPU benchmark runs constrained rows, on a CPU and a model of two layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
REGEX = r'\{"name": "[A-Z][a-z]{2,5}", "active": (true|false), "role": "(admin|editor)", "level": [1-9]\}'


def _run(tokenizer: Path, folder: Path, *options: str) -> dict[str, Any]:
    rows = [
        {"prompt": f"A record for user {i}: ", "max_tokens": 60, "ignore_eos": False, "regex": REGEX} for i in range(6)
    ]
    workload, out = folder / "json.jsonl", folder / "out.json"
    workload.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), str(tokenizer), str(workload), *options]
    command += ["--shape", "tiny", "--kv-tokens", "4000", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(out.read_text())["results"]
    return dict(result)


@pytest.mark.slow
def test_steps_and_rebuilding_change_nothing_of_the_answers(smollm2_dir: Path, tmp_path: Path) -> None:
    fast = _run(smollm2_dir, tmp_path)
    slow = _run(smollm2_dir, tmp_path, "--no-jump-forward")
    rebuilt = _run(smollm2_dir, tmp_path, "--rebuild-masks")
    assert fast["out_tokens"] == slow["out_tokens"] == rebuilt["out_tokens"] > 60
    assert fast["jumped_tokens"] == rebuilt["jumped_tokens"] > 0 == slow["jumped_tokens"]
    assert fast["steps"] < slow["steps"]
    assert (fast["rebuild_masks"], rebuilt["rebuild_masks"]) == (False, True)
