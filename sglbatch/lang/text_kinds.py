"""What the expressions of a function may hold of a row's values, found in its source."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import FunctionType
from typing import Any, Final, TypeAlias

_LANGUAGE: Final = __name__.partition(".")[0]
_WRITERS: Final = frozenset({"user", "system", "assistant", "set_var"})
"""Methods of a state that put text into the prompt."""

_COLLECTORS: Final = frozenset({"append", "extend"})
_HARMLESS: Final = frozenset({"len", "list", "tuple", "zip", "enumerate", "reversed", "range", "int", "float", "bool"})
"""Builtins that use nothing of an abstract value but what it watches over."""

_ALL_SEEING: Final = (eval, exec, globals, locals, vars)
_LITERALS: Final = (ast.List, ast.Tuple, ast.ListComp)


class Kind(IntEnum):
    """What an expression may hold. RAW: abstract values, which watch over themselves; TEXT: strings made of them."""

    CONSTANT = 0
    RAW = 1
    TEXT = 2


@dataclass(frozen=True, slots=True)
class Given:
    """What a function's parameters hold; the others have their defaults."""

    kinds: Mapping[str, Kind]
    states: frozenset[str]


Helped: TypeAlias = tuple[FunctionType, Given]
"""A call of a function in the template's own file."""


class Kinds:
    """The kinds of a function's names and expressions; what is found on the way is told to ``found``.

    Args:
        given: of its parameters, and which of them are states.
        found: takes what the function does with a row's values that a trace would not see: behind "the program".
        helper: what a function of the template's own file gives for arguments.

    Attributes:
        states, groups: names of states, and of groups of them, that a fork gave.
    """

    def __init__(
        self, function: FunctionType, given: Given, found: Callable[[str], None], helper: Callable[[Helped], Kind]
    ) -> None:
        self._function = function
        self._globals = function.__globals__
        self._found = found
        self._helper = helper
        self._given = given
        self.states = set(given.states)
        self.groups: set[str] = set()
        self._kinds = dict(given.kinds)
        self._parameters = tuple(inspect.signature(function).parameters)
        self._local = frozenset(function.__code__.co_varnames + function.__code__.co_cellvars)
        self._free = frozenset(function.__code__.co_freevars)

    @property
    def num_known(self) -> int:
        """Grows while anything new is found of the names."""
        return sum(self._kinds.values()) + len(self.states) + len(self.groups)

    # --- names ---

    def _hold(self, name: str, kind: Kind) -> None:
        self._kinds[name] = max(kind, self._kinds.get(name, Kind.CONSTANT))

    def store(self, target: ast.expr, kind: Kind) -> None:
        match target:
            case ast.Name(id=name):
                if name in self.states | self.groups:
                    self._found(f"has {name} for a state and for something else")
                self._hold(name, kind)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for one in targets:
                    self.store(one, kind)
            case ast.Starred(value=value):
                self.store(value, kind)
            case ast.Subscript(value=ast.Name(id=name), slice=key) if name in self._local:
                if self.kind(key) == Kind.TEXT:
                    self._found("takes text made of a row's values for a key")
                if name not in self.states:
                    self._hold(name, kind)
            case _:
                self._found("sets something outside of its own variables")

    def assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        match targets, value:
            case [ast.Name(id=name)], ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=how)):
                if owner in self.states and how in ("fork", "copy"):
                    self.kind(value)
                    (self.groups if how == "fork" else self.states).add(name)
                    self._hold(name, Kind.RAW)
                    return
        kind = self.kind(value)
        for target in targets:
            self.store(target, kind)

    def go_through(self, target: ast.expr, iterable: ast.expr) -> None:
        """``for target in iterable``."""
        match target, iterable:
            case ast.Name(id=name), ast.Name(id=group) if group in self.groups:
                self.states.add(name)
                self._hold(name, Kind.RAW)
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=parts) if len(targets) == len(parts):
                for one, part in zip(targets, parts, strict=True):
                    self.go_through(one, part)
            case ast.Tuple(elts=[number, item]), ast.Call(func=ast.Name(id="enumerate"), args=[items, *_]):
                self.store(number, Kind.CONSTANT)
                self.go_through(item, items)
            case _:
                kind = self.kind(iterable)
                if kind == Kind.TEXT and not isinstance(iterable, _LITERALS):
                    self._found("goes through text made of a row's values")
                self.store(target, kind)

    def is_written_to(self, target: ast.expr) -> bool:
        """``+=`` puts text into a prompt: a state's, a group's, or a group's branch's."""
        match target:
            case ast.Name(id=name):
                return name in self.states or name in self.groups
            case ast.Subscript(value=ast.Name(id=name)):
                return name in self.groups
        return False

    def test(self, node: ast.expr) -> None:
        if self.kind(node) == Kind.TEXT:
            self._found("branches on text made of a row's values")

    # --- expressions ---

    def kind_of_all(self, nodes: Iterable[ast.expr | None]) -> Kind:
        return max((self.kind(node) for node in nodes if node is not None), default=Kind.CONSTANT)

    def kind(self, node: ast.expr) -> Kind:  # noqa: PLR0911, PLR0912  one case a kind of expression
        match node:
            case ast.Constant():
                return Kind.CONSTANT
            case ast.Name(id=name):
                return self._kinds.get(name, Kind.CONSTANT)
            case ast.JoinedStr(values=values):
                return Kind.TEXT if self.kind_of_all(values) else Kind.CONSTANT
            case ast.FormattedValue():
                return self._formatted(node)
            case ast.BinOp(op=op):
                return self._computed(op, [node.left, node.right])
            case ast.UnaryOp(op=op):
                return self._computed(op, [node.operand])
            case ast.BoolOp(values=values):
                for value in values:
                    self.test(value)
                return self.kind_of_all(values)
            case ast.IfExp():
                self.test(node.test)
                return self.kind_of_all([node.body, node.orelse])
            case ast.Compare():
                return self._compared(node)
            case ast.Call():
                return self._called(node)
            case ast.Attribute(value=value):
                return self._looked_at(value)
            case ast.Subscript(value=value, slice=index):
                if self.kind(index) == Kind.TEXT:
                    self._found("takes text made of a row's values for a key")
                return self._looked_at(value)
            case ast.Slice():
                return self.kind_of_all([node.lower, node.upper, node.step])
            case ast.List(elts=elts) | ast.Tuple(elts=elts):
                return self.kind_of_all(elts)
            case ast.Set(elts=elts) if self.kind_of_all(elts) == Kind.CONSTANT:
                return Kind.CONSTANT
            case ast.Dict(keys=keys, values=values) if self.kind_of_all(keys) == Kind.CONSTANT:
                return self.kind_of_all(values)
            case ast.ListComp(elt=elt, generators=generators) | ast.GeneratorExp(elt=elt, generators=generators):
                self._comprehended(generators)
                return self.kind(elt)
            case ast.DictComp(key=key, value=value, generators=generators):
                self._comprehended(generators)
                if self.kind(key):
                    self._found("takes a row's values for keys")
                return self.kind(value)
            case ast.Lambda(args=args, body=body):
                for argument in ast.walk(args):
                    if isinstance(argument, ast.arg):
                        self._hold(argument.arg, Kind.TEXT)
                self.kind(body)
                return Kind.CONSTANT
            case ast.NamedExpr(target=target, value=value):
                self.store(target, kind := self.kind(value))
                return kind
            case ast.Starred(value=value):
                return self.kind(value)
            case _:
                self._found(f"has an expression that is not followed ({type(node).__name__.lower()})")
                return Kind.TEXT

    def _formatted(self, node: ast.FormattedValue) -> Kind:
        kind = self.kind(node.value)
        if kind and node.conversion not in (-1, ord("s")):
            self._found("puts a row's values into text as Python writes them")
        if node.format_spec is not None and (kind == Kind.TEXT or self.kind(node.format_spec)):
            self._found("formats text made of a row's values")
        return kind

    def _computed(self, op: ast.operator | ast.unaryop, nodes: list[ast.expr]) -> Kind:
        kind = self.kind_of_all(nodes)
        if not isinstance(op, ast.Add) and (kind == Kind.TEXT or (kind and isinstance(op, ast.Mod))):
            self._found("computes with text made of a row's values")
        return kind

    def _compared(self, node: ast.Compare) -> Kind:
        kind = self.kind_of_all([node.left, *node.comparators])
        if kind == Kind.TEXT:
            self._found("compares text made of a row's values")
        elif kind and any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops) and not self._asks_a_state(node):
            self._found("looks for a row's value")
        return Kind.CONSTANT

    def _asks_a_state(self, node: ast.Compare) -> bool:
        """``"name" in s``."""
        held = node.comparators[-1]
        return self.kind(node.left) == Kind.CONSTANT and isinstance(held, ast.Name) and held.id in self.states

    def _looked_at(self, value: ast.expr) -> Kind:
        kind = self.kind(value)
        if kind == Kind.TEXT:
            self._found("looks into text made of a row's values")
        return kind

    def _comprehended(self, generators: list[ast.comprehension]) -> None:
        for generator in generators:
            self.go_through(generator.target, generator.iter)
            for condition in generator.ifs:
                self.test(condition)

    # --- calls ---

    def _called(self, node: ast.Call) -> Kind:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        kind = self.kind_of_all(given)
        match node.func:
            case ast.Attribute(value=owner, attr=name) if self._resolved(node.func) is None:
                return self._method(owner, name, kind)
            case ast.Name(id=name) if name in self._local:
                self._found(f"calls {name}")
                return Kind.TEXT
        callee = self._resolved(node.func)
        if isinstance(callee, FunctionType | type) and str(callee.__module__).partition(".")[0] == _LANGUAGE:
            return Kind.TEXT if kind else Kind.CONSTANT
        if any(callee is look for look in _ALL_SEEING):
            self._found(f"calls {ast.unparse(node.func)}")
        if callee is str and kind:
            return kind
        if isinstance(callee, FunctionType) and callee.__code__.co_filename == self._file:
            return self._helped(callee, node, kind)
        if kind and not (kind == Kind.RAW and self._is_harmless(callee)):
            self._found(f"gives a row's values to {ast.unparse(node.func)}")
        return kind

    @property
    def _file(self) -> str:
        return self._function.__code__.co_filename

    def _helped(self, callee: FunctionType, node: ast.Call, kind: Kind) -> Kind:
        names = [keyword.arg for keyword in node.keywords]
        if None in names or any(isinstance(argument, ast.Starred) for argument in node.args):
            self._found(f"calls {callee.__name__} with a star")
            return Kind.TEXT
        try:
            bound = inspect.signature(callee).bind(*node.args, **{str(k.arg): k.value for k in node.keywords})
        except TypeError:  # the call fails, in a trace too
            return kind
        if not all(isinstance(argument, ast.expr) for argument in bound.arguments.values()):
            self._found(f"calls {callee.__name__}, which takes any number of arguments")
            return Kind.TEXT
        kinds = {name: self.kind(argument) for name, argument in bound.arguments.items()}
        states = (
            name
            for name, argument in bound.arguments.items()
            if isinstance(argument, ast.Name) and argument.id in self.states
        )
        return self._helper((callee, Given(kinds, frozenset(states))))

    @property
    def num_given(self) -> int:
        """As ``num_known``, of the parameters as they are now; states are not changed by what is put into them."""
        return sum(self._kinds.get(name, Kind.CONSTANT) for name in self._parameters if name not in self._given.states)

    def _is_harmless(self, callee: Any) -> bool:
        return any(callee is getattr(builtins, name) for name in _HARMLESS)

    def _method(self, owner: ast.expr, name: str, kind: Kind) -> Kind:
        own = self.kind(owner)
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
