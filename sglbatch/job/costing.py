"""The cost of a job on an API model before it is run: its programs over a sample of rows, answered by placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sglbatch.api_spec import ApiModel
from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.cost import EXPECTED, GUESSES, CostEstimate, estimate
from sglbatch.api_spec.dry import DryBackend, DryCall, Guess
from sglbatch.api_spec.first_calls import count_first_calls
from sglbatch.api_spec.prices import prices_for
from sglbatch.api_spec.tokens import Counter, counter_for
from sglbatch.job.identity import RowKeys
from sglbatch.job.prepare import Prepared
from sglbatch.lang.calls import CallMemo, PendingCall
from sglbatch.lang.driver import Driver
from sglbatch.lang.row_program import RowProgram

SAMPLED_ROWS: Final = 200
ANSWERED_ROWS: Final = 100


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
        memo: the answers of the job so far; what they have used is what the rest is held against.

    Raises:
        SglbatchError: ``bad-option`` for a wrong ``--price``.
    """
    model = ready.model
    assert isinstance(model, ApiModel)
    counter = counter_for(ready.tokenizer, model.family)
    waiting = sorted({program_id for call in calls for program_id in call.program_ids})
    sample = _spread(waiting, SAMPLED_ROWS)
    batch = ready.config.batch_api
    runs, batch_runs = (
        {guess: _dry_run(ready, sample, model, counter, guess, memo, batch=way) for guess in GUESSES}
        for way in (False, True)
    )
    texts = [call.text for call in calls if call.text is not None]
    tokens, guess = count_first_calls(texts, model, counter, batch=batch)
    answered = {} if memo is None else _answered(ready, sorted(set(range(len(ready.rows))).difference(waiting)), memo)
    return estimate(
        runs,
        batch_runs,
        prices_for(model, ready.config.price),
        rows=len(waiting),
        sampled_rows=len(sample),
        first_prompt_tokens=tokens,
        guess=guess,
        exact=counter.exact,
        batch=batch,
        answered=answered,
        expected=_dry_run(ready, list(answered), model, counter, EXPECTED, None, batch=batch),
    )


def _spread(indices: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of them, evenly spread."""
    return indices[:: max(1, -(-len(indices) // most))]


def _answered(ready: Prepared, indices: Sequence[int], memo: CallMemo) -> dict[int, Tokens]:
    """What rows have used whose calls are all answered already, of a sample of ``indices``."""
    driver = ready.driver(memo=ReadOnlyMemo(memo), max_outside_calls=0)
    programs = _add_rows(ready, driver, _spread(indices, ANSWERED_ROWS))
    driver.collect()
    used = {p.program_id: p.outcome.usage for p in programs if p.done and p.outcome.error is None}
    return {
        index: Tokens(prompt=usage.prompt_tokens, generated=usage.generated_tokens)
        for index, usage in used.items()
        if usage.prompt_tokens
    }


def _dry_run(  # noqa: PLR0917
    ready: Prepared,
    sample: Sequence[int],
    model: ApiModel,
    counter: Counter,
    guess: Guess,
    memo: CallMemo | None,
    *,
    batch: bool,
) -> list[DryCall]:
    driver = ready.driver(memo=None if memo is None else ReadOnlyMemo(memo), max_outside_calls=0)
    backend = DryBackend(model, counter, guess, batch=batch)
    driver.attach(backend)
    _add_rows(ready, driver, sample)
    driver.submit(driver.collect())
    while backend.has_unfinished:
        driver.step()
    return backend.calls


def _add_rows(ready: Prepared, driver: Driver, indices: Sequence[int]) -> list[RowProgram]:
    keys = RowKeys(ready.config.id_column)
    programs = []
    for index in indices:
        row = ready.rows.get(index)
        if row.values is None:
            continue  # a row that cannot be read makes no calls
        key = keys.key(row.values, ready.binding.arguments(row.values), where=row.where)
        programs.append(ready.program(row.values, program_id=index, row_key=key))
        driver.add(programs[-1])
    return programs
