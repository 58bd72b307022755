"""The calls that an engine makes before its first job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglbatch.engine.loader import load_engine
from sglbatch.engine.rehearsal import NUM_IDS, NUM_ROWS, OTHERS, rehearse
from sglbatch.models import resolve_model
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Choose, Request


@pytest.mark.parametrize("kv_tokens", [2_000, 20])
def test_calls_of_every_kind_end_and_leave_nothing(
    smollm2_dir: Path, smollm2_tokenizer: Tokenizer, kv_tokens: int
) -> None:
    engine = load_engine(resolve_model(str(smollm2_dir)), smollm2_tokenizer, device="cpu", kv_tokens=kv_tokens)
    engine._overlap = True
    results = rehearse(engine)
    assert len(results) == NUM_ROWS * (2 + len(OTHERS))
    refused = {result.error.code for result in results if result.error is not None}
    assert refused == ({"prompt-too-long"} if kv_tokens == 20 else set())
    assert not engine.has_unfinished and engine.scheduler.pool.num_free == kv_tokens
    engine.scheduler.check_integrity()


class Listener:
    """An engine that only hears what is asked."""

    has_unfinished = False

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests


def test_calls_are_made_of_ids_that_every_vocabulary_has() -> None:
    """An id that a model lacks is an error on the device, after which that cannot be used any more."""
    engine: Any = Listener()
    rehearse(engine)
    ids = {token_id for request in engine.requests for token_id in request.prompt_ids.tolist()}
    for request in engine.requests:
        if isinstance(request.operation, Choose):
            ids |= {token_id for alternative in request.operation.alternatives for token_id in alternative}
    assert ids <= set(range(NUM_IDS))
    assert len({request.prompt_ids.tobytes() for request in engine.requests}) == NUM_ROWS
