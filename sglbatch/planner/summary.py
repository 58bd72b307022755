"""What a plan says in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What is known of a job before it runs. Tokens and requests are those of the first requests only.

    Args:
        num_rows: rows of the input.
        failed_rows: rows that have failed already, by error code.
        num_requests: distinct calls to run.
        num_equal_calls: further calls that equal one of those and take its answer.
        calls_reused: calls that an earlier run of the job has answered.
        rows_outside: rows that wait for an outside call; what they ask after it is in none of the numbers.
        num_too_long: requests whose prompt and longest answer do not fit the context; their rows will fail.
        longest_prompt_len: tokens of the longest prompt.
        prompt_tokens: prompt tokens of all requests, as the engine counts them (``Plan.num_tokens``).
        unique_tokens: what is computed of them when each shared beginning is computed once.
        best_hit_rate: share of the prompt tokens that need not be computed then, 0 to 1.
        most_generated_tokens: upper bound, every answer at its longest; a choice generates nothing.
        kv_tokens_minimum: the smallest pool that can finish the job (the largest request, prompt and answer).
        kv_tokens_whole: the pool that holds all unique tokens and every answer at its longest at the same time.
        kv_bytes_per_token: bytes of keys and values of one token for each dtype that the run may have; empty when the
            model's shape does not say.
        follow_up_rows: rows whose programs go on after these answers: they have asked for more already, or they read an
            answer and then decide. Each is taken for one follow-up call, so the number of those is an estimate.
    """

    num_rows: int
    failed_rows: Mapping[str, int] = field(default_factory=dict)
    num_requests: int
    num_equal_calls: int
    calls_reused: int
    num_too_long: int
    longest_prompt_len: int
    prompt_tokens: int
    unique_tokens: int
    best_hit_rate: float
    most_generated_tokens: int
    kv_tokens_minimum: int
    kv_tokens_whole: int
    kv_bytes_per_token: Mapping[str, int] = field(default_factory=dict)
    rows_outside: int = 0
    follow_up_rows: int = 0

    @property
    def num_failed_rows(self) -> int:
        return sum(self.failed_rows.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.num_rows,
            "rows_failed": self.num_failed_rows,
            "rows_failed_by_code": dict(sorted(self.failed_rows.items())),
            "requests": self.num_requests,
            "equal_calls": self.num_equal_calls,
            "calls_reused": self.calls_reused,
            "rows_waiting_outside": self.rows_outside,
            "requests_too_long": self.num_too_long,
            "longest_prompt_tokens": self.longest_prompt_len,
            "prompt_tokens": self.prompt_tokens,
            "unique_prompt_tokens": self.unique_tokens,
            "best_hit_rate": round(self.best_hit_rate, 6),
            "generated_tokens_at_most": self.most_generated_tokens,
            "kv_tokens_minimum": self.kv_tokens_minimum,
            "kv_tokens_whole": self.kv_tokens_whole,
            "kv_bytes_per_token": dict(self.kv_bytes_per_token),
            "follow_up_calls": {"estimated": True, "calls": self.follow_up_rows, "rows": self.follow_up_rows},
        }
