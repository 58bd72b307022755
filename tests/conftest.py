"""Fixtures that several test files share: the real model and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglbatch.models import resolve_model
from sglbatch.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The folder of smollm2-135m in the user's cache; test workers that start together fetch it once."""
    return resolve_model("smollm2-135m").path


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_dir)
