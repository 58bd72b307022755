"""What would be shared if the template's text stood in another order. Suggestions only: no prompt is changed here.

Source: the code movement case study of the SGLang paper, with numbers in place of a rewriting model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglbatch.lang.graph import Graph

MIN_TOKENS: Final = 16
"""Shorter constants are labels of what stands before or behind them."""

TokenCount = Callable[[str], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Movement:
    """Args:
    late_constants: (text, tokens) of longer constants that stand behind a column's value in the first calls' prompts.
    columns: the arguments in their order in the prompt.
    best_columns: the order that shares most, found greedily.
    saved_tokens, best_saved_tokens: value tokens that either order saves over the rows.
    order_free: columns that the template lets stand in any order.
    """

    num_rows: int
    late_constants: tuple[tuple[str, int], ...]
    columns: tuple[str, ...]
    best_columns: tuple[str, ...]
    saved_tokens: int
    best_saved_tokens: int
    order_free: tuple[str, ...] = ()

    @property
    def movable_tokens(self) -> int:
        return sum(tokens for _, tokens in self.late_constants)

    def to_json(self) -> dict[str, Any]:
        return {
            "constant_tokens_behind_columns": self.movable_tokens,
            "tokens_saved_if_in_front": self.movable_tokens * max(self.num_rows - 1, 0),
            "column_order": list(self.columns),
            "best_column_order": list(self.best_columns),
            "tokens_shared": self.saved_tokens,
            "tokens_shared_in_best_order": self.best_saved_tokens,
            "order_free": list(self.order_free),
        }

    def lines(self) -> list[str]:
        """For people; [] where nothing would be gained."""
        lines = []
        if self.movable_tokens and self.num_rows > 1:
            saved = self.movable_tokens * (self.num_rows - 1)
            lines.append(
                f"suggestion: {self.movable_tokens:,} tokens of constant text stand behind the columns of every row; "
                f"in front of them they would be computed once, which saves {saved:,} tokens"
            )
        if self.best_saved_tokens > self.saved_tokens:
            gain = self.best_saved_tokens - self.saved_tokens
            free = [name for name in self.best_columns if name in self.order_free]
            how = f" (--reorder {','.join(free)})" if len(free) > 1 else ""
            lines.append(
                f"suggestion: the columns in the order {', '.join(self.best_columns)} share {gain:,} tokens more "
                f"than {', '.join(self.columns)}{how}"
            )
        return lines


def movement_of(
    graph: Graph, rows: Sequence[Mapping[str, Any]], count: TokenCount, *, order_free: Sequence[str] = ()
) -> Movement:
    """What moving text would save for these rows.

    Args:
        count: tokens of a text.
    """
    constants, columns = _before_first_answers(graph)
    counted = ((text, count(text)) for text in constants)
    lengths = {name: _lengths(rows, name, count) for name in columns}
    best = _greedy_order(rows, columns, lengths)
    return Movement(
        num_rows=len(rows),
        late_constants=tuple((text, tokens) for text, tokens in counted if tokens >= MIN_TOKENS),
        columns=tuple(columns),
        best_columns=tuple(best),
        saved_tokens=_saved(rows, columns, lengths),
        best_saved_tokens=_saved(rows, best, lengths),
        order_free=tuple(order_free),
    )


def _before_first_answers(graph: Graph) -> tuple[list[str], list[str]]:
    """Constants behind a column, and the columns, up to the first answer of each stream."""
    constants: list[str] = []
    columns: list[str] = []
    answered: set[int] = set()
    for node in graph.nodes:
        if node.kind in ("Gen", "Select", "Join", "Variable"):
            answered.add(node.stream)
        elif node.stream in answered or (node.stream and 0 in answered):
            continue
        elif node.kind == "Argument" and str(node.value) not in columns:
            columns.append(str(node.value))
        elif node.kind == "ConstantText" and columns:
            constants.append(str(node.value))
    return constants, columns


def _lengths(rows: Sequence[Mapping[str, Any]], name: str, count: TokenCount) -> dict[str, int]:
    return {value: count(value) for value in {str(row.get(name)) for row in rows}}


def _saved(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], lengths: Mapping[str, Mapping[str, int]]) -> int:
    """Value tokens that are equal to those of an earlier row with equal values in all columns before."""
    saved = 0
    for place, name in enumerate(columns):
        saved += _saved_by(rows, columns[:place], name, lengths[name])
    return saved


def _saved_by(rows: Sequence[Mapping[str, Any]], before: Sequence[str], name: str, lengths: Mapping[str, int]) -> int:
    groups = Counter((*(str(row.get(other)) for other in before), str(row.get(name))) for row in rows)
    return sum((number - 1) * lengths[values[-1]] for values, number in groups.items())


def _greedy_order(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], lengths: Mapping[str, Mapping[str, int]]
) -> list[str]:
    order: list[str] = []
    left = list(columns)
    while left:
        best = max(left, key=lambda name: _saved_by(rows, order, name, lengths[name]))
        order.append(best)
        left.remove(best)
    return order if _saved(rows, order, lengths) > _saved(rows, columns, lengths) else list(columns)
