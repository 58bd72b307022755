"""From the calls that wait for an answer to the plan, its summary and the top of its tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglbatch.lang.calls import PendingCall
from sglbatch.planner.estimate import answer_tokens
from sglbatch.planner.plan import Plan, make_plan
from sglbatch.planner.summary import Summary
from sglbatch.planner.tree import Tree, top_of_tree
from sglbatch.types import ErrorInfo, TokenIds


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """What the job knows beside its calls.

    Args:
        num_rows: rows of the input.
        errors: of the rows that have failed already (bad input, a program that raised).
        calls_reused: calls answered from the journal.
        rows_outside: rows that wait for an outside call, which planning does not make.
        context_len: tokens that a prompt and its answer may have together.
        kv_bytes_per_token: by dtype, see ``estimate.kv_bytes_per_token``.
    """

    num_rows: int
    context_len: int
    errors: Sequence[ErrorInfo] = ()
    calls_reused: int = 0
    rows_outside: int = 0
    kv_bytes_per_token: Mapping[str, int] = field(default_factory=dict)


def plan_calls(calls: Sequence[PendingCall], facts: JobFacts, *, max_nodes: int = 12) -> tuple[Plan, Summary, Tree]:
    """Plan the calls that wait for an answer, one for each distinct call; ``plan.positions()[i]`` is ``calls[i]``'s."""

    def decode(ids: TokenIds) -> str:
        return calls[0].decode(ids)  # a node's text is asked for, so there are calls

    prompts = [call.prompt_ids for call in calls]
    operations = [call.operation for call in calls]
    answers = answer_tokens(operations)
    plan = make_plan(prompts, operations)
    tree = top_of_tree(plan.order, plan.lcp, prompts, decode, max_nodes=max_nodes)
    summary = Summary(
        num_rows=facts.num_rows,
        failed_rows=Counter(error.code for error in facts.errors),
        num_requests=len(calls),
        num_equal_calls=sum(len(call.waiters) - 1 for call in calls),
        calls_reused=facts.calls_reused,
        rows_outside=facts.rows_outside,
        num_too_long=sum(len(p) + a.context > facts.context_len for p, a in zip(prompts, answers, strict=True)),
        longest_prompt_len=int(plan.lengths.max(initial=0)),
        prompt_tokens=plan.num_tokens,
        unique_tokens=plan.unique_tokens,
        best_hit_rate=plan.best_hit_rate,
        most_generated_tokens=sum(answer.generated for answer in answers),
        kv_tokens_minimum=plan.kv_tokens_minimum,
        kv_tokens_whole=plan.kv_tokens_whole,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        follow_up_rows=len({program_id for call in calls if call.keep for program_id in call.program_ids}),
    )
    return plan, summary, tree
