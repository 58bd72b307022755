"""Where a function changes something in place that it may have got from elsewhere, found in its source.

Such a thing may have other names: what is put into a list through one is then read through another, where nobody sees
that it came from a row. So such a change counts as more than putting values into text. A list or dictionary that the
function makes itself may be filled through the name that it was made under: whoever has it from there has its kind too.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator

_FILLING = frozenset({"append", "extend"})
_CHANGING = _FILLING | frozenset(
    {
        "add", "appendleft", "clear", "difference_update", "discard", "extendleft", "insert", "intersection_update",
        "move_to_end", "pop", "popitem", "popleft", "remove", "reverse", "rotate", "setdefault", "sort", "subtract",
        "symmetric_difference_update", "update", "write", "writelines",
    }
)  # fmt: skip
_TEXT_METHODS = frozenset(
    {"capitalize", "format", "join", "lower", "lstrip", "replace", "rstrip", "strip", "title", "upper"}
)


class InPlace:
    """The changes of one function.

    Args:
        is_written_to: whether ``+=`` on a target puts text into a prompt.
        states: the names of states, whose variables may be set.
    """

    def __init__(
        self, function: ast.FunctionDef, *, is_written_to: Callable[[ast.expr], bool], states: Container[str]
    ) -> None:
        self._is_written_to = is_written_to
        self._states = states
        self._made, self._values = _own_names(function)

    def reasons(self, statement: ast.stmt) -> Iterator[str]:
        """What the statement itself changes, without those inside it; goes behind "the program"."""
        match statement:
            case ast.AugAssign(target=target):
                own = isinstance(target, ast.Name) and target.id in self._values | self._made
                if not own and not self._is_written_to(target):
                    yield "adds to something that may have another name"
            case ast.Assign(targets=targets):
                if any(self._is_part(node) for target in targets for node in ast.walk(target)):
                    yield "sets a part of something that may have another name"
        for child in ast.iter_child_nodes(statement):
            if not isinstance(child, ast.stmt | ast.excepthandler):
                yield from self._in_expression(child)

    def _is_part(self, target: ast.AST) -> bool:
        match target:
            case ast.Subscript(value=ast.Name(id=name)):
                return name not in self._states and name not in self._made
            case ast.Subscript() | ast.Attribute():
                return True
        return False

    def _in_expression(self, expression: ast.AST) -> Iterator[str]:
        for node in ast.walk(expression):
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in _CHANGING:
                    own = isinstance(owner, ast.Name) and owner.id in self._made and name in _FILLING
                    if not own:
                        yield f"changes something in place ({name})"
                case ast.Compare(ops=ops, comparators=others):
                    for op, other in zip(ops, others, strict=True):
                        if isinstance(op, ast.Is | ast.IsNot) and not _is_single(other):
                            yield "asks whether two names stand for the same object"


def _is_single(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _own_names(function: ast.FunctionDef) -> tuple[frozenset[str], frozenset[str]]:
    """The names that only ever stand for what is made in the function: lists and dictionaries; texts and numbers."""
    made: set[str] = set()
    values: set[str] = set()
    others = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    accounted: set[int] = set()
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name) as target], value=value):
                accounted.add(id(target))
                (made if _is_made(value) else values if _is_value(value) else others).add(name)
            case ast.AugAssign(target=ast.Name() as target):
                accounted.add(id(target))
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and id(node) not in accounted:
            others.add(node.id)
    return frozenset(made - values - others), frozenset(values - made - others)


def _is_made(node: ast.expr) -> bool:
    """A new list or dictionary."""
    return isinstance(node, ast.List | ast.ListComp | ast.Dict | ast.DictComp)


def _is_value(node: ast.expr) -> bool:
    """Certainly a text or a number."""
    match node:
        case ast.JoinedStr():
            return True
        case ast.Constant(value=value):
            return isinstance(value, str | int | float)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _is_value(left) or _is_value(right)
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in _TEXT_METHODS
        case ast.Call(func=ast.Name(id=name)):
            return name in ("str", "len", "int", "float")
    return False
