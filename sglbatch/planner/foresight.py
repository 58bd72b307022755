"""What a job will ask beyond its first calls, as far as its program's trace can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sglbatch.engine.fsm.compiled import Compiler
from sglbatch.engine.radix.order import depth_first_order
from sglbatch.lang.calls import ModelCall
from sglbatch.lang.environment import Environment
from sglbatch.lang.function import SglFunction
from sglbatch.lang.graph import Graph
from sglbatch.lang.trace import Trace, answer_name, run_traced
from sglbatch.planner.made_up import VARIANTS, MadeUpAnswers
from sglbatch.types import Generate, Request, Result, TokenIds, prefill_runs, unconditional_runs

CHECKED_ROWS: Final = 32


def spread(number: int, most: int = CHECKED_ROWS) -> list[int]:
    """At most ``most`` of the indices below ``number``, evenly spread, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, number - 1, min(number, most)).tolist()}) if number else []


def check_trace(
    trace: Trace,
    function: SglFunction,
    rows: Iterable[Mapping[str, Any]],
    environment: Environment,
    compiler: Compiler,
) -> str | None:
    """Why the trace must not be relied on; None where it does what the interpreter does on every one of ``rows``.

    Each row's program is run on made-up answers, several sets of them, and must add exactly the trace's operations
    with the row's values and the same answers filled in.
    """
    if trace.stopped is not None and trace.stopped.startswith("branches on"):
        return trace.stopped  # rows and answers that have not been tried may take the other way
    if trace.error is not None:
        return f"fails on values that are not known yet: {trace.error}"
    for number, arguments in enumerate(rows):
        for variant in range(VARIANTS):
            answers = _Kept(MadeUpAnswers(variant, compiler))
            real = run_traced(function, arguments, environment, answers)
            if real.stopped is not None:
                return real.stopped
            if real.error is not None:
                return trace.stopped or f"needs real answers: {real.error}"
            if real.operations({}, {}) != trace.operations(_with_defaults(function, arguments), answers.given):
                return trace.stopped or f"does something else on checked row {number + 1}"
    return None


class _Kept:
    """Made-up answers, and a record of them."""

    def __init__(self, answers: MadeUpAnswers) -> None:
        self._answers = answers
        self.given: dict[str, str] = {}

    def text(self, call: ModelCall) -> str:
        text = self._answers.text(call)
        self.given[answer_name(call)] = text
        return text


def _with_defaults(function: SglFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {p.name: p.default for p in function.parameters if p.default is not p.empty}
    return {**defaults, **arguments}


# --- numbers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallTokens:
    """Tokens of a number of calls with their answers.

    Args:
        prompt: of all prompts, each run of ``types.prefill_runs`` whole.
        computed: of them, what has to enter the model when each shared beginning is computed once and what an answer
            has left in memory is found there.
    """

    num_calls: int
    prompt: int
    computed: int

    @staticmethod
    def of(answered: Sequence[tuple[Request, Result]]) -> CallTokens:
        """Of calls whose answers are known.

        An answer's tokens are in memory but for its last one, which was sampled and never put through the model.
        """
        runs: list[TokenIds] = []
        prompt_lens: list[int] = []
        for request, result in answered:
            own = prefill_runs(request.prompt_ids, request.operation)
            runs += own
            prompt_lens += map(len, own)
            if isinstance(request.operation, Generate):
                num_fed = min(len(result.output_ids), max(result.usage.generated_tokens - 1, 0))
                fed = np.array(result.output_ids[:num_fed], dtype=np.int32)
                runs[-1] = np.concatenate([request.prompt_ids, fed])
        alone = [unconditional_runs(request.operation) for request, _ in answered]
        prompt = sum(prompt_lens) + sum(len(run) for group in alone for run in group)
        computed = _prefilled(runs, prompt_lens) + sum(_prefilled(group, list(map(len, group))) for group in alone)
        return CallTokens(len(answered), prompt, computed)


def _prefilled(runs: Sequence[TokenIds], prompt_lens: Sequence[int]) -> int:
    """Tokens of the runs' radix tree that some run has in its prompt and none has in its answer."""
    order, lcp = depth_first_order(runs)
    in_prompt = np.zeros(sum(map(len, runs)), dtype=bool)
    in_answer = np.zeros_like(in_prompt)
    path = np.empty(0, dtype=np.int64)
    num_nodes = 0
    for place, index in enumerate(order.tolist()):
        num_new = len(runs[index]) - int(lcp[place])
        path = np.concatenate([path[: lcp[place]], np.arange(num_nodes, num_nodes + num_new)])
        num_nodes += num_new
        in_prompt[path[: prompt_lens[index]]] = True
        in_answer[path[prompt_lens[index] :]] = True
    return int(np.count_nonzero(in_prompt & ~in_answer))


@dataclass(frozen=True, kw_only=True, slots=True)
class Foresight:
    """What is known of a program before it runs.

    Args:
        distrusted: why calls beyond the first ones are not planned, or None.
        low, high: tokens of all calls of ``sampled_rows`` rows, every answer at its shortest and at its longest; None
            where they are not planned.
    """

    graph: Graph
    distrusted: str | None
    num_rows: int = 0
    sampled_rows: int = 0
    first_calls: int = 0
    low: CallTokens | None = None
    high: CallTokens | None = None

    @property
    def follow_up_calls(self) -> int:
        """Of all rows, estimated from the sampled ones."""
        return 0 if self.low is None else self._scaled(self.low.num_calls - self.first_calls)

    def _scaled(self, number: int) -> int:
        return round(number * self.num_rows / max(self.sampled_rows, 1))

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"traced": self.distrusted is None, "not_traced_because": self.distrusted}
        if self.low is not None and self.high is not None:
            value |= {
                "estimated": self.sampled_rows < self.num_rows,
                "calls": self.follow_up_calls,
                "all_prompt_tokens": [self._scaled(self.low.prompt), self._scaled(self.high.prompt)],
                "all_computed_tokens": [self._scaled(self.low.computed), self._scaled(self.high.computed)],
            }
        return value

    def lines(self) -> list[str]:
        """For people."""
        if self.distrusted is not None:
            return [f"calls after the first are not planned: the program {self.distrusted}"]
        if self.low is None or self.high is None or not self.follow_up_calls:
            return []
        rows = f", estimated from {self.sampled_rows:,} rows" if self.sampled_rows < self.num_rows else ""
        return [
            f"traced: {self.follow_up_calls:,} follow-up calls{rows}; with them "
            f"{_between(self._scaled(self.low.prompt), self._scaled(self.high.prompt))} prompt tokens, of which "
            f"{_between(self._scaled(self.low.computed), self._scaled(self.high.computed))} have to be computed "
            "(from the shortest to the longest answers)"
        ]


def _between(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
