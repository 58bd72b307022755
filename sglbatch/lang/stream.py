"""One stream of a program: a queue of operations that advances until it meets a call without an answer."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from sglbatch.errors import CallError
from sglbatch.lang.calls import Choices, ModelCall
from sglbatch.lang.guard import Guard
from sglbatch.lang.vartypes import list_of, merge_types, type_of_value
from sglbatch.types import CallPath, ErrorInfo, Generate, Ids, Result, Segment, Text, VarType

JoinMode: TypeAlias = Literal["gather_variable", "concate_and_append"]


# --- operations --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """Constant text. ``turn``: how often the program had read something when it was added."""

    text: Text
    turn: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A message's content begins (a role) or ends (None) here."""

    role: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A gen or a select. ``index``: its place among the stream's calls and forks."""

    index: int
    turn: int
    name: str | None
    question: Generate | Choices
    var_type: VarType


@dataclass(frozen=True, slots=True, eq=False)
class Assign:
    """``s[name] = value`` behind operations that may set the same name."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    children: tuple[Stream, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    children: tuple[Stream, ...]
    mode: JoinMode


Operation: TypeAlias = Append | Mark | Ask | Assign | Fork | Join


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A value of the program.

    Args:
        generated: straight from the model, not yet guarded.
        joined: a list made by a join; a later join of the same name extends it.
    """

    value: Any
    var_type: VarType
    finish: str | None = None
    meta: dict[str, Any] | None = None
    generated: bool = False
    joined: bool = False


class Host(Protocol):
    """What a stream needs of its program."""

    guard: Guard

    def ask(self, stream: Stream, call: ModelCall) -> None:
        """Take the call; the answer comes through ``Stream.answer``, at once where it is known."""

    def touch(self, stream: Stream) -> None:
        """The stream may be able to advance."""


@dataclass(slots=True)
class _Message:
    role: str
    start: int
    end: int | None = None


@dataclass(slots=True, eq=False)
class Stream:
    """State of one branch: prompt segments, variables, and the operations still to come.

    ``lost`` are the variables that will never be set because the stream has failed.
    Layout of ``pieces``: one entry for each stretch of text, (text, generated); ``segments`` is the same as the
    prompt's segments, with generated text as its token ids. Both start with what the parent had at the fork.
    """

    host: Host
    path: CallPath
    started: bool = False
    queue: deque[Operation] = field(default_factory=deque)
    segments: list[Segment] = field(default_factory=list)
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    messages: list[_Message] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    queued_names: Counter[str] = field(default_factory=Counter)
    last_assign: dict[str, Assign] = field(default_factory=dict)
    num_joins: int = 0
    num_indices: int = 0
    waiting: Ask | None = None
    position: int | None = None
    error: ErrorInfo | None = None
    lost: set[str] = field(default_factory=set)
    joiner: Stream | None = None
    fork_segment: int = 0
    fork_piece: int = 0

    # --- adding operations ---

    def take_index(self) -> int:
        self.num_indices += 1
        return self.num_indices - 1

    def add(self, operation: Operation) -> None:
        """Queue one operation. On a failed stream it is taken back at once: nothing can follow the failure."""
        if isinstance(operation, Ask) and operation.name is not None:
            self.queued_names[operation.name] += 1
            self.last_assign.pop(operation.name, None)
        elif isinstance(operation, Assign):
            self.queued_names[operation.name] += 1
            self.last_assign[operation.name] = operation
        elif isinstance(operation, Join):
            self.num_joins += 1
            self.last_assign.clear()
        self.queue.append(operation)
        if self.error is not None:
            self.fail(self.error)
        self.host.touch(self)

    # --- what can be read ---

    @property
    def drained(self) -> bool:
        return self.started and self.waiting is None and not self.queue

    @property
    def has_later_call(self) -> bool:
        """Something queued will put the text of this stream to the model again."""
        return any(isinstance(operation, (Ask, Fork)) for operation in self.queue)

    def settled(self, name: str) -> bool:
        """``name`` will not change any more by what is queued now."""
        if self.error is not None:
            return True
        return self.started and self.num_joins == 0 and self.queued_names[name] == 0

    # --- advancing ---

    def advance(self) -> None:
        """Carry out operations until a call or a join has to be waited for."""
        while self.started and self.error is None and self.waiting is None and self.queue:
            operation = self.queue[0]
            if isinstance(operation, Join) and not self._join(operation):
                return
            if self.error is not None:
                break
            self.queue.popleft()
            self._do(operation)
        if self.joiner is not None and (self.drained or self.error is not None):
            self.host.touch(self.joiner)

    def _do(self, operation: Operation) -> None:
        match operation:
            case Append(text=text):
                self._append(text)
            case Mark(role=role):
                self._mark(role)
            case Assign(name=name, value=value):
                self._name_done(name)
                self.assign(name, value)
                if self.last_assign.get(name) is operation:
                    del self.last_assign[name]
            case Fork(children=children):
                for child in children:
                    child.start_from(self)
            case Ask():
                self._ask(operation)
            case Join():
                self.num_joins -= 1

    def _append(self, text: Text) -> None:
        if not text.text:
            return
        self.pieces.append((text.text, False))
        last = self.segments[-1] if self.segments else None
        own = len(self.segments) > self.fork_segment
        if own and isinstance(last, Text) and last.specials == text.specials:
            text = Text(last.text + text.text, text.specials)
            self.segments.pop()
        self.segments.append(text)

    def _mark(self, role: str | None) -> None:
        if role is not None:
            self.messages.append(_Message(role, len(self.pieces)))
        else:
            last = self.messages[-1]
            self.messages[-1] = _Message(last.role, last.start, len(self.pieces))

    def _ask(self, ask: Ask) -> None:
        self.waiting = ask
        question = ask.question
        if isinstance(question, Choices):
            question = Choices(
                choices=question.choices,
                temperature=question.temperature,
                specials=question.specials,
                following=self._following(ask.turn),
            )
        call = ModelCall(
            path=(*self.path, ask.index),
            name=ask.name or "",
            prompt=tuple(self.segments),
            question=question,
            position=self.position,
        )
        self.host.ask(self, call)

    def _following(self, turn: int) -> tuple[Text, ...]:
        """Constant text right behind the current call that was added before the program next read something.

        Bounded by the turn, so that it does not depend on when answers arrive.
        """
        texts: list[Text] = []
        for operation in self.queue:
            if isinstance(operation, Append) and operation.turn == turn:
                texts.append(operation.text)
            elif not isinstance(operation, (Mark, Assign)):
                break
        return tuple(texts)

    # --- answers ---

    def answer(self, result: Result, position: int | None) -> None:
        """Take the result of the call that is waited for; ``advance`` goes on from there."""
        ask = self.waiting
        assert ask is not None, "an answer for a stream that waits for none"
        self.waiting = None
        if position is not None:
            self.position = position
        if result.error is not None:
            self.fail(result.error)
            return
        value = (
            self._take_choice(ask.question, result) if isinstance(ask.question, Choices) else self._take_text(result)
        )
        if ask.name is None:
            return
        self._name_done(ask.name)
        meta: dict[str, Any] = {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.generated_tokens,
            "finish_reason": {"type": result.finish_reason},
        }
        if result.choice_logprobs is not None and isinstance(ask.question, Choices):
            meta["choice_logprobs"] = dict(zip(ask.question.choices, result.choice_logprobs, strict=True))
        generated = isinstance(ask.question, Generate)
        self.set(
            ask.name,
            Variable(value=value, var_type=ask.var_type, finish=result.finish_reason, meta=meta, generated=generated),
        )

    def _take_text(self, result: Result) -> str:
        self.segments.append(Ids(result.output_ids))
        if result.tail:
            self.segments.append(Text(result.tail))
        self.pieces.append((result.text, True))
        return result.text

    def _take_choice(self, question: Choices, result: Result) -> str:
        assert result.choice is not None, "a select's result names no choice"
        choice = question.choices[result.choice]
        self._append(Text(choice, question.specials))
        return choice

    def assign(self, name: str, value: Any) -> None:
        self.set(name, Variable(value=value, var_type=type_of_value(value)))

    def set(self, name: str, variable: Variable) -> None:
        self.variables[name] = variable
        if name not in self.written:
            self.written.append(name)

    def _name_done(self, name: str) -> None:
        self.queued_names[name] -= 1

    def fail(self, error: ErrorInfo) -> None:
        """End the stream: branches that have not started fail with it, a join on it fails too."""
        self.error = error
        if self.waiting is not None and self.waiting.name is not None:
            self.lost.add(self.waiting.name)
        self.waiting = None
        self.lost.update(name for name, number in self.queued_names.items() if number)
        for operation in self.queue:
            if isinstance(operation, Fork):
                for child in operation.children:
                    child.fail(error)
            elif isinstance(operation, Join):
                for child in operation.children:
                    self.lost.update(child.written, child.queued_names, child.lost)
        self.queue.clear()
        self.queued_names.clear()
        self.last_assign.clear()
        self.num_joins = 0
        if self.joiner is not None:
            self.host.touch(self.joiner)

    # --- fork and join ---

    def start_from(self, parent: Stream) -> None:
        """Begin where the parent stands now."""
        self.segments = list(parent.segments)
        self.pieces = list(parent.pieces)
        self.messages = [_Message(message.role, message.start, message.end) for message in parent.messages]
        self.variables = dict(parent.variables)
        self.position = parent.position
        self.fork_segment = len(self.segments)
        self.fork_piece = len(self.pieces)
        self.started = True
        self.host.touch(self)

    def _join(self, join: Join) -> bool:
        """Bring the branches together if all have ended; False while one has not."""
        failed = next((child.error for child in join.children if child.error is not None), None)
        if failed is not None:
            self.fail(failed)
            return True
        if not all(child.drained for child in join.children):
            return False
        positions = [p for p in (self.position, *(child.position for child in join.children)) if p is not None]
        self.position = min(positions, default=None)
        if join.mode == "gather_variable":
            try:
                self._gather(join.children)
            except CallError as error:
                self.fail(ErrorInfo(code=error.code, message=error.message))
        else:
            for child in join.children:
                self._concatenate(child)
        return True

    def _gather(self, children: tuple[Stream, ...]) -> None:
        """Each variable that a branch set becomes a list with one entry for each branch.

        A list that an earlier join made under the same name is extended, so that nothing is lost.
        """
        names = list(dict.fromkeys(name for child in children for name in child.written))
        for name in names:
            found = [child.variables[name] if name in child.written else None for child in children]
            values = [None if v is None else self._readable(v) for v in found]
            present = [v for v in found if v is not None]
            var_type = present[0].var_type
            for variable in present[1:]:
                var_type = merge_types(var_type, variable.var_type)
            finishes = [v.finish for v in present if v.finish is not None]
            finish = "length" if "length" in finishes else next(iter(finishes), None)
            joined = Variable(value=values, var_type=list_of(var_type), finish=finish, joined=True)
            self.set(name, _extended(self.variables.get(name), joined))

    def _readable(self, variable: Variable) -> Any:
        return self.host.guard.protect(variable.value) if variable.generated else variable.value

    def _concatenate(self, child: Stream) -> None:
        for segment in child.segments[child.fork_segment :]:
            self.segments.append(segment)
        self.pieces.extend(child.pieces[child.fork_piece :])


def _extended(before: Variable | None, joined: Variable) -> Variable:
    """A joined variable behind the results of an earlier join of the same name."""
    if before is None or not before.joined:
        return joined
    finish = "length" if "length" in (before.finish, joined.finish) else joined.finish or before.finish
    return Variable(
        value=[*before.value, *joined.value],
        var_type=merge_types(before.var_type, joined.var_type),
        finish=finish,
        joined=True,
    )
