r"""The regexes of JSON Schema: ECMA 262's syntax, searched for anywhere in the text.

Whoever validates may read ``\d \w \s`` as ASCII (ECMA 262) or as Unicode (Python). The texts here are those that
match under both readings: ``\d`` is 0-9, and ``\D`` leaves out the digits of every script.
"""

from __future__ import annotations

import re
from functools import lru_cache
from re import _constants as op  # type: ignore[attr-defined]
from typing import Any, Final

import numpy as np

from sglbatch.engine.fsm.automaton import DEAD, Automaton, make_automaton
from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.nfa import Fragment, NfaBuilder
from sglbatch.engine.fsm.product import combine
from sglbatch.engine.fsm.regex import Dialect, Lowering, ascii_category, parse_regex
from sglbatch.engine.fsm.stored import AutomatonStore, stored_or_built
from sglbatch.engine.fsm.utf8 import MAX_CODE_POINT, Ranges, complement, normalise
from sglbatch.errors import ConstraintError

_BEGIN: Final = 0xFE
_END: Final = 0xFF
"""Bytes that no UTF-8 text has: they stand for the ends of the text."""

_ANY: Final = ((0, MAX_CODE_POINT),)
_LINE_ENDS: Final = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_NEGATIVE: Final = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
}
_WIDE_SOURCE: Final = {op.CATEGORY_DIGIT: r"\d+", op.CATEGORY_SPACE: "[\\s\ufeff]+", op.CATEGORY_WORD: r"\w+"}

_ECMA_ESCAPES: Final = re.compile(
    r"\\[dDwWsS]-(?=[^\]])"  # in a class: a dash behind a category is a dash
    r"|\\u\{([0-9A-Fa-f]{1,6})\}"
    r"|\\c([A-Za-z])"
    r"|\\."
    r"|\(\?<(?![=!])"
    r"|\[\^?|\]",
    re.DOTALL,
)


def pattern_automaton(pattern: str, budget: Budget, store: AutomatonStore | None = None) -> Automaton | None:
    """The texts in which ``pattern`` is found; None when there are none. See ``stored_or_built`` for ``store``.

    Raises ConstraintError as ``compile_regex`` does.
    """
    return stored_or_built(store, f"pattern {pattern}", budget, lambda: _pattern_automaton(pattern, budget))


def python_reads(pattern: str) -> bool:
    """Whether Python's ``re``, which finished values are validated with, knows the pattern's constructs."""
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _pattern_automaton(pattern: str, budget: Budget) -> Automaton | None:
    tree = list(parse_regex(_as_python(pattern)))
    while len(tree) == 1 and tree[0][0] is op.SUBPATTERN and not tree[0][1][1] and not tree[0][1][2]:
        tree = list(tree[0][1][3])
    looks, tree = _leading_looks(tree)
    found = _search(tree, budget)
    for kind, inner in looks:
        begun = _search([(op.AT, op.AT_BEGINNING), *inner], budget)
        if found is None or (begun is None and kind is op.ASSERT):
            return None
        if begun is not None:
            found = combine(found, begun, "and" if kind is op.ASSERT else "minus", budget)
    return found


def _leading_looks(tree: list[Any]) -> tuple[list[tuple[Any, list[Any]]], list[Any]]:
    """Lookaheads right at an anchored start, which are conditions on the whole text, and the rest."""
    looks, rest = [], list(tree)
    anchored = bool(rest) and rest[0] == (op.AT, op.AT_BEGINNING)
    at = 1 if anchored else 0
    while at < len(rest) and rest[at][0] in (op.ASSERT, op.ASSERT_NOT) and rest[at][1][0] > 0:
        looks.append((rest[at][0], list(rest[at][1][1])))
        del rest[at]
    if looks and not anchored and not (rest and rest[0] == (op.AT, op.AT_BEGINNING)):
        return [], list(tree)
    return looks, rest


def _search(tree: list[Any], budget: Budget) -> Automaton | None:
    builder = NfaBuilder(budget)

    def any_text() -> Fragment:
        return builder.repeat(lambda: builder.characters(_ANY), 0, None)

    starts = bool(tree) and tree[0] == (op.AT, op.AT_BEGINNING)
    body = tree[1:] if starts else tree
    ends = bool(body) and body[-1] == (op.AT, op.AT_END)
    body = body[:-1] if ends else body
    try:
        if not _has_anchor(body):
            inner = _lower(builder, budget, body, Dialect(inner=_inner, outer=_outer, line_ends=_LINE_ENDS))
            parts = [*([] if starts else [any_text()]), inner, *([] if ends else [any_text()])]
            return builder.build(builder.concat(parts))
        return _search_with_markers(builder, budget, tree)
    except RecursionError as error:
        raise ConstraintError(
            "constraint-too-large", "the pattern has groups nested too deeply", hint="nest fewer groups"
        ) from error


def _search_with_markers(builder: NfaBuilder, budget: Budget, tree: list[Any]) -> Automaton | None:
    """Anchors read the markers; the automaton of "marker, text, marker" then gives that of the text."""
    dialect = Dialect(
        inner=_inner,
        outer=_outer,
        line_ends=_LINE_ENDS,
        begin_marker=bytes([_BEGIN]),
        end_marker=bytes([_END]),
    )

    def around() -> Fragment:
        return builder.repeat(
            lambda: builder.union(
                [builder.characters(_ANY), builder.text(bytes([_BEGIN])), builder.text(bytes([_END]))]
            ),
            0,
            None,
        )

    whole = builder.build(builder.concat([around(), _lower(builder, budget, tree, dialect), around()]))
    if whole is None:
        return None
    start = whole.step(whole.start, _BEGIN)
    after_end = whole.table[:, _END]
    accepting = np.where(after_end == DEAD, False, whole.accepting[after_end])
    table = whole.table.copy()
    table[:, [_BEGIN, _END]] = DEAD
    reached = _reachable(table, start)
    number = np.full(len(table) + 1, DEAD, dtype=np.int32)
    number[reached] = np.arange(len(reached), dtype=np.int32)
    return make_automaton(number[table[reached]], accepting[reached], np.arange(256), budget)


def _reachable(table: np.ndarray, start: int) -> list[int]:
    found = [start]
    seen = {start, DEAD}
    for state in found:
        new = set(np.unique(table[state]).tolist()) - seen
        seen |= new
        found += sorted(new)
    return found


def _lower(builder: NfaBuilder, budget: Budget, tree: list[Any], dialect: Dialect) -> Fragment:
    return Lowering(builder, budget, dialect).sequence(_Items(tree), re.ASCII.value, at_start=True, at_end=True)


class _Items(list[Any]):
    """A part of the parser's tree: a slice has a width, as the parser's own lists do."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return _Items(found) if isinstance(index, slice) else found

    def getwidth(self) -> tuple[int, int]:
        kinds = {kind for kind, _ in self}
        return (0, 0) if kinds <= {op.AT, op.ASSERT, op.ASSERT_NOT} else (0, 1)


def _has_anchor(tree: Any) -> bool:
    if isinstance(tree, tuple) and len(tree) == 2 and tree[0] is op.AT:
        return True
    if isinstance(tree, str | int) or tree is None:
        return False
    items = getattr(tree, "data", tree)
    return isinstance(items, list | tuple) and any(map(_has_anchor, items))


def _as_python(pattern: str) -> str:
    """ECMA 262's spellings that Python writes otherwise."""
    in_class = False

    def spelled(match: re.Match[str]) -> str:
        nonlocal in_class
        text = match[0]
        if match[1]:
            return f"\\U{int(match[1], 16):08x}"
        if match[2]:
            return f"\\x{ord(match[2].upper()) - 64:02x}"
        if text == "(?<":
            return text if in_class else "(?P<"
        if text == "]":
            in_class = False
        elif text[0] == "[":
            text = text if not in_class else "\\["
            in_class = True
        elif len(text) == 3:
            text = text[:2] + ("\\-" if in_class else "-")
        return text

    return _ECMA_ESCAPES.sub(spelled, pattern)


def _inner(category: Any) -> Ranges:
    """The characters of a category under both readings."""
    if category in _NEGATIVE:
        return complement(_wide(_NEGATIVE[category]))
    return ascii_category(category)


def _outer(category: Any) -> Ranges:
    """The characters of a category under either reading."""
    if category in _NEGATIVE:
        return complement(ascii_category(_NEGATIVE[category]))
    return _wide(category)


@lru_cache(maxsize=3)
def _wide(category: Any) -> Ranges:
    """Digits, blanks or word characters of every script."""
    characters = np.arange(MAX_CODE_POINT + 1, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    runs = re.finditer(_WIDE_SOURCE[category], characters)
    return normalise((match.start(), match.end() - 1) for match in runs)
