"""The plan as text for a terminal. Whatever comes from data is escaped and fits its line."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final

from sglbatch.planner.summary import Summary
from sglbatch.planner.tree import Tree, TreeNode

MIN_TEXT_WIDTH: Final = 20
_LABEL_WIDTH: Final = 17
_SHORT_ESCAPES: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def render_summary(summary: Summary, tree: Tree | None = None, width: int = 100) -> str:
    """Several lines without a trailing newline. Those of the tree fit ``width`` columns (from about 50 on)."""
    lines = [f"{label:<{_LABEL_WIDTH}}{value}" for label, value in _facts(summary)]
    if tree is not None and (tree.nodes or summary.num_requests):
        lines += ["", *_tree_lines(tree, width)]
    return "\n".join(lines)


def escape_controls(text: str) -> str:
    """``text`` with whatever could move a cursor, hide or reorder text written as an escape (``\\n``, ``\\x1b``)."""
    return "".join(map(_escaped, text))


def shorten(pieces: Sequence[str], width: int) -> str:
    """Text in at most ``width`` columns, its middle replaced by an ellipsis when it is longer.

    Args:
        pieces: the text, cut between pieces only: a string is cut between characters, escapes are pieces of their own.
    """
    if sum(map(_columns, pieces)) <= width:
        return "".join(pieces)
    tail_width = (width - 1) // 2
    head = _fitting(pieces, width - 1 - tail_width)
    tail = _fitting(pieces[::-1], tail_width)[::-1]
    return "".join((*head, "…", *tail))


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    failed = ""
    if summary.num_failed_rows:
        codes = ", ".join(f"{escape_controls(code)} {count:,}" for code, count in sorted(summary.failed_rows.items()))
        failed = f", {summary.num_failed_rows:,} failed already ({codes})"
    yield "rows", f"{summary.num_rows:,}{failed}"
    equal = (
        f", and {counted(summary.num_equal_calls, 'equal call')} answered with them" if summary.num_equal_calls else ""
    )
    yield "requests", f"{summary.num_requests:,}{equal}"
    if summary.calls_reused:
        yield "answered already", counted(summary.calls_reused, "call")
    if summary.num_too_long:
        yield "too long", f"{counted(summary.num_too_long, 'request')} over the context length; their rows will fail"
    if summary.rows_outside:
        calls = "1 row calls" if summary.rows_outside == 1 else f"{summary.rows_outside:,} rows call"
        yield "outside", f"{calls} a function first: a plan does not, so what they ask then is not in these numbers"
    if not summary.num_requests:
        return
    yield "prompt tokens", f"{summary.prompt_tokens:,}, longest {summary.longest_prompt_len:,}"
    yield "unique tokens", f"{summary.unique_tokens:,}"
    yield "best hit rate", f"{summary.best_hit_rate:.1%}"
    first = " by these first calls" if summary.follow_up_rows else ""
    yield "generated tokens", f"at most {summary.most_generated_tokens:,}{first}"
    yield "KV needed", f"{_kv(summary, summary.kv_tokens_minimum)} at least"
    yield "", f"{_kv(summary, summary.kv_tokens_whole)} to hold everything at once"
    yield "follow-up calls", _follow_ups(summary)


def counted(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _kv(summary: Summary, num_tokens: int) -> str:
    sizes = {dtype: _bytes(num_tokens * size) for dtype, size in summary.kv_bytes_per_token.items()}
    named = [f"{size} in {dtype}" for dtype, size in sizes.items()] if len(sizes) > 1 else sizes.values()
    return f"{num_tokens:,} tokens" + (f" ({', '.join(named)})" if sizes else "")


def _bytes(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def _follow_ups(summary: Summary) -> str:
    rows = summary.follow_up_rows
    if not rows and summary.rows_outside:
        return "not known"
    if not rows:
        return "none: every program ends with these answers"
    go = "1 row goes" if rows == 1 else f"{rows:,} rows go"
    return f"{rows:,} or more (estimated): {go} on after these answers"


def _tree_lines(tree: Tree, width: int) -> Iterator[str]:
    if not tree.nodes:
        yield "No beginning is shared by several requests."
        return
    tokens_width = max(len("tokens"), *(len(f"{node.num_tokens:,}") for node in tree.nodes))
    requests_width = max(len("requests"), *(len(f"{node.num_requests:,}") for node in tree.nodes))
    yield f"{'tokens':>{tokens_width}}  {'requests':>{requests_width}}  shared beginning"
    for node in tree.nodes:
        counts = f"{node.num_tokens:>{tokens_width},}  {node.num_requests:>{requests_width},}  "
        yield counts + _node_text(node, width - len(counts))
    if tree.num_hidden:
        hidden = counted(tree.num_hidden, "shared beginning")
        yield f"{hidden} not shown: {tree.hidden_saved_tokens:,} of the {tree.saved_tokens:,} tokens saved"


def _node_text(node: TreeNode, width: int) -> str:
    pieces = list(map(_escaped, node.text))
    # Deep nesting must not push the text off the line.
    indent = "  " * min(node.level, max(0, width - MIN_TEXT_WIDTH) // 2)
    return f'{indent}"{shorten(pieces, max(MIN_TEXT_WIDTH, width - len(indent)) - 2)}"'


def _escaped(char: str) -> str:
    return _SHORT_ESCAPES.get(char) or (_numeric_escape(char) if _is_unsafe(char) else char)


def _is_unsafe(char: str) -> bool:
    category = unicodedata.category(char)
    return category.startswith("C") or category in ("Zl", "Zp")


def _numeric_escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _columns(text: str) -> int:
    return sum(map(_char_columns, text))


def _char_columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _fitting(pieces: Sequence[str], width: int) -> Sequence[str]:
    """The longest beginning that takes at most ``width`` columns."""
    used = 0
    for index, piece in enumerate(pieces):
        used += _columns(piece)
        if used > width:
            return pieces[:index]
    return pieces
