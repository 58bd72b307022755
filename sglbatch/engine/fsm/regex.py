r"""Regular expressions to byte automata.

The syntax is Python's, because Python's own parser reads the pattern. The meaning is that of
``re.fullmatch(pattern, text, re.ASCII)``, for texts that UTF-8 can hold (no lone surrogates).

ASCII is a choice: ``\d`` is 0-9, ``\w`` is A-Z a-z 0-9 _, ``\s`` is the six ASCII blanks, and (?i) folds ASCII letters
only. What is generated is read by other programs, where a number is written with ASCII digits and "yes" has no
long s; the automata also stay small. Where this choice would narrow a pattern unseen, (?u) or (?i) on other
letters, the pattern is refused instead.

Anchors at the ends of the pattern change nothing and are accepted. What is not regular, or whose language
depends on how a matcher backtracks, is refused by name.

The parser's tree goes straight to our own byte automaton and not through the library interegular (0.3.3), which
takes fewer constructs and is silently wrong on two of them. Milliseconds on one core of a two-core x86 machine,
interegular's without the step from characters to bytes and without minimising:

    pattern                         interegular    here    states here
    [A-Za-z ]{3,24}                           1       1             25
    -?(0|[1-9][0-9]{0,17})                    2       1             20
    a JSON record with 8 keys                48       6            283
    (\w+ ){1,50}                              5      11            101
    .{0,500}                                 19      57          4,001
    1,000 words joined by |               8,476      88          3,617
    (a|b)*a(a|b){12}                      3,221     112          8,192
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

from sglbatch.engine.fsm.automaton import Automaton
from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.nfa import Fragment, NfaBuilder
from sglbatch.engine.fsm.stored import AutomatonStore, stored_or_built
from sglbatch.engine.fsm.utf8 import SURROGATES, Ranges, complement, normalise
from sglbatch.errors import ConstraintError

_DIGIT: Final = ((0x30, 0x39),)
_SPACE: Final = ((0x09, 0x0D), (0x20, 0x20))
_WORD: Final = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_NEWLINE: Final = ((0x0A, 0x0A),)
_CATEGORIES: Final[dict[Any, Ranges]] = {
    op.CATEGORY_DIGIT: _DIGIT,
    op.CATEGORY_NOT_DIGIT: complement(_DIGIT),
    op.CATEGORY_SPACE: _SPACE,
    op.CATEGORY_NOT_SPACE: complement(_SPACE),
    op.CATEGORY_WORD: _WORD,
    op.CATEGORY_NOT_WORD: complement(_WORD),
}
_REFUSED: Final[dict[Any, tuple[str, str]]] = {
    op.ASSERT: ("lookahead (?=...)", "write the allowed texts out"),
    op.ASSERT_NOT: ("lookahead (?!...)", "write the allowed texts out, with a class such as [^x] where one will do"),
    op.GROUPREF: ("backreference", "write the repeated text out, or split the value into two gens"),
    op.GROUPREF_EXISTS: ("conditional group (?(1)...)", "write both cases out with |"),
    op.POSSESSIVE_REPEAT: ("possessive quantifier (*+ ++ ?+ {m,n}+)", "use the plain quantifier"),
    op.ATOMIC_GROUP: ("atomic group (?>...)", "use a plain group (?:...)"),
}
"""Name and remedy of what is not regular, or whose language depends on how a matcher backtracks."""

_CASE_HINT: Final = "write both cases out without the flag, such as [éÉ]"


def compile_regex(pattern: str, budget: Budget | None = None, *, store: AutomatonStore | None = None) -> Automaton:
    """The automaton of the texts for which ``re.fullmatch(pattern, text, re.ASCII)`` matches.

    ``store`` keeps it where building it took long.

    Raises ConstraintError with the code
        invalid-regex: Python's parser rejects it (its message and position are given);
        unsupported-regex: it uses a construct that cannot be enforced, which is named;
        unsatisfiable-regex, empty-regex: nothing, or only the empty text, matches;
        constraint-too-large: the automaton would need more states or steps than ``budget`` allows.
    """
    budget = budget or Budget()
    automaton = stored_or_built(store, f"regex {pattern}", budget, lambda: _built(pattern, budget))
    if automaton is None:
        raise ConstraintError(
            "unsatisfiable-regex",
            f"no text matches the regex {_shown(pattern)}",
            hint="remove the part that matches nothing (an empty character class or a lone surrogate)",
        )
    if (automaton.table[automaton.start] < 0).all():
        raise ConstraintError(
            "empty-regex",
            f"the regex {_shown(pattern)} matches only the empty text",
            hint="write what the value looks like, or leave the regex out for free text",
        )
    return automaton


def _built(pattern: str, budget: Budget) -> Automaton | None:
    builder = NfaBuilder(budget)
    try:
        tree = parse_regex(pattern)
        whole = Lowering(builder, budget).sequence(tree, tree.state.flags, at_start=True, at_end=True)
    except RecursionError as error:
        raise ConstraintError(
            "constraint-too-large", "the regex has groups nested too deeply", hint="nest fewer groups"
        ) from error
    return builder.build(whole)


def parse_regex(pattern: str) -> Any:
    """Python's own syntax tree of ``pattern``. Raises ConstraintError with the parser's message and position."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # "possible set difference": it is none in this version
            return _parser.parse(pattern, re.ASCII)
    except re.error as error:
        if error.msg in (r"bad escape \p", r"bad escape \P"):
            raise _unsupported(
                f"{error.msg[-2:]}{{..}} (Unicode property)", "write the characters as a class, such as [A-Za-zÀ-ÿ]"
            ) from error
        place = "" if error.pos is None else f" at position {error.pos}"
        raise ConstraintError(
            "invalid-regex",
            f"the regex {_shown(pattern)} is not valid: {error.msg}{place}",
            hint="the syntax is that of Python's re module; escape a literal character with \\",
        ) from error
    except OverflowError as error:
        raise ConstraintError(
            "invalid-regex", f"the regex {_shown(pattern)} is not valid: {error}", hint="use a smaller repeat count"
        ) from error
    except ValueError as error:  # the parser's word for (?u) beside the ASCII flag
        raise _unsupported("flag (?u)", "write the non-ASCII characters as a class, such as [A-Za-zÀ-ÿ]") from error


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:60] + "…")


def _unsupported(construct: str, hint: str) -> ConstraintError:
    return ConstraintError("unsupported-regex", f"the regex has an unsupported part: {construct}", hint=hint)


def ascii_category(category: Any) -> Ranges:
    r"""The characters of ``\d``, ``\W`` and so on, read as ASCII."""
    return _CATEGORIES[category]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    r"""What a regex's parts mean where languages differ.

    Args:
        inner: the characters of a category such as ``\d`` in a class.
        outer: those that a negated class leaves out for it; at least the same.
        line_ends: what ``.`` does not match.
        begin_marker, end_marker: bytes that stand for the ends of the text; anchors may then be anywhere. Without
            them an anchor must be at its end of the regex and matches nothing.
    """

    inner: Callable[[Any], Ranges] = ascii_category
    outer: Callable[[Any], Ranges] = ascii_category
    line_ends: Ranges = _NEWLINE
    begin_marker: bytes = b""
    end_marker: bytes = b""


class Lowering:
    """Turns the parser's tree into fragments. ``flags`` are those in force at a node.

    ``at_start`` and ``at_end`` say whether a node touches that end of the whole text in every match.

    Args:
        dialect: what the classes and the anchors mean.
    """

    def __init__(self, builder: NfaBuilder, budget: Budget, dialect: Dialect | None = None) -> None:
        self._builder = builder
        self._budget = budget
        self._dialect = dialect or Dialect()
        self._folded_ranges: dict[Ranges, Ranges] = {}

    def sequence(self, tree: Any, flags: int, *, at_start: bool, at_end: bool) -> Fragment:
        before, after = _num_zero_width(tree), _num_zero_width(tree[::-1])
        parts: list[Fragment] = []
        literal = ""
        for i, (kind, value) in enumerate(tree):
            if kind is op.LITERAL and not _is_surrogate(value) and not (flags & re.IGNORECASE):
                literal += chr(value)
                continue
            if literal:
                parts.append(self._builder.text(literal.encode()))
                literal = ""
            parts.append(
                self._node(
                    kind, value, flags, at_start=at_start and i <= before, at_end=at_end and i >= len(tree) - 1 - after
                )
            )
        if literal:
            parts.append(self._builder.text(literal.encode()))
        return self._builder.concat(parts)

    def _node(self, kind: Any, value: Any, flags: int, *, at_start: bool, at_end: bool) -> Fragment:
        if kind is op.SUBPATTERN:
            _, added, removed, tree = value
            if added & re.UNICODE:
                raise _unsupported("flag (?u)", "write the non-ASCII characters as a class, such as [A-Za-zÀ-ÿ]")
            return self.sequence(tree, (flags | added) & ~removed, at_start=at_start, at_end=at_end)
        if kind is op.BRANCH:
            return self._builder.union(
                [self.sequence(tree, flags, at_start=at_start, at_end=at_end) for tree in value[1]]
            )
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, tree = value
            once = most == 1
            return self._builder.repeat(
                lambda: self.sequence(tree, flags, at_start=at_start and once, at_end=at_end and once),
                least,
                None if most == op.MAXREPEAT else most,
            )
        if kind is op.AT:
            return self._anchor(value, at_start=at_start, at_end=at_end)
        if kind in _REFUSED:
            raise _unsupported(_refused_name(kind, value), _REFUSED[kind][1])
        return self._builder.characters(self._characters(kind, value, flags))

    def _characters(self, kind: Any, value: Any, flags: int) -> Ranges:
        """The code points that a node of one character stands for."""
        if kind is op.ANY:
            return complement(() if flags & re.DOTALL else self._dialect.line_ends)
        if kind is op.LITERAL:
            return self._folded(((value, value),), flags)
        if kind is op.NOT_LITERAL:
            return complement(self._folded(((value, value),), flags))
        assert kind is op.IN, f"the parser has no other node, yet there is {kind}"
        negated = value[0][0] is op.NEGATE
        classes = self._dialect.outer if negated else self._dialect.inner
        written: list[tuple[int, int]] = []
        categories: list[tuple[int, int]] = []  # closed under case, so they are not folded
        for member, argument in value[negated:]:
            if member is op.LITERAL:
                written.append((argument, argument))
            elif member is op.RANGE:
                written.append(argument)
            else:
                assert member is op.CATEGORY, f"a class has no other member, yet there is {member}"
                categories += classes(argument)
        members = normalise([*self._folded(normalise(written), flags), *categories])
        return complement(members) if negated else members

    def _folded(self, ranges: Ranges, flags: int) -> Ranges:
        """With (?i): the ASCII letters of ``ranges`` in both cases. Refuses others that lack their other case."""
        if not flags & re.IGNORECASE:
            return ranges
        if ranges not in self._folded_ranges:
            self._budget.spend(sum(hi - lo + 1 for lo, hi in ranges))
            self._folded_ranges[ranges] = _fold(ranges)
        return self._folded_ranges[ranges]

    def _anchor(self, where: Any, *, at_start: bool, at_end: bool) -> Fragment:
        begins = where in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
        marker = self._dialect.begin_marker if begins else self._dialect.end_marker
        if marker and where not in (op.AT_BOUNDARY, op.AT_NON_BOUNDARY):
            return self._builder.text(marker)
        if where in (op.AT_BOUNDARY, op.AT_NON_BOUNDARY):
            name = r"\b" if where is op.AT_BOUNDARY else r"\B"
            raise _unsupported(f"word boundary {name}", "write the separating characters out")
        name, holds = (r"^ or \A", at_start) if begins else (r"$ or \Z", at_end)
        if not holds:
            raise _unsupported(
                f"anchor {name} inside the regex", "the whole text is always matched: leave the anchor out"
            )
        return self._builder.empty()


def _refused_name(kind: Any, value: Any) -> str:
    if kind in (op.ASSERT, op.ASSERT_NOT) and value[0] < 0:
        return "lookbehind (?<=...)" if kind is op.ASSERT else "lookbehind (?<!...)"
    return f"backreference (\\{value})" if kind is op.GROUPREF else _REFUSED[kind][0]


def _fold(ranges: Ranges) -> Ranges:
    """Add the other case of every ASCII letter.

    Raises ConstraintError for another letter whose other case is not among ``ranges``: (?i) leaves it as it is
    under the ASCII flag, which its author would not expect.
    """
    letters = [chr(code) for lo, hi in ranges for code in range(lo, hi + 1)]
    ascii_cases = {ord(case) for letter in letters if letter.isascii() for case in (letter.lower(), letter.upper())}
    folded = normalise([*ranges, *((code, code) for code in ascii_cases)])
    for letter in letters:
        cases = {ord(case) for case in (letter.lower(), letter.upper()) if len(case) == 1}
        if not all(any(lo <= case <= hi for lo, hi in folded) for case in cases):
            raise _unsupported(f"flag (?i) with the non-ASCII letter {letter!r}", _CASE_HINT)
    return folded


def _is_surrogate(code: int) -> bool:
    return SURROGATES[0] <= code <= SURROGATES[1]


def _num_zero_width(tree: Any) -> int:
    """How many leading items of a sequence can only match the empty text."""
    num = 0
    while num < len(tree) and tree[num : num + 1].getwidth()[1] == 0:
        num += 1
    return num
