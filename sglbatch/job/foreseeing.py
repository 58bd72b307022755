"""What ``plan`` tries beyond the first calls: the program's trace, and rows run on made-up answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglbatch.data import check_collisions
from sglbatch.errors import SglbatchError
from sglbatch.job.identity import RowKeys
from sglbatch.job.prepare import Prepared
from sglbatch.job.writing import extra_columns, kept_columns
from sglbatch.lang.graph import Graph
from sglbatch.lang.trace import trace_program
from sglbatch.planner.foresight import CallTokens, Foresight, check_trace, spread
from sglbatch.planner.made_up import RehearsalBackend, stand_in
from sglbatch.planner.movement import Movement, movement_of

REHEARSED_ROWS: Final = 256
COMPARED_ROWS: Final = 20_000
"""Rows whose values are compared for an order of columns."""


def foresee(ready: Prepared) -> Foresight:
    """The program's graph, whether it can be relied on, and then the tokens of all its calls."""
    function = ready.template.function
    environment = ready.environment
    trace = trace_program(function, {}, environment)
    num_rows = len(ready.rows)
    checked = [arguments for index in spread(num_rows) if (arguments := ready.arguments(index)) is not None]
    distrusted = check_trace(trace, function, checked, environment, ready.compiler)
    if distrusted is not None:
        return Foresight(graph=trace.graph, distrusted=distrusted, num_rows=num_rows)
    sample = spread(num_rows, REHEARSED_ROWS)
    first_calls, low = _rehearse(ready, sample, longest=False)
    return Foresight(
        graph=trace.graph,
        distrusted=None,
        num_rows=num_rows,
        sampled_rows=len(sample),
        first_calls=first_calls,
        low=low,
        high=_rehearse(ready, sample, longest=True)[1],
    )


def suggest(ready: Prepared) -> Movement | None:
    """What another order of the template's text would save; None without a tokenizer to count with."""
    tokenizer = ready.tokenizer
    if tokenizer is None:
        return None
    trace = trace_program(ready.template.function, {}, ready.environment)
    found = (ready.arguments(index) for index in spread(len(ready.rows), COMPARED_ROWS))
    rows = [arguments for arguments in found if arguments is not None]
    return movement_of(trace.graph, rows, lambda text: len(tokenizer.encode(text)), order_free=trace.order_free)


def graph_of(ready: Prepared) -> Graph:
    """The program as it is traced under the job's chat template."""
    return trace_program(ready.template.function, {}, ready.environment).graph


def check_reorder(ready: Prepared) -> None:
    """Raises SglbatchError ``bad-option`` where ``--reorder`` names what the template does not mark as order-free."""
    if not ready.config.reorder:
        return
    free = trace_program(ready.template.function, {}, ready.environment).order_free
    for name in ready.config.reorder:
        if name not in free:
            raise SglbatchError(
                "bad-option",
                f"--reorder names {name!r}, which the template does not mark as order-free",
                where=str(ready.template.path),
                hint=f"it marks: {', '.join(free)}" if free else f"s += sgl.any_order({name}=..., other=...)",
            )


def check_kept(ready: Prepared) -> None:
    """Raises SglbatchError ``column-collision`` where a kept column has the name of an answer that is sure to come.

    Names that depend on answers are compared when the output is written.
    """
    kept = kept_columns(ready.config, ready.inputs.columns)
    if kept:
        nodes = trace_program(ready.template.function, {}, ready.environment).graph.nodes
        answers = [str(node.value) for node in nodes if node.stream == 0 and node.kind in {"Gen", "Select"}]
        check_collisions(kept, [*answers, *extra_columns(ready.config)], ready.config.keep_prefix)


def _rehearse(ready: Prepared, sample: Sequence[int], *, longest: bool) -> tuple[int, CallTokens]:
    """The number of first calls, and the tokens of all calls, of these rows."""
    backend = RehearsalBackend(
        lambda request: stand_in(request, ready.compiler, longest=longest), context_len=ready.model.context_len
    )
    driver = ready.driver(max_outside_calls=0)
    driver.attach(backend)
    keys = RowKeys(ready.config.id_column)
    for index in sample:
        row = ready.rows.get(index)
        if row.values is not None:
            key = keys.key(row.values, ready.binding.arguments(row.values), where=row.where)
            driver.add(ready.program(row.values, program_id=index, row_key=key))
    first = driver.collect()
    driver.submit(first)
    while backend.has_unfinished:  # a row that calls outside, unlike the checked ones, ends there
        driver.step()
    return len(first), CallTokens.of(backend.answered)
