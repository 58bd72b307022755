"""Where a function does more with a row's values than putting them into text, found in its source.

A trace sees what is done to its abstract values, but not what is done to plain strings made of them (an f-string's
length), nor what functions written in C do with them. Both are found here: a trace is followed no further than the
first such place. Whatever is not known to be harmless counts as one.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import FunctionType
from typing import Any, Final


class Kind(IntEnum):
    """What an expression may hold. RAW: abstract values, which watch over themselves; TEXT: strings made of them."""

    CONSTANT = 0
    RAW = 1
    TEXT = 2


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


_LANGUAGE: Final = __name__.partition(".")[0]
_WRITERS: Final = frozenset({"user", "system", "assistant", "set_var"})
"""Methods of a state that put text into the prompt."""

_COLLECTORS: Final = frozenset({"append", "extend"})
_HARMLESS: Final = frozenset({"len", "list", "tuple", "zip", "enumerate", "reversed", "range", "int", "float", "bool"})
"""Builtins that use nothing of an abstract value but what it watches over."""

_LITERALS: Final = (ast.List, ast.Tuple, ast.ListComp)


def first_look(function: FunctionType) -> Look | None:
    """The first place in a program's function; None where there is none.

    A function without source is looked at as a whole.
    """
    first_line = function.__code__.co_firstlineno
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return Look(first_line, first_line, "has no source that could be read")
    ast.increment_lineno(tree, start - 1)
    (node,) = tree.body
    if not isinstance(node, ast.FunctionDef):
        return Look(first_line, first_line, "is not written as a def")
    return _Function(function, node).first


class _Function:
    """One function's body, walked until the kinds of its names do not change any more."""

    def __init__(self, function: FunctionType, node: ast.FunctionDef) -> None:
        self._globals = function.__globals__
        state = node.args.args[0].arg if node.args.args else ""
        self._states = {state}
        self._groups: set[str] = set()
        """Names of states, and of groups of them, that a fork gave."""
        parameters = [*node.args.args, *node.args.posonlyargs, *node.args.kwonlyargs]
        self._kinds: dict[str, Kind] = {argument.arg: Kind.RAW for argument in parameters}
        self._local = frozenset(function.__code__.co_varnames + function.__code__.co_cellvars)
        self._free = frozenset(function.__code__.co_freevars)
        self._looks: list[Look] = []
        self._heads: list[int] = []
        self._now: ast.stmt = node
        known = -1
        while known != (known := self._num_known):
            self._looks.clear()
            self._block(node.body)

    @property
    def first(self) -> Look | None:
        return min(self._looks, key=lambda look: look.line, default=None)

    @property
    def _num_known(self) -> int:
        """Grows while anything new is found of the names."""
        return sum(self._kinds.values()) + len(self._states) + len(self._groups)

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
                return name in self._states
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get_meta_info"), args=[ast.Constant()]):
                return name in self._states
        return False

    def _hold(self, name: str, kind: Kind) -> None:
        self._kinds[name] = max(kind, self._kinds.get(name, Kind.CONSTANT))

    # --- statements ---

    def _block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._now = statement
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:  # noqa: PLR0912  one case a kind of statement
        match node:
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value)
            case ast.AnnAssign(target=target, value=annotated):
                self._store(target, Kind.CONSTANT if annotated is None else self._kind(annotated))
            case ast.AugAssign(target=target, op=op, value=value):
                kind = self._kind(value)
                if not isinstance(op, ast.Add) and max(kind, self._kind(target)) == Kind.TEXT:
                    self._found("computes with text made of a row's values")
                if not self._is_written_to(target):
                    self._store(target, kind)
            case ast.Return(value=returned):
                self._kind_of_all([returned])
            case ast.Expr(value=value):
                self._kind(value)
            case ast.If(test=test, body=body, orelse=orelse):
                self._test(test)
                self._block([*body, *orelse])
            case ast.For() | ast.While():
                self._loop(node)
            case ast.With(items=items, body=body):
                for item in items:
                    if not self._kind(item.context_expr):
                        self._found("enters a context that is none of its state's")
                    if item.optional_vars is not None:
                        self._assign([item.optional_vars], item.context_expr)
                self._block(body)
            case ast.Assert(test=test):
                self._test(test)
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
            self._test(node.test)
        else:
            self._go_through(node.target, node.iter)
        self._block([*node.body, *node.orelse])
        self._heads.pop()

    def _go_through(self, target: ast.expr, iterable: ast.expr) -> None:
        """``for target in iterable``."""
        match target, iterable:
            case ast.Name(id=name), ast.Name(id=group) if group in self._groups:
                self._states.add(name)
                self._hold(name, Kind.RAW)
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=parts) if len(targets) == len(parts):
                for one, part in zip(targets, parts, strict=True):
                    self._go_through(one, part)
            case ast.Tuple(elts=[number, item]), ast.Call(func=ast.Name(id="enumerate"), args=[items, *_]):
                self._store(number, Kind.CONSTANT)
                self._go_through(item, items)
            case _:
                kind = self._kind(iterable)
                if kind == Kind.TEXT and not isinstance(iterable, _LITERALS):
                    self._found("goes through text made of a row's values")
                self._store(target, kind)

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        match targets, value:
            case [ast.Name(id=name)], ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=how)):
                if owner in self._states and how in ("fork", "copy"):
                    self._kind(value)
                    (self._groups if how == "fork" else self._states).add(name)
                    self._hold(name, Kind.RAW)
                    return
        kind = self._kind(value)
        for target in targets:
            self._store(target, kind)

    def _is_written_to(self, target: ast.expr) -> bool:
        """``+=`` puts text into a prompt: a state's, a group's, or a group's branch's."""
        match target:
            case ast.Name(id=name):
                return name in self._states or name in self._groups
            case ast.Subscript(value=ast.Name(id=name)):
                return name in self._groups
        return False

    def _store(self, target: ast.expr, kind: Kind) -> None:
        match target:
            case ast.Name(id=name):
                if name in self._states | self._groups:
                    self._found(f"has {name} for a state and for something else")
                self._hold(name, kind)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for one in targets:
                    self._store(one, kind)
            case ast.Starred(value=value):
                self._store(value, kind)
            case ast.Subscript(value=ast.Name(id=name), slice=key) if name in self._local:
                if self._kind(key) == Kind.TEXT:
                    self._found("takes text made of a row's values for a key")
                if name not in self._states:
                    self._hold(name, kind)
            case _:
                self._found("sets something outside of its own variables")

    def _test(self, node: ast.expr) -> None:
        if self._kind(node) == Kind.TEXT:
            self._found("branches on text made of a row's values")

    # --- expressions ---

    def _kind_of_all(self, nodes: Iterable[ast.expr | None]) -> Kind:
        return max((self._kind(node) for node in nodes if node is not None), default=Kind.CONSTANT)

    def _kind(self, node: ast.expr) -> Kind:  # noqa: PLR0911, PLR0912  one case a kind of expression
        match node:
            case ast.Constant():
                return Kind.CONSTANT
            case ast.Name(id=name):
                return self._kinds.get(name, Kind.CONSTANT)
            case ast.JoinedStr(values=values):
                return Kind.TEXT if self._kind_of_all(values) else Kind.CONSTANT
            case ast.FormattedValue():
                return self._formatted(node)
            case ast.BinOp(op=op):
                return self._computed(op, [node.left, node.right])
            case ast.UnaryOp(op=op):
                return self._computed(op, [node.operand])
            case ast.BoolOp(values=values):
                for value in values:
                    self._test(value)
                return self._kind_of_all(values)
            case ast.IfExp():
                self._test(node.test)
                return self._kind_of_all([node.body, node.orelse])
            case ast.Compare():
                return self._compared(node)
            case ast.Call():
                return self._called(node)
            case ast.Attribute(value=value):
                return self._looked_at(value)
            case ast.Subscript(value=value, slice=index):
                if self._kind(index) == Kind.TEXT:
                    self._found("takes text made of a row's values for a key")
                return self._looked_at(value)
            case ast.Slice():
                return self._kind_of_all([node.lower, node.upper, node.step])
            case ast.List(elts=elts) | ast.Tuple(elts=elts):
                return self._kind_of_all(elts)
            case ast.Set(elts=elts) if self._kind_of_all(elts) == Kind.CONSTANT:
                return Kind.CONSTANT
            case ast.Dict(keys=keys, values=values) if self._kind_of_all(keys) == Kind.CONSTANT:
                return self._kind_of_all(values)
            case ast.ListComp(elt=elt, generators=generators) | ast.GeneratorExp(elt=elt, generators=generators):
                self._comprehended(generators)
                return self._kind(elt)
            case ast.DictComp(key=key, value=value, generators=generators):
                self._comprehended(generators)
                if self._kind(key):
                    self._found("takes a row's values for keys")
                return self._kind(value)
            case ast.Lambda(args=args, body=body):
                for argument in args.args:
                    self._hold(argument.arg, Kind.TEXT)
                self._kind(body)
                return Kind.CONSTANT
            case ast.NamedExpr(target=target, value=value):
                self._store(target, kind := self._kind(value))
                return kind
            case ast.Starred(value=value):
                return self._kind(value)
            case _:
                self._found(f"has an expression that is not followed ({type(node).__name__.lower()})")
                return Kind.TEXT

    def _formatted(self, node: ast.FormattedValue) -> Kind:
        kind = self._kind(node.value)
        if kind and node.conversion not in (-1, ord("s")):
            self._found("puts a row's values into text as Python writes them")
        if node.format_spec is not None and (kind == Kind.TEXT or self._kind(node.format_spec)):
            self._found("formats text made of a row's values")
        return kind

    def _computed(self, op: ast.operator | ast.unaryop, nodes: list[ast.expr]) -> Kind:
        kind = self._kind_of_all(nodes)
        if not isinstance(op, ast.Add) and (kind == Kind.TEXT or (kind and isinstance(op, ast.Mod))):
            self._found("computes with text made of a row's values")
        return kind

    def _compared(self, node: ast.Compare) -> Kind:
        kind = self._kind_of_all([node.left, *node.comparators])
        if kind == Kind.TEXT:
            self._found("compares text made of a row's values")
        elif kind and any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops) and not self._asks_a_state(node):
            self._found("looks for a row's value")
        return Kind.CONSTANT

    def _asks_a_state(self, node: ast.Compare) -> bool:
        """``"name" in s``."""
        held = node.comparators[-1]
        return self._kind(node.left) == Kind.CONSTANT and isinstance(held, ast.Name) and held.id in self._states

    def _looked_at(self, value: ast.expr) -> Kind:
        kind = self._kind(value)
        if kind == Kind.TEXT:
            self._found("looks into text made of a row's values")
        return kind

    def _comprehended(self, generators: list[ast.comprehension]) -> None:
        for generator in generators:
            self._go_through(generator.target, generator.iter)
            for condition in generator.ifs:
                self._test(condition)

    # --- calls ---

    def _called(self, node: ast.Call) -> Kind:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        kind = self._kind_of_all(given)
        match node.func:
            case ast.Attribute(value=owner, attr=name) if self._resolved(node.func) is None:
                return self._method(owner, name, kind)
            case ast.Name(id=name) if name in self._local:
                self._found(f"calls {name}")
                return Kind.TEXT
        callee = self._resolved(node.func)
        if isinstance(callee, FunctionType | type) and callee.__module__.partition(".")[0] == _LANGUAGE:
            return Kind.TEXT if kind else Kind.CONSTANT
        if callee is str and kind:
            return kind
        if kind and not (kind == Kind.RAW and self._is_harmless(callee)):
            self._found(f"gives a row's values to {ast.unparse(node.func)}")
        return kind

    def _is_harmless(self, callee: Any) -> bool:
        return any(callee is getattr(builtins, name) for name in _HARMLESS)

    def _method(self, owner: ast.expr, name: str, kind: Kind) -> Kind:
        own = self._kind(owner)
        local = isinstance(owner, ast.Name) and owner.id in self._local
        if own == Kind.CONSTANT and kind and isinstance(owner, ast.Constant) and name in ("join", "format"):
            if name == "format" and kind == Kind.TEXT:
                self._found("formats text made of a row's values")
            return Kind.TEXT
        if local and name in _COLLECTORS and isinstance(owner, ast.Name):
            self._hold(owner.id, kind)
            return Kind.CONSTANT
        if own == Kind.TEXT:
            self._found("looks into text made of a row's values")
        elif kind == Kind.TEXT and not (own == Kind.RAW and name in _WRITERS):
            self._found(f"gives text made of a row's values to {name}")
        elif kind and own == Kind.CONSTANT:
            self._found(f"gives a row's values to {name}")
        return max(own, kind)

    def _resolved(self, node: ast.expr) -> Any:
        """The object that a name, or a name of a module, means; None for others."""
        match node:
            case ast.Name(id=name) if name not in self._local and name not in self._free:
                return self._globals.get(name, getattr(builtins, name, None))
            case ast.Attribute(value=ast.Name() as owner, attr=name):
                module = self._resolved(owner)
                return getattr(module, name, None) if inspect.ismodule(module) else None
        return None


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
