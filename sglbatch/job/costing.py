"""The cost of a job on an API model before it is run: its programs over a sample of rows, answered by placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sglbatch.api_spec import ApiModel
from sglbatch.api_spec.cost import GUESSES, CostEstimate, estimate
from sglbatch.api_spec.dry import DryBackend, DryCall, Guess
from sglbatch.api_spec.prices import prices_for
from sglbatch.api_spec.tokens import Counter, counter_for
from sglbatch.job.identity import RowKeys
from sglbatch.job.prepare import Prepared
from sglbatch.lang.calls import CallMemo, PendingCall

SAMPLED_ROWS: Final = 200


class ReadOnlyMemo:
    """Answers of an existing job; what a dry run makes up is not kept."""

    def __init__(self, memo: CallMemo) -> None:
        self._memo = memo

    def get(self, key: str) -> dict[str, Any] | None:
        return self._memo.get(key)

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Placeholders are not answers."""


def estimate_cost(ready: Prepared, calls: Sequence[PendingCall], memo: CallMemo | None) -> CostEstimate:
    """The cost of what is not answered yet.

    Args:
        calls: the first calls that have to be made, of all rows.

    Raises:
        SglbatchError: ``bad-option`` for a wrong ``--price``.
    """
    model = ready.model
    assert isinstance(model, ApiModel)
    counter = counter_for(ready.tokenizer)
    waiting = sorted({program_id for call in calls for program_id in call.program_ids})
    step = max(1, -(-len(waiting) // SAMPLED_ROWS))
    sample = waiting[::step]
    runs = {guess: _dry_run(ready, sample, model, counter, guess, memo) for guess in GUESSES}
    return estimate(
        runs,
        prices_for(model, ready.config.price),
        rows=len(waiting),
        sampled_rows=len(sample),
        first_prompt_tokens=sum(counter.num_tokens(call.prompt_ids) for call in calls),
        exact=counter.exact,
    )


def _dry_run(  # noqa: PLR0917
    ready: Prepared, sample: Sequence[int], model: ApiModel, counter: Counter, guess: Guess, memo: CallMemo | None
) -> list[DryCall]:
    driver = ready.driver(memo=None if memo is None else ReadOnlyMemo(memo), max_outside_calls=0)
    backend = DryBackend(model, counter, guess)
    driver.attach(backend)
    keys = RowKeys(ready.config.id_column)
    for index in sample:
        row = ready.rows.get(index)
        assert row.values is not None, "a row that cannot be read makes no calls"
        key = keys.key(row.values, ready.binding.arguments(row.values), where=row.where)
        driver.add(ready.program(row.values, program_id=index, row_key=key))
    driver.submit(driver.collect())
    while backend.has_unfinished:
        driver.step()
    return backend.calls
