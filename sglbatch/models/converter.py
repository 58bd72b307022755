"""Runs the GGUF conversion in a process of its own: the caller stays free of torch, and its memory is given back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from sglbatch.errors import ModelError
from sglbatch.models.cache import Report

CONVERTER_VERSION: Final = 1
"""Raise it when convert.py writes something else for the same file: what is cached is then made anew."""


def run_converter(gguf: Path, folder: Path, *, report: Report) -> None:
    """Fills the empty ``folder`` from a GGUF file; see convert.py.

    Raises:
        ModelError: ``conversion-failed`` with the converter's reason.
    """
    report(f"converting {gguf.name} to safetensors, once")
    command = [sys.executable, "-m", "sglbatch.models.convert", str(gguf), str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise ModelError(
            "conversion-failed",
            f"the file could not be converted: {lines[-1] if lines else f'exit code {done.returncode}'}",
            hint="use the model's folder in Hugging Face format instead",
            where=str(gguf),
        )
    for line in done.stdout.splitlines():
        report(line)
