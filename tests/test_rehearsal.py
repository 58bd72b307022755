"""The calls that an engine makes before its first job."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglbatch.engine.loader import load_engine
from sglbatch.engine.rehearsal import NUM_ROWS, OTHERS, rehearse
from sglbatch.models import resolve_model
from sglbatch.tokenizer import Tokenizer


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
