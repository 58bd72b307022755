"""Calls of every kind, put through an engine before its first job.

On a GPU what is used for the first time holds a job up: kernels are compiled, and the driver loads those of libraries
when they are first launched, for which it waits until the device has nothing left to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglbatch.engine.engine import LocalEngine
from sglbatch.types import Choose, Constraint, Generate, Operation, Request, Result

NUM_ROWS = 3
"""Of each kind, so that some are decoded together."""
PROMPT_LEN = 24
NUM_IDS = 4
"""Token ids from 0 on that calls are made of: any vocabulary has so many."""

PLAIN = Generate(max_tokens=4, temperature=0.0, ignore_eos=True)
OTHERS: Sequence[Operation] = (
    Generate(max_tokens=3, temperature=1.0, ignore_eos=True),
    Generate(max_tokens=3, temperature=0.7, top_p=0.9, min_tokens=2, frequency_penalty=0.1),
    Generate(max_tokens=2, temperature=0.0, num_top_logprobs=2, input_logprobs_from=1),
    Generate(
        max_tokens=16,
        temperature=0.0,
        constraint=Constraint(kind="regex", source="[0-9]{2} is (odd|even)"),
        exact_choices=True,
    ),
    Choose(alternatives=((1,), (2, 3))),
)


def rehearse(engine: LocalEngine) -> list[Result]:
    """Runs calls of every kind to their ends; plain ones alone too, since these are launched ahead."""
    results: list[Result] = []
    for operations in ([PLAIN], [PLAIN, *OTHERS]):
        engine.submit([_request(i, operation) for operation in operations for i in range(NUM_ROWS)])
        while engine.has_unfinished:
            results += engine.step()
    return results


def _request(number: int, operation: Operation) -> Request:
    prompt_ids = np.arange(PROMPT_LEN, dtype=np.int32) % NUM_IDS
    prompt_ids[-1] = number % NUM_IDS
    return Request(request_id=number, program_id=number, prompt_ids=prompt_ids, operation=operation, seed=number)
