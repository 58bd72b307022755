"""The wheel: what it carries, and that it works without the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_wheel_carries_templates_and_samples(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for folder in ("templates", "samples"):
        source = {path.name for path in (ROOT / folder).iterdir() if path.is_file()}
        assert {path.name for path in (site / "sglbatch" / folder).iterdir()} == source
    command = [sys.executable, "-m", "sglbatch", "init", "multiple_choice"]
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(command, cwd=work, env={**os.environ, "PYTHONPATH": str(site)}, check=True)
    assert {path.name for path in work.iterdir()} == {"multiple_choice.py", "questions.jsonl"}
