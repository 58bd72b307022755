"""Where a function does more with a row's values than putting them into text, found in its source.

A trace sees what is done to its abstract values, but not what is done to plain strings made of them (an f-string's
length), nor what functions written in C do with them. Both are found here: a trace is followed no further than the
first such place. Whatever is not known to be harmless counts as one.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType

from sglbatch.lang.in_place import InPlace
from sglbatch.lang.text_kinds import Given, Helped, Kind, Kinds


@dataclass(frozen=True, slots=True)
class Look:
    """A place. ``reason`` goes behind "the program".

    Args:
        line: of its file; from this line on a trace says nothing. For a place in a loop it is the loop's head.
        at: the line of the place itself.
        reads_first: the statement begins with reading a variable; only behind that a trace says nothing.
    """

    line: int
    at: int
    reason: str
    reads_first: bool = False


def first_look(function: FunctionType) -> Look | None:
    """The first place in a program's function; None where there is none.

    A function without source is looked at as a whole.
    """
    node = _definition(function)
    if node is None:
        first_line = function.__code__.co_firstlineno
        return Look(first_line, first_line, "has no source that could be read")
    names = [*inspect.signature(function).parameters]
    given = Given(dict.fromkeys(names, Kind.RAW), frozenset(names[:1]))
    return _Function(function, node, given, ()).first


def _definition(function: FunctionType) -> ast.FunctionDef | None:
    """With the lines of its file; None where that is not all of it: a wrapper stands before its source."""
    if hasattr(function, "__wrapped__"):
        return None
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return None
    ast.increment_lineno(tree, start - 1)
    (node,) = tree.body
    return node if isinstance(node, ast.FunctionDef) else None


class _Function:
    """One function's body, walked until the kinds of its names do not change any more.

    Args:
        callers: the functions that are being walked because this one is called.
    """

    def __init__(
        self, function: FunctionType, node: ast.FunctionDef, given: Given, callers: tuple[FunctionType, ...]
    ) -> None:
        self._callers = (*callers, function)
        self._kinds = Kinds(function, given, self._found, self._helper)
        self._in_place = InPlace(node, is_written_to=self._kinds.is_written_to, states=self._kinds.states)
        self.returned = Kind.CONSTANT
        num_given = self._kinds.num_given
        self._looks: list[Look] = []
        self._heads: list[int] = []
        self._now: ast.stmt = node
        known = -1
        while known != (known := self._kinds.num_known):
            self._looks.clear()
            self._block(node.body)
        if callers and self._kinds.num_given != num_given:
            self._found("changes what it is given")

    def _helper(self, helped: Helped) -> Kind:
        """What a call of a function in the same file gives; what that one looks at, it looks at here."""
        callee, given = helped
        node = None if callee in self._callers else _definition(callee)
        if node is None:
            self._found(f"gives a row's values to {callee.__name__}")
            return Kind.TEXT
        inner = _Function(callee, node, given, self._callers)
        if inner.first is not None:
            self._found(f"{inner.first.reason} in {callee.__name__}")
        return inner.returned

    @property
    def first(self) -> Look | None:
        return min(self._looks, key=lambda look: look.line, default=None)

    def _found(self, reason: str) -> None:
        line = self._now.lineno
        head = self._heads[0] if self._heads else line
        self._looks.append(Look(head, line, reason, not self._heads and self._reads_first()))

    def _reads_first(self) -> bool:
        match self._now:
            case ast.Assign(value=value) | ast.Expr(value=value):
                first = next(_evaluated(value), None)
                return first is not None and self._is_reading(first)
        return False

    def _is_reading(self, node: ast.expr) -> bool:
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant()):
                return name in self._kinds.states
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get_meta_info"), args=[ast.Constant()]):
                return name in self._kinds.states
        return False

    # --- statements ---

    def _block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._now = statement
            for reason in self._in_place.reasons(statement):
                self._found(reason)
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:  # noqa: PLR0912  one case a kind of statement
        match node:
            case ast.Assign(targets=targets, value=value):
                self._kinds.assign(targets, value)
            case ast.AnnAssign(target=target, value=annotated):
                self._kinds.store(target, Kind.CONSTANT if annotated is None else self._kinds.kind(annotated))
            case ast.AugAssign(target=target, op=op, value=value):
                kind = self._kinds.kind(value)
                if not isinstance(op, ast.Add) and max(kind, self._kinds.kind(target)) == Kind.TEXT:
                    self._found("computes with text made of a row's values")
                if not self._kinds.is_written_to(target):
                    self._kinds.store(target, kind)
            case ast.Return(value=returned):
                self.returned = max(self.returned, self._kinds.kind_of_all([returned]))
            case ast.Expr(value=value):
                self._kinds.kind(value)
            case ast.If(test=test, body=body, orelse=orelse):
                self._kinds.test(test)
                self._block([*body, *orelse])
            case ast.For() | ast.While():
                self._loop(node)
            case ast.With(items=items, body=body):
                for item in items:
                    if not self._kinds.kind(item.context_expr):
                        self._found("enters a context that is none of its state's")
                    if item.optional_vars is not None:
                        self._kinds.assign([item.optional_vars], item.context_expr)
                self._block(body)
            case ast.Assert(test=test):
                self._kinds.test(test)
            case ast.Raise():
                pass  # what is raised ends the function, in a trace too
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
                if handlers:
                    self._found("catches errors")
                self._block([*body, *(s for handler in handlers for s in handler.body), *orelse, *finalbody])
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Import() | ast.ImportFrom():
                pass
            case _:
                self._found(f"has a statement that is not followed ({type(node).__name__.lower()})")

    def _loop(self, node: ast.For | ast.While) -> None:
        self._heads.append(node.lineno)
        if isinstance(node, ast.While):
            self._kinds.test(node.test)
        else:
            self._kinds.go_through(node.target, node.iter)
        self._block([*node.body, *node.orelse])
        self._heads.pop()


def _evaluated(node: ast.expr) -> Iterator[ast.expr]:
    """The expressions in one that do something, in the order in which they are done, up to the first that need not be.

    What is done only under a condition comes as the whole expression that it stands in.
    """
    match node:
        case ast.Name() | ast.Constant():
            return
        case ast.Attribute(value=value) | ast.Starred(value=value):
            yield from _evaluated(value)
        case ast.Call(func=func, args=args, keywords=keywords):
            for part in (func, *args, *(keyword.value for keyword in keywords)):
                yield from _evaluated(part)
            yield node
        case ast.Subscript(value=value, slice=index):
            yield from _evaluated(value)
            yield from _evaluated(index)
            yield node
        case ast.BinOp(left=left, right=right):
            yield from _evaluated(left)
            yield from _evaluated(right)
            yield node
        case ast.ListComp(elt=elt, generators=[ast.comprehension(iter=ast.Name(), ifs=[])]):
            yield from _evaluated(elt)
        case _:
            yield node
