"""One stream of a program: a queue of operations that advances until it meets a call without an answer."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sglbatch.errors import CallError
from sglbatch.lang.as_text import text_call
from sglbatch.lang.branch_text import BranchText
from sglbatch.lang.calls import Choices, ModelCall
from sglbatch.lang.guard import Guard
from sglbatch.lang.meta_info import TokenText, meta_info
from sglbatch.lang.operations import (
    Append,
    Ask,
    Assign,
    Attach,
    CloseScope,
    Fork,
    Join,
    Mark,
    OpenScope,
    Operation,
    OrderFree,
    SplitReasoning,
    names_set,
    reasoning_name,
)
from sglbatch.lang.reasoning import split_reasoning
from sglbatch.lang.variables import Variable, extended, gathered, worst_finish
from sglbatch.lang.vartypes import list_of, type_of_value
from sglbatch.types import (
    CallPath,
    ErrorInfo,
    Generate,
    Result,
    Text,
    VarType,
)


class Host(Protocol):
    """What a stream needs of its program."""

    guard: Guard

    @property
    def token_text(self) -> TokenText:
        """Gives the text of a token id."""

    @property
    def ahead_tokens(self) -> int | None:
        """See ``types.TextCall``."""

    def ask(self, stream: Stream, call: ModelCall) -> None:
        """Take the call; the answer comes through ``Stream.answer``, at once where it is known."""

    def touch(self, stream: Stream) -> None:
        """The stream may be able to advance."""

    def added(self, stream: Stream, operation: Operation) -> None:
        """Told of what is added to a stream that keeps a log, before it is."""


@dataclass(slots=True, eq=False)
class Stream:
    """State of one branch: its text, its variables, and the operations still to come.

    ``lost`` are the variables that will never be set because the stream has failed, ``lost_types`` the types of those
    that an answer was to set; ``log`` keeps all that was added where the program is traced; ``answers`` are those of a
    gen with n > 1 so far, ``positions`` theirs.
    """

    host: Host
    path: CallPath
    started: bool = False
    queue: deque[Operation] = field(default_factory=deque)
    text: BranchText = field(default_factory=BranchText)
    variables: dict[str, Variable] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    queued_names: Counter[str] = field(default_factory=Counter)
    last_assign: dict[str, Assign] = field(default_factory=dict)
    num_joins: int = 0
    num_indices: int = 0
    waiting: Ask | None = None
    log: list[Operation] | None = None
    answers: dict[CallPath, Result] = field(default_factory=dict)
    scopes: dict[str, int] = field(default_factory=dict)
    position: int | None = None
    positions: list[int] = field(default_factory=list)
    error: ErrorInfo | None = None
    lost: set[str] = field(default_factory=set)
    lost_types: dict[str, VarType] = field(default_factory=dict)
    joiner: Stream | None = None
    ahead: deque[Result] = field(default_factory=deque)
    known: Result | None = None

    # --- adding operations ---

    def take_index(self) -> int:
        self.num_indices += 1
        return self.num_indices - 1

    def add(self, operation: Operation) -> None:
        """Queue one operation. On a failed stream it is taken back at once: nothing can follow the failure."""
        if self.log is not None:
            self.host.added(self, operation)
            self.log.append(operation)
        self._queue(operation)

    def put(self, name: str, value: Any) -> None:
        """Set a variable, at once unless something queued comes before."""
        assignment = Assign(name, value)
        if self.log is not None:
            self.host.added(self, assignment)
            self.log.append(assignment)
        if self.started and self.num_joins == 0 and self.queued_names[name] == 0:
            self.assign(name, value)
        else:
            self._queue(assignment)

    def _queue(self, operation: Operation) -> None:
        for name in names_set(operation):
            self.queued_names[name] += 1
            self.last_assign.pop(name, None)
        if isinstance(operation, Assign):
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
                self.text.append(text)
            case Attach(media=media):
                self.text.append_ids(media.key_ids)
            case Mark(role=role):
                self.text.mark(role)
            case Assign() | OpenScope() | CloseScope() | SplitReasoning():
                self._set_variable(operation)
            case Fork(children=children):
                for child in children:
                    child.start_from(self)
            case Ask():
                self._ask(operation)
            case Join():
                self.num_joins -= 1
            case OrderFree():
                pass  # its texts follow as operations of their own

    def _set_variable(self, operation: Assign | OpenScope | CloseScope | SplitReasoning) -> None:
        name = operation.name
        match operation:
            case Assign(value=value):
                self._name_done(name)
                self.assign(name, value)
                if self.last_assign.get(name) is operation:
                    del self.last_assign[name]
            case OpenScope():
                self.scopes[name] = len(self.text.pieces)
            case CloseScope():
                self._name_done(name)
                try:
                    self.assign(name, self._text_since(self.scopes.pop(name)))
                except CallError as error:
                    self.fail(ErrorInfo(code=error.code, message=error.message))
            case SplitReasoning(model_type=model_type):
                self._split_reasoning(name, model_type)

    def _ask(self, ask: Ask) -> None:
        self.waiting = ask
        question = ask.question
        if isinstance(question, Choices):
            question = Choices(
                choices=question.choices,
                temperature=question.temperature,
                specials=question.specials,
                following=self._following(ask.turn) if question.method == "exact" else (),
                method=question.method,
            )
        if ask.n > 1:
            self.ahead.clear()
        known = self._take_ahead()
        for path in self.paths(ask):
            call = ModelCall(
                path=path,
                name=ask.name or "",
                prompt=self.text.prompt,
                question=question,
                position=self.position,
                as_text=lambda: text_call(self.text, ask, self.queue, ahead_tokens=self.host.ahead_tokens),
                known=known,
            )
            self.host.ask(self, call)

    def paths(self, ask: Ask) -> list[CallPath]:
        """One for each of the n answers; the first has the path it would have alone."""
        first = (*self.path, ask.index)
        return [first, *((*first, i) for i in range(1, ask.n))]

    def _take_ahead(self) -> Result | None:
        self.known = self.ahead.popleft() if self.ahead else None
        return self.known

    def _following(self, turn: int) -> tuple[Text, ...]:
        """Constant text right behind the current call that was added before the program next read something.

        Bounded by the turn, so that it does not depend on when answers arrive.
        """
        texts: list[Text] = []
        for operation in self.queue:
            if isinstance(operation, Append) and operation.turn == turn:
                texts.append(operation.text)
            elif not isinstance(operation, (Mark, Assign, OrderFree)):
                break
        return tuple(texts)

    # --- answers ---

    def answer(self, path: CallPath, result: Result, position: int | None) -> None:
        """Take the result of a call that is waited for; after the last one ``advance`` goes on from there."""
        ask = self.waiting
        if ask is None:
            assert self.error is not None, "an answer for a stream that waits for none"
            return  # another of its n answers was an error
        if position is not None:
            self.positions.append(position)
        if result.error is None and len(self.answers) + 1 < ask.n:
            self.answers[path] = result
            return
        self.answers[path] = result
        results = [self.answers[p] for p in self.paths(ask) if p in self.answers]
        self.answers.clear()
        self.waiting = None
        if result is not self.known:
            self.ahead = deque(result.ahead)
        if self.positions:
            self.position = min(self.positions)  # whichever of n answers came last
            self.positions.clear()
        if result.error is not None:
            if ask.name is not None:
                self.lost_types[ask.name] = ask.var_type
            self.fail(result.error)
            return
        value = self._take(ask.question, results[0])
        if ask.name is None:
            return
        self._name_done(ask.name)
        token_text = self.host.token_text if ask.with_text else None
        metas = [meta_info(ask.question, one, token_text) for one in results]
        variable = Variable(
            value=value if ask.n == 1 else [one.text for one in results],
            var_type=ask.var_type,
            finish=worst_finish([one.finish_reason for one in results]),
            meta=metas[0] if ask.n == 1 else metas,
            generated=isinstance(ask.question, Generate),
            means=results[0].means,
        )
        self.set(ask.name, variable)

    def _take(self, question: Generate | Choices, result: Result) -> str:
        """Appends the answer; returns its text."""
        if isinstance(question, Generate):
            self.text.append_generated(result)
            return result.text
        assert result.choice is not None, "a select's result names no choice"
        choice = result.text or question.choices[result.choice]  # a trace's choice is a text of its own
        self.text.append_choice(Text(choice, question.specials))
        return choice

    def _split_reasoning(self, name: str, model_type: str) -> None:
        """The answer alone stays in the variable and in the text."""
        reasoning = reasoning_name(name)
        self._name_done(name)
        self._name_done(reasoning)
        variable = self.variables[name]
        texts = variable.value if isinstance(variable.value, list) else [variable.value]
        parts = [split_reasoning(text, model_type) for text in texts]
        is_list = isinstance(variable.value, list)
        for target, values in ((name, [answer for _, answer in parts]), (reasoning, [thought for thought, _ in parts])):
            self.set(target, replace(variable, value=values if is_list else values[0]))
        answer = parts[0][1]
        if variable.generated and answer != texts[0]:
            self.text.replace_generated(answer)

    def _text_since(self, piece: int) -> str:
        """The text from a piece on, as data that may go back into a prompt."""
        protect = self.host.guard.protect
        return "".join(protect(text) if generated else text for text, generated in self.text.pieces[piece:])

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
        self.lost_types = self._asked_types()
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

    def _asked_types(self) -> dict[str, VarType]:
        """The types of the variables that answers still to come were to set, those of branches to be joined too."""
        types = dict(self.lost_types)
        for operation in [*([] if self.waiting is None else [self.waiting]), *self.queue]:
            match operation:
                case Ask(name=str(name), var_type=var_type):
                    types[name] = var_type
                case SplitReasoning(name=name) if name in types:
                    types[reasoning_name(name)] = types[name]
                case Join(children=children, mode="gather_variable"):
                    for child in children:
                        types.update((name, list_of(kind)) for name, kind in child._all_asked_types().items())
        return types

    def _all_asked_types(self) -> dict[str, VarType]:
        """Also of the answers that were there, so that it does not matter when they came."""
        had = {name: self.variables[name] for name in self.written}
        return {name: v.var_type for name, v in had.items() if v.meta is not None} | self._asked_types()

    # --- fork and join ---

    def start_from(self, parent: Stream) -> None:
        """Begin where the parent stands now."""
        self.text = BranchText.forked(parent.text)
        self.variables = dict(parent.variables)
        self.position = parent.position
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
                self.text.append_branch(child.text)
        return True

    def _gather(self, children: tuple[Stream, ...]) -> None:
        """Each variable that a branch set becomes a list with one entry for each branch.

        A list that an earlier join made under the same name is extended, so that nothing is lost.
        """
        names = list(dict.fromkeys(name for child in children for name in child.written))
        for name in names:
            found = [child.variables[name] if name in child.written else None for child in children]
            self.set(name, extended(self.variables.get(name), gathered(found, self._readable)))

    def _readable(self, variable: Variable) -> Any:
        return self.host.guard.protect(variable.value) if variable.generated else variable.value
