"""Where the rows of a batch of requests stand in the order, so that no token enters the model twice.

The plan orders requests by their prompts. A choice's rows go further than its prompt, and may run along another
choice's rows or another request's prompt. So in each group of neighbours whose prompts begin with the first one's, rows
are ordered depth-first by their own tokens, each at the place of a request that it comes behind:

    requests      rows, in order
    0  P          0 P
    1  P, then    1 P x        the rows of 1 and 2 alternate: "P x" is there for both, and "P y" too
       x. or y.   2 P x u
    2  P, then    1 P y
       xuv or y.  2 P y

Rows without a prompt (``unconditional_runs``) go before all others, so that nobody waits for them.

A row that scores behind tokens which a row before it has computed needs states from there. That row is told to leave
them in the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sglbatch.engine.radix.order import depth_first_order
from sglbatch.engine.radix.tree import common_prefix_len
from sglbatch.engine.sequence import Sequence
from sglbatch.types import Priority, TokenIds

ALONE_POSITION = -1
"""Before every position of a plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRows:
    """One request's rows, in their order."""

    priority: Priority
    rows: list[Sequence]

    @property
    def prompt_ids(self) -> TokenIds:
        return self.rows[0].request.prompt_ids

    @property
    def is_prompt_alone(self) -> bool:
        """Whether there is nothing but the prompt: the plan's order is the rows' order."""
        return len(self.rows) == 1 and len(self.rows[0].ids) == len(self.prompt_ids)


def place_rows(batch: Seq[RequestRows]) -> None:
    """Sets the priorities and state positions of a batch's rows; those of the batch's requests stay in their order."""
    if all(request.is_prompt_alone for request in batch):
        return
    alone: list[Sequence] = []
    rows: list[Sequence] = []
    for group in _groups(sorted(batch, key=lambda request: request.priority)):
        rows += _ordered(group)
        alone += (row for request in group for row in request.rows if row.alone)
    order, _ = depth_first_order([row.ids for row in alone])
    alone = [alone[i] for i in order.tolist()]
    for place, row in enumerate(alone):
        row.priority = (ALONE_POSITION, place)
    _leave_states([*alone, *rows])


def _groups(requests: list[RequestRows]) -> Iterator[list[RequestRows]]:
    """Neighbours whose prompts begin with their first one's, as long as they are in depth-first order."""
    group: list[RequestRows] = []
    for request in requests:
        if group and not (_begins_with(request.prompt_ids, group[0]) and _follows(request.prompt_ids, group[-1])):
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def _begins_with(prompt_ids: TokenIds, root: RequestRows) -> bool:
    return common_prefix_len(prompt_ids, root.prompt_ids) == len(root.prompt_ids)


def _follows(prompt_ids: TokenIds, previous: RequestRows) -> bool:
    before = previous.prompt_ids
    shared = common_prefix_len(before, prompt_ids)
    return shared == len(before) or (shared < len(prompt_ids) and bool(before[shared] < prompt_ids[shared]))


def _ordered(group: list[RequestRows]) -> list[Sequence]:
    """The group's rows in order, but for those that stand alone; theirs are the priorities of the group's requests."""
    rows = [(request.priority, row) for request in group for row in request.rows if not row.alone]
    if len(group) == 1:
        return [row for _, row in rows]
    root_len = len(group[0].prompt_ids)
    order, _ = depth_first_order([row.ids[root_len - 1 :] for _, row in rows])  # a scored prompt lacks its last token
    last = group[0].priority
    for place, i in enumerate(order.tolist()):
        priority, row = rows[i]
        last = max(last, priority)
        row.priority = (*last, place)
    return [rows[i][1] for i in order.tolist()]


@dataclass(slots=True)
class _Edge:
    """Positions [start, end) of the current path, and the row that computes them."""

    start: int
    end: int
    row: Sequence


def _leave_states(rows: list[Sequence]) -> None:
    """Walks over the rows in order with the current path, whose rows leave the states that later ones need."""
    path: list[_Edge] = []
    ids: TokenIds | None = None
    for row in rows:
        shared = 0 if ids is None else common_prefix_len(ids, row.ids)
        while path and path[-1].start >= shared:
            path.pop()
        if path:
            path[-1].end = min(path[-1].end, shared)
        for position in _needed(row, shared):
            edge = next(edge for edge in reversed(path) if edge.start <= position)
            edge.row.state_positions.add(position)
        if shared < len(row.ids):
            path.append(_Edge(shared, len(row.ids), row))
        ids = row.ids


def _needed(row: Sequence, shared: int) -> list[int]:
    """Positions in the shared beginning whose states a row needs. A scored prompt finds the shared tokens' scores."""
    if row.own_successors:
        return row.actions_in(shared - 1, shared)
    return row.actions_in(0, shared)
