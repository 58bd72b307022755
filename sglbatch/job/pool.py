"""Whether a job's calls fit the KV pool that was asked for, told before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from sglbatch.errors import SglbatchError
from sglbatch.job.prepare import Prepared
from sglbatch.lang.calls import PendingCall
from sglbatch.models import LocalModel
from sglbatch.planner import counted
from sglbatch.planner.estimate import answer_tokens


def too_large(calls: Sequence[PendingCall], ready: Prepared) -> list[tuple[PendingCall, int]]:
    """The calls that ``--kv-tokens`` leaves no room for, each with the slots that it needs; their rows will fail.

    Without ``--kv-tokens`` the pool's size is known only once the model is loaded.
    """
    pool = ready.config.kv_tokens
    if pool is None or not isinstance(ready.model, LocalModel):
        return []
    answers = answer_tokens([call.operation for call in calls])
    needed = [len(call.prompt_ids) + answer.kv for call, answer in zip(calls, answers, strict=True)]
    return [(call, num_slots) for call, num_slots in zip(calls, needed, strict=True) if num_slots > pool]


def check_pool(calls: Sequence[PendingCall], ready: Prepared) -> None:
    """Raises SglbatchError ``kv-too-small`` where every row of the job waits for a call that does not fit."""
    large = too_large(calls, ready)
    if len({program_id for call, _ in large for program_id in call.program_ids}) == len(ready.rows):
        raise SglbatchError(
            "kv-too-small",
            f"no row fits a KV pool of {ready.config.kv_tokens:,} tokens with its prompt and its longest answer",
            hint=f"--kv-tokens {max(num_slots for _, num_slots in large)} holds each of them; or leave it out, or "
            "lower --max-tokens",
        )


def pool_lines(calls: Sequence[PendingCall], ready: Prepared) -> list[str]:
    """What does not fit, for people."""
    large = too_large(calls, ready)
    if not large:
        return []
    most = max(num_slots for _, num_slots in large)
    return [
        f"warning: {counted(len(large), 'call')} of {len(calls):,} will fail: with its longest answer a prompt "
        f"needs up to {most:,} KV tokens; give --kv-tokens {most} or more"
    ]
