"""The backend of a job."""

from __future__ import annotations

from typing import Any

from sglbatch.job.config import RunConfig
from sglbatch.models import LocalModel
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Backend


def load_local(model: LocalModel, tokenizer: Tokenizer, config: RunConfig) -> Backend:
    """The engine in this process. Imports torch, so it is called only when there is something to compute."""
    from sglbatch.engine import load_engine

    sizes: dict[str, Any] = {"kv_tokens": config.kv_tokens, "max_batch_tokens": config.max_batch_tokens}
    given = {name: value for name, value in sizes.items() if value is not None}
    backend: Backend = load_engine(model, tokenizer, dtype=config.dtype, reserve=config.reserve, **given)
    return backend
