"""Tracing a program: running it once with abstract arguments and answers, and keeping what it adds.

Source: the compiler mode of the SGLang paper (section on the compiler and its intermediate representation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from sglbatch.lang.abstract import Abstract, TraceStop, has_placeholder, parts, placeholder
from sglbatch.lang.calls import Call, Choices, ModelCall
from sglbatch.lang.chat import Frame
from sglbatch.lang.environment import Environment
from sglbatch.lang.graph import Graph, Node, NodeKind
from sglbatch.lang.guard import Guard
from sglbatch.lang.operations import Append, Ask, Fork, Join, Mark, Operation, OrderFree
from sglbatch.lang.outcome import template_line
from sglbatch.lang.program import Program
from sglbatch.lang.stream import Stream
from sglbatch.lang.waits import Ready
from sglbatch.types import Generate, Result

if TYPE_CHECKING:
    from sglbatch.lang.function import SglFunction

_ARGUMENT: Final = "a:"
_ANSWER: Final = "v:"


class BracketFrames:
    """Messages' frames where no model is known: the role in brackets."""

    def frame(self, roles: tuple[str, ...]) -> Frame:
        return Frame(f"[{roles[-1]}]\n", "\n")


PLAIN_ENVIRONMENT: Final = Environment(seed=0, chat=BracketFrames(), specials={}, eos_token_ids=frozenset())


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What a program adds, with placeholders for what is not known.

    Args:
        streams: the operations of each stream in the order in which they were added, the root's first.
        stopped: see ``Graph``.
        error: the program failed without having met anything abstract.
    """

    name: str
    streams: tuple[Stream, ...]
    stopped: str | None
    error: str | None = None

    @property
    def order_free(self) -> tuple[str, ...]:
        """Names of texts whose order the program leaves open."""
        logs = (stream.log or [] for stream in self.streams)
        names = (o.names for log in logs for o in log if isinstance(o, OrderFree))
        return tuple(dict.fromkeys(name for group in names for name in group))

    @property
    def graph(self) -> Graph:
        return _Builder(self).build()

    def operations(self, arguments: Mapping[str, Any], answers: Mapping[str, str]) -> list[list[object]]:
        """``comparable`` of each stream with the placeholders filled in.

        Args:
            arguments: parameter -> value as data.
            answers: ``answer_name`` of a call -> its text.
        """
        values = {_ARGUMENT + name: str(value) for name, value in arguments.items()}
        values |= {_ANSWER + name: text for name, text in answers.items()}
        return [comparable(stream.log or [], values) for stream in self.streams]


def trace_program(
    function: SglFunction, given: Mapping[str, Any], environment: Environment = PLAIN_ENVIRONMENT
) -> Trace:
    """Run a program once on abstract values.

    Args:
        given: arguments that are known; the others are abstract.
    """
    unknown = {p.name: Abstract.of(_ARGUMENT + p.name, f"the column {p.name!r}") for p in function.parameters}
    return run_traced(function, {**unknown, **given}, environment, _AbstractAnswers())


class _AbstractAnswers:
    """Every answer is a placeholder."""

    def text(self, call: ModelCall) -> str:
        return placeholder(_ANSWER + answer_name(call))


class _Tracer:
    """Makes what a traced program reads abstract."""

    def added(self, stream: Stream, operation: Operation) -> None:
        """The streams' own logs are enough."""

    def waits(self, ready: Ready) -> None:
        """Where it waits is not kept."""

    def ends(self, returned: Any) -> None:
        """What it returns is not kept."""

    def wrap(self, value: Any, stream: Stream, name: str | None) -> Any:
        if isinstance(value, str) and has_placeholder(value):
            names = [part.removeprefix(_ANSWER) for known, part in parts(value) if known]
            shown = names[0].partition(" ")[2] or names[0].removeprefix(_ARGUMENT)
            return Abstract._plain(value, f"the answer {shown!r}" if _ANSWER in value else f"the column {shown!r}")
        if isinstance(value, list):
            return [self.wrap(item, stream, name) for item in value]
        return value


def answer_name(call: ModelCall) -> str:
    """Path and variable: which answer it is, the same in every run of a program."""
    return f"{'.'.join(map(str, call.path))} {call.name}"


def run_traced(function: SglFunction, arguments: Mapping[str, Any], environment: Environment, answers: Any) -> Trace:
    """Run a program with made-up answers, keeping its operations.

    Args:
        answers: ``text(call)`` gives the answer to a call.
    """
    program = Program(function, arguments, program_id=0, row_key="trace", keep_state=True)
    program.tracer = _Tracer()
    stopped = None
    try:
        program.start(environment, Guard(frozenset()))
        while not program.done:
            for call in program.take_calls():
                program.deliver(call.path, made_up_answer(call, answers))
    except TraceStop as stop:
        place = template_line(stop, function.source)
        stopped = stop.reason + (f" ({place})" if place else "")
    error = program.outcome.error
    message = None if error is None or stopped else f"{error.code}: {error.message}"
    return Trace(name=function.__name__, streams=tuple(program.streams), stopped=stopped, error=message)


def made_up_answer(call: Call, answers: Any) -> Result:
    """The result of a call to which ``answers.text(call)`` is the answer."""
    assert isinstance(call, ModelCall), "outside calls stop a trace"
    if isinstance(call.question, Choices):
        return Result(request_id=-1, text=answers.text(call), choice=0, finish_reason="choice")
    return Result(request_id=-1, text=answers.text(call))


def comparable(log: Sequence[Operation], values: Mapping[str, str]) -> list[object]:
    """The operations of one stream in a form in which equal programs are equal.

    Neighbouring texts are one text; a message's content has no leading white space.

    Args:
        values: placeholder -> text.
    """
    items: list[object] = []
    at_start = False
    for operation in log:
        match operation:
            case Append(text=text):
                filled = "".join(values.get(part, part) if known else part for known, part in parts(text.text))
                filled = filled.lstrip() if at_start else filled
                at_start = at_start and not filled
                if items and isinstance(items[-1], str):
                    items[-1] += filled
                elif filled:
                    items.append(filled)
            case Mark(role=role):
                items.append(("message", role))
                at_start = role is not None
            case Ask():
                items.append(("ask", operation.index, operation.name, operation.question, operation.n))
                at_start = False
            case Fork(children=children):
                items.append(("fork", len(children)))
            case Join(mode=mode):
                items.append(("join", mode))
            case _:
                pass  # variables that Python sets: no text and no call
    return items


class _Builder:
    """From operations to nodes, each stream from where its parent forked."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._nodes: list[Node] = []
        self._last: dict[int, int] = {}
        self._asked: dict[str, int] = {}
        self._numbers = {id(stream): number for number, stream in enumerate(trace.streams)}

    def build(self) -> Graph:
        forked = {id(c) for s in self._trace.streams for o in s.log or [] if isinstance(o, Fork) for c in o.children}
        for stream in self._trace.streams:
            if id(stream) not in forked:
                self._walk(stream)
        return Graph(name=self._trace.name, nodes=tuple(self._nodes), stopped=self._trace.stopped)

    def _walk(self, stream: Stream) -> None:
        for operation in stream.log or []:
            match operation:
                case Append(text=text):
                    self._add_text(stream, text.text)
                case Ask():
                    self._add_ask(stream, operation)
                case Fork(children=children):
                    fork = self._add(stream, "Fork", len(children))
                    for i, child in enumerate(children):
                        self._last[id(child)] = fork
                        self._add(child, "GetForkItem", i)
                        self._walk(child)
                case Join(children=children, mode=mode):
                    self._add(stream, "Join", mode, tuple(self._last[id(child)] for child in children))
                case _:
                    pass  # no node: the chat template's text around messages is text

    def _add_text(self, stream: Stream, text: str) -> None:
        for known, part in parts(text):
            if not known:
                self._add_constant(stream, part)
            elif part.startswith(_ARGUMENT):
                self._add(stream, "Argument", part.removeprefix(_ARGUMENT))
            else:
                answer = part.removeprefix(_ANSWER)
                source = self._asked.get(answer)
                self._add(stream, "Variable", answer.partition(" ")[2], () if source is None else (source,))

    def _add_constant(self, stream: Stream, text: str) -> None:
        """Neighbouring constants are one node."""
        last = self._last.get(id(stream))
        node = None if last is None else self._nodes[last]
        if node is not None and node.kind == "ConstantText" and node.stream == self._numbers[id(stream)]:
            self._nodes[node.id] = replace(node, value=f"{node.value}{text}")
        else:
            self._add(stream, "ConstantText", text)

    def _add_ask(self, stream: Stream, ask: Ask) -> None:
        kind: NodeKind = "Select" if isinstance(ask.question, Choices) else "Gen"
        node = self._add(stream, kind, ask.name or "", details=_details(ask))
        for path in stream.paths(ask):
            self._asked[f"{'.'.join(map(str, path))} {ask.name or ''}"] = node

    def _add(
        self,
        stream: Stream,
        kind: NodeKind,
        value: str | int,
        others: tuple[int, ...] = (),
        details: dict[str, Any] | None = None,
    ) -> int:
        before = self._last.get(id(stream))
        after = (() if before is None else (before,)) + tuple(other for other in others if other != before)
        node = Node(
            id=len(self._nodes),
            kind=kind,
            stream=self._numbers[id(stream)],
            value=value,
            after=after,
            details=details,
        )
        self._nodes.append(node)
        self._last[id(stream)] = node.id
        return node.id


def _details(ask: Ask) -> dict[str, Any]:
    question = ask.question
    if isinstance(question, Choices):
        details: dict[str, Any] = {"choices": list(question.choices)}
        return details if question.method == "exact" else details | {"choices_method": question.method}
    shown = asdict(question)
    defaults = {f.name: f.default for f in fields(Generate)}
    details = {name: shown[name] for name in shown if name == "max_tokens" or shown[name] != defaults[name]}
    if "constraint" in details:
        details["constraint"] = {k: v for k, v in details["constraint"].items() if v is not None}
    details = {name: list(value) if isinstance(value, tuple) else value for name, value in details.items()}
    return details | ({"n": ask.n} if ask.n > 1 else {})
