"""What calls may take beyond their prompts, known before they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglbatch.engine.radix.order import Lengths, Order, depth_first_order
from sglbatch.types import Generate, Operation, TokenIds, prefill_runs, unconditional_runs

NO_PROMPT: TokenIds = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Tokens behind the prompt of one call.

    A choice is scored, not sampled: its alternatives go through the model side by side, as ``types.prefill_runs``.

    Args:
        generated: the most that can be sampled.
        context: the most that an answer takes of the context: ``max_tokens``, or the longest alternative.
        kv: the most KV slots behind the prompt; an answer's last token needs none.
        num_runs: how often the prompt enters the order, 1 but for a choice with several longer alternatives.
        run_tokens: tokens of all runs behind the prompt.
        alone_tokens: of the runs that stand without the prompt (``types.unconditional_runs``).
    """

    generated: int
    context: int
    kv: int
    num_runs: int = 1
    run_tokens: int = 0
    alone_tokens: int = 0

    @staticmethod
    def of(operation: Operation) -> AnswerTokens:
        if isinstance(operation, Generate):
            return AnswerTokens(operation.max_tokens, operation.max_tokens, operation.max_tokens - 1)
        runs = prefill_runs(NO_PROMPT, operation)
        run_tokens = sum(map(len, runs))
        alone_tokens = sum(map(len, unconditional_runs(operation)))
        return AnswerTokens(
            generated=0,
            context=max(map(len, operation.alternatives)),
            kv=run_tokens + alone_tokens,
            num_runs=len(runs),
            run_tokens=run_tokens,
            alone_tokens=alone_tokens,
        )


def answer_tokens(operations: Sequence[Operation]) -> list[AnswerTokens]:
    """``AnswerTokens`` of each operation."""
    objects = _objects(operations)
    known = {operation: AnswerTokens.of(operation) for operation in set(objects)}  # a job has a handful
    of_object = {id(operation): known[operation] for operation in objects}
    return [of_object[id(operation)] for operation in operations]


def unique_run_tokens(prompts: Sequence[TokenIds], operations: Sequence[Operation], order: Order, lcp: Lengths) -> int:
    """Tokens that the calls' runs (``types.prefill_runs``) add to the radix tree of their prompts.

    Args:
        order, lcp: of the prompts, see ``depth_first_order``.
    """
    answers = answer_tokens(operations)
    if not any(answer.run_tokens for answer in answers):
        return 0
    alone: dict[Operation, int] = {}
    places = order.tolist()
    unique = start = 0
    while start < len(places):
        # Runs of different calls meet only where one prompt begins with the other: neighbours in the order.
        root_len = len(prompts[places[start]])
        stop = start + 1
        while stop < len(places) and lcp[stop] >= root_len:
            stop += 1
        group = places[start:stop]
        operation = operations[group[0]]
        if len(group) > 1 and any(answers[index].run_tokens for index in group):
            unique += _beyond_prompts([prompts[i][root_len:] for i in group], [operations[i] for i in group])
        elif answers[group[0]].run_tokens:
            if operation not in alone:
                alone[operation] = _beyond_prompts([NO_PROMPT], [operation])
            unique += alone[operation]
        start = stop
    return unique


def unique_alone_tokens(operations: Sequence[Operation]) -> int:
    """Tokens of the radix tree of all calls' runs that stand without a prompt: they go first, and once."""
    return _tree_size([run for operation in set(_objects(operations)) for run in unconditional_runs(operation)])


def _objects(operations: Sequence[Operation]) -> list[Operation]:
    """Each object once: hashing the operation of every call would take longer than the rest of a plan."""
    return list({id(operation): operation for operation in operations}.values())


def _beyond_prompts(prompts: Sequence[TokenIds], operations: Sequence[Operation]) -> int:
    calls = zip(prompts, operations, strict=True)
    return _tree_size([run for prompt, operation in calls for run in prefill_runs(prompt, operation)]) - _tree_size(
        prompts
    )


def _tree_size(prompts: Sequence[TokenIds]) -> int:
    return sum(map(len, prompts)) - int(depth_first_order(prompts)[1].sum())


def kv_bytes_per_token(config: Mapping[str, Any], *, bytes_per_value: int) -> int | None:
    """Bytes of keys and values that one token takes in all layers, from a Hugging Face ``config.json``.

    None when the configuration does not name its layers and heads in the usual way.
    """
    shape: Mapping[str, Any] = config.get("text_config") or config
    num_layers, num_heads = shape.get("num_hidden_layers"), shape.get("num_attention_heads")
    if not num_layers or not num_heads:
        return None
    head_dim = shape.get("head_dim") or (shape.get("hidden_size") or 0) // num_heads
    num_kv_heads = shape.get("num_key_value_heads") or num_heads
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_value if head_dim else None
