"""A model that is a hash of its prefix and keeps to masks: constrained generation without weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from sglbatch.engine.decision import Output
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.fsm.bitmask import allowed_ids
from sglbatch.engine.passes import Pending as InFlight
from sglbatch.engine.sampler import Sampling
from sglbatch.engine.scheduler import SchedulerConfig
from sglbatch.engine.sequence import Step
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, Request, Result
from tests.engine_stub import StubPending, StubRunner

NUM_SLOTS = 20_000


class MaskedRunner(StubRunner):
    """Draws among the allowed tokens by a hash of the tokens before, whatever the step they come in."""

    def launch(self, step: Step, samplings: Sequence[Sampling | None], before: InFlight | None) -> StubPending:
        super().run(step, before)
        outputs: list[Output] = []
        for action, sampling in zip(step.actions, samplings, strict=True):
            assert sampling is not None and sampling.mask_W is not None
            ids = allowed_ids(sampling.mask_W)
            assert len(ids), "a mask leaves something"
            outputs.append(int(ids[zlib.crc32(repr(action.row.stored).encode()) % len(ids)]))
        return StubPending(outputs)


def generate(
    tokenizer: Tokenizer,
    schemas: Sequence[str],
    *,
    jump_forward: bool = True,
    max_tokens: int = 300,
    complete: bool = False,
    stop: tuple[str, ...] = (),
) -> tuple[list[Result], int]:
    """One answer for each schema (JSON text), and the steps it took."""
    config = SchedulerConfig(num_slots=NUM_SLOTS, max_batch_tokens=4096, max_rows=512)
    engine = LocalEngine(MaskedRunner(NUM_SLOTS), tokenizer, identity="hash", context_len=4096, scheduler_config=config)
    engine.jump_forward = jump_forward
    requests = [
        Request(
            request_id=i,
            program_id=i,
            prompt_ids=np.array([i + 5, 7], dtype=np.int32),
            operation=Generate(
                max_tokens=max_tokens,
                temperature=0.0,
                constraint=Constraint(kind="json_schema", source=schema),
                complete=complete,
                stop=stop,
            ),
            seed=i,
        )
        for i, schema in enumerate(schemas)
    ]
    engine.submit(requests)
    results: list[Result] = []
    while engine.has_unfinished:
        results += engine.step()
        engine.scheduler.check_integrity()
    return sorted(results, key=lambda result: result.request_id), engine.stats().steps
