"""Lines of code of the judge: the template beside the same job on the plain openai client.

    python benchmarks/lines_of_code.py

The SGLang paper's claim for its judge is 2.1 times fewer lines. A line counts where it has code on it: no blank lines,
comments, docstrings or imports; a statement over three lines counts three.
"""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(text: str) -> int:
    """How many lines of Python source have code on them."""
    lines: set[int] = set()
    begins = True  # the next token begins a statement
    skipping = False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if begins and token.type not in SILENT:
            skipping = token.type == tokenize.STRING or token.string in ("import", "from")
        if token.type not in SILENT and not skipping:
            lines.update(range(token.start[0], token.end[0] + 1))
        begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT) and (
            begins or token.type == tokenize.NEWLINE
        )
    return len(lines)


def main() -> None:
    template = code_lines((ROOT / "templates" / "judge.py").read_text(encoding="utf-8"))
    by_hand = code_lines((ROOT / "benchmarks" / "judge_openai.py").read_text(encoding="utf-8"))
    print(
        f"templates/judge.py {template} lines, on the openai client {by_hand}: {by_hand / template:.1f} times as many"
    )


if __name__ == "__main__":
    main()
