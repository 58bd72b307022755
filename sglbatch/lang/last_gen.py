"""Which gen a row of a function asks last, read from the function's source, whatever path the row takes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Final, TypeAlias

from sglbatch.errors import SglbatchError

_GENS: Final = ("gen", "gen_int", "gen_string")
_CONSTRAINTS: Final = ("json_schema", "regex", "dtype", "choices")
_READS_ONLY: Final = ("str", "len", "repr", "print", "isinstance", "id", "type")
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)

Lasts: TypeAlias = frozenset["ast.Call | ast.Lambda | None"]
"""What may have been the last gen when a row gets to a place: its call, or a call or lambda that may hold it; None is
no gen so far. Empty where no row gets to."""

_NOWHERE: Final[Lasts] = frozenset()


def last_gen(source: str, *, file: str = "", first_line: int = 1) -> str:
    """The name of the gen without a constraint that every row which asks one asks last.

    Args:
        source: of one function, or statements.
        first_line: of the source in its file, for messages.

    Raises:
        SglbatchError: ``no-record`` (none, or none with a plain name); ``uncertain-record`` (it depends on the row, or
            cannot be told); ``constrained-record``.
    """
    body = ast.parse(source).body
    state = ""
    if isinstance(body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        state = next((argument.arg for argument in [*body[0].args.posonlyargs, *body[0].args.args]), "")
        body = body[0].body
    paths = _Paths(state=state, local=_local_askers(body))
    found = [call for call in paths.of(body) if call is not None]
    found.sort(key=lambda call: (call.lineno, call.col_offset))
    return _Found(found, file, first_line - 1).name(_gens(body))


@dataclass(frozen=True, slots=True)
class _Found:
    """The calls that may be the last gen, in source order. ``before``: lines before the source in its file."""

    calls: Sequence[ast.Call | ast.Lambda]
    file: str
    before: int

    def name(self, gens: Sequence[ast.Call]) -> str:
        """Args: gens: all of the source."""
        names: dict[str, ast.Call] = {}
        for call in self.calls:
            if not isinstance(call, ast.Call) or _called(call) not in _GENS:
                raise self._error(
                    "uncertain-record",
                    f"--schema is for the template's last gen, which {ast.unparse(call)} may hide",
                    call,
                    "end the template's own function with the gen, or give that gen json_schema in the template",
                )
            name = _name(call)
            if name is None:
                break
            names.setdefault(name, call)
        else:
            if len(names) == 1:
                self._check_free()
                self._check_alone(next(iter(names)), gens)
                return next(iter(names))
        if len(names) > 1:
            listed = " or ".join(f"{name!r} (line {self._line(call)})" for name, call in names.items())
            raise self._error(
                "uncertain-record",
                f"--schema is for the template's last gen, but it depends on the row which one that is: {listed}",
                next(iter(names.values())),
                "let every path end with the same gen, or give each its json_schema in the template",
            )
        raise self._error(
            "no-record",
            "--schema needs a last gen with a plain name in the template",
            self.calls[0] if self.calls else None,
            'end it with sgl.gen("record")',
        )

    def _check_free(self) -> None:
        for call in self.calls:
            assert isinstance(call, ast.Call)
            has = _constraint(call)
            if has is not None:
                raise constrained_record(_name(call), has, where=self._where(call))

    def _check_alone(self, name: str, gens: Sequence[ast.Call]) -> None:
        same = [call for call in gens if _name(call) == name]
        other = next((call for call in same if call not in self.calls), None)
        if other is not None:
            lines = ", ".join(str(self._line(call)) for call in same)
            raise self._error(
                "uncertain-record",
                f"--schema is for the template's last gen alone, but several have its name {name!r} (lines {lines})",
                other,
                "give the gens before it names of their own",
            )

    def _line(self, node: ast.expr) -> int:
        return node.lineno + self.before

    def _where(self, node: ast.expr) -> str | None:
        return f"{self.file}:{self._line(node)}" if self.file else None

    def _error(self, code: str, message: str, node: ast.expr | None, hint: str) -> SglbatchError:
        where = (self.file or None) if node is None else self._where(node)
        return SglbatchError(code, message, hint=hint, where=where)


def constrained_record(name: str | None, has: str, *, where: str | None = None) -> SglbatchError:
    """The error of a last gen to which two constraints are given."""
    return SglbatchError(
        "constrained-record",
        f"--schema is for the template's last gen, {name!r}, but that gen has {has} of its own",
        hint=f"remove one of the two: {has} in the template, or --schema",
        where=where,
    )


@dataclass(slots=True)
class _Paths:
    """Follows a body's statements.

    Args:
        state: name of the function's state; what is called with it may ask.
        local: functions defined inside that ask.
        ends: the lasts of paths that have returned.
        loops: [lasts at a break, lasts at a continue] of the loops around, the innermost last.
    """

    state: str
    local: frozenset[str]
    ends: Lasts = _NOWHERE
    loops: list[list[Lasts]] = field(default_factory=list)

    def of(self, body: Sequence[ast.stmt]) -> Lasts:
        return self._block(body, frozenset([None])) | self.ends

    def _block(self, statements: Iterable[ast.stmt], lasts: Lasts) -> Lasts:
        for statement in statements:
            if not lasts:
                break
            lasts = self._statement(statement, lasts)
        return lasts

    def _statement(self, statement: ast.stmt, lasts: Lasts) -> Lasts:  # noqa: PLR0911  one case a statement
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return lasts
            case ast.If(test=test, body=body, orelse=orelse):
                lasts = self._expression(test, lasts)
                return self._block(body, lasts) | self._block(orelse, lasts)
            case ast.For(iter=head) | ast.AsyncFor(iter=head):
                return self._loop(statement, self._expression(head, lasts), ends=True)
            case ast.While(test=test):
                ends = not (isinstance(test, ast.Constant) and test.value)
                return self._loop(statement, self._expression(test, lasts), ends=ends)
            case ast.Return():
                self.ends |= self._children(statement, lasts)
                return _NOWHERE
            case ast.Raise():
                return _NOWHERE
            case ast.Break() | ast.Continue():
                self.loops[-1][isinstance(statement, ast.Continue)] |= lasts
                return _NOWHERE
            case ast.Try() | ast.TryStar():
                return self._try(statement, lasts)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                entered = reduce(lambda before, item: self._expression(item.context_expr, before), items, lasts)
                return self._block(body, entered)
            case ast.Match():
                return self._match(statement, lasts)
            case _:
                return self._children(statement, lasts)

    def _loop(self, loop: ast.For | ast.AsyncFor | ast.While, lasts: Lasts, *, ends: bool) -> Lasts:
        at_head = lasts
        self.loops.append([_NOWHERE, _NOWHERE])
        while True:
            after = self._block(loop.body, at_head) | self.loops[-1][1]
            if isinstance(loop, ast.While):
                after = self._expression(loop.test, after) if after else after
            if after <= at_head:
                break
            at_head |= after
        broken, _ = self.loops.pop()
        return (self._block(loop.orelse, at_head) if ends else _NOWHERE) | broken

    def _try(self, statement: ast.Try | ast.TryStar, lasts: Lasts) -> Lasts:
        inside: Lasts = frozenset(_gens(statement.body))
        left = self._block(statement.orelse, self._block(statement.body, lasts))
        for handler in statement.handlers:
            left |= self._block(handler.body, lasts | inside)
        if self.ends:
            self.ends |= frozenset(_gens(statement.finalbody))
        return self._block(statement.finalbody, left)

    def _match(self, statement: ast.Match, lasts: Lasts) -> Lasts:
        lasts = self._expression(statement.subject, lasts)
        left = _NOWHERE
        for case in statement.cases:
            left |= self._block(case.body, lasts)
            if isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and case.guard is None:
                return left
        return left | lasts

    def _children(self, node: ast.AST, lasts: Lasts) -> Lasts:
        return reduce(lambda before, child: self._expression(child, before), ast.iter_child_nodes(node), lasts)

    def _expression(self, node: ast.AST, lasts: Lasts) -> Lasts:  # noqa: PLR0911  one case a kind of expression
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                lasts = self._expression(test, lasts)
                return self._expression(body, lasts) | self._expression(orelse, lasts)
            case ast.BoolOp(values=[first, *others]):
                lasts = self._expression(first, lasts)
                return reduce(lambda before, value: before | self._expression(value, before), others, lasts)
            case ast.Lambda():
                return lasts | {node} if _gens([node]) else lasts
            case ast.Call():
                lasts = self._children(node, lasts)
                if _called(node) in _GENS:
                    return frozenset([node])
                return lasts | {node} if self._may_ask(node) else lasts
            case _ if isinstance(node, _COMPREHENSIONS):
                return lasts | self._children(node, lasts)
            case _:
                return self._children(node, lasts)

    def _may_ask(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Name) and call.func.id in self.local:
            return True
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        names = {value.id for value in given if isinstance(value, ast.Name)}
        return bool(names & self.local) or (self.state in names and _called(call) not in _READS_ONLY)


def _local_askers(body: Sequence[ast.stmt]) -> frozenset[str]:
    inner = [n for s in body for n in ast.walk(s) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(function.name for function in inner if _gens(function.body))


def _gens(nodes: Sequence[ast.AST]) -> list[ast.Call]:
    """All calls of gen, in source order."""
    calls = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Call) and _called(n) in _GENS]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _name(call: ast.Call) -> str | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg == "name"]
    first = next(iter([*call.args[:1], *named]), None)
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def _constraint(call: ast.Call) -> str | None:
    if _called(call) != "gen":
        return "the type that gen_int or gen_string gives it"
    given = {keyword.arg for keyword in call.keywords if not _is_none(keyword.value)}
    return next((name for name in _CONSTRAINTS if name in given), None)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
