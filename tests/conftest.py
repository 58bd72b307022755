"""Fixtures that several test files share: the real model and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

import pytest

from sglbatch.models import resolve_model
from sglbatch.tokenizer import Tokenizer
from tests.api_server import serving, smollm2_gguf

# Read when torch is loaded. By default its idle threads spin: two test workers on two cores then run 20 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The folder of smollm2-135m in the user's cache; test workers that start together fetch it once."""
    return resolve_model("smollm2-135m").path


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_dir)


@pytest.fixture(scope="session")
def api_url() -> Iterator[str]:
    """The base URL of a real OpenAI-compatible server with smollm2-135m."""
    with serving(smollm2_gguf()) as url:
        yield url
