"""The writing end of a stream: turns expressions into operations as the program adds them.

Roles are resolved here, in the program's own stack, so that a mistake has the author's line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from sglbatch.errors import SglbatchError
from sglbatch.lang.calls import Choices
from sglbatch.lang.chat import turn_end
from sglbatch.lang.environment import Environment
from sglbatch.lang.expressions import (
    AnyOrder,
    Atom,
    Attachment,
    Constant,
    Gen,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Separate,
    TemplateError,
    atoms,
)
from sglbatch.lang.guard import Guard
from sglbatch.lang.last_gen import constrained_record
from sglbatch.lang.media import Media
from sglbatch.lang.operations import (
    Append,
    Ask,
    Attach,
    CloseScope,
    Fork,
    Join,
    JoinMode,
    Mark,
    OpenScope,
    OrderFree,
    SplitReasoning,
)
from sglbatch.lang.sampling import Sampling, SamplingOverride
from sglbatch.lang.schemas import Record
from sglbatch.lang.stream import Stream
from sglbatch.lang.vartypes import CHOICELESS, list_of
from sglbatch.types import Constraint, ErrorInfo, Generate, Text, VarType


class Session(Protocol):
    """What a writer needs of the running program."""

    environment: Environment
    guard: Guard
    sampling: Sampling
    forced: SamplingOverride
    record: Record | None
    turn: int

    def count_call(self, number: int = 1) -> None:
        """Raises SglbatchError ``too-many-calls``."""

    def new_stream(self, path: tuple[int, ...]) -> Stream: ...

    def unhandled(self, error: ErrorInfo | None) -> None:
        """Something was added to a stream that has failed: its error is the row's again."""


@dataclass(slots=True)
class Writer:
    """Adds to one stream.

    Args:
        roles: messages so far, the open one included.
        open_role: the open message's role.
        at_start: nothing of the open message has been added yet, so constants lose their leading white space.
        turn_stop: the token text that ends the open assistant message, where the model does not stop there itself.
        ended: the stream was joined; nothing more may be added.
    """

    session: Session
    stream: Stream
    roles: tuple[str, ...] = ()
    open_role: str | None = None
    at_start: bool = False
    turn_stop: str | None = None
    suffix: str = ""
    ended: bool = False

    def add(self, value: object, defaults: SamplingOverride) -> None:
        """Queue an expression, its gens under the function's ``defaults``."""
        items = atoms(value)
        self._check_open()
        for item in items:
            self._add(item, defaults)

    def _add(self, item: Atom, defaults: SamplingOverride) -> None:
        match item:
            case Constant(text=text):
                self._constant(text)
            case Gen():
                self._gen(item, defaults)
            case Select():
                self._select(item)
            case Attachment(media=media):
                self._attach(media)
            case RoleBegin(role=role):
                self._begin(role)
            case RoleEnd(role=role):
                self._end(role)
            case ScopeBegin(name=name):
                self.stream.add(OpenScope(name))
            case ScopeEnd(name=name):
                self.stream.add(CloseScope(name))
            case Separate(name=name, model_type=model_type):
                self.stream.add(SplitReasoning(name, model_type))
            case AnyOrder(parts=parts):
                self._any_order(dict(parts))

    def assign(self, name: str, value: Any) -> None:
        """Set a variable, at once unless something queued comes before."""
        self._check_open()
        self.stream.put(name, value)

    def fork(self, number: int) -> list[Writer]:
        """Branches that begin where the stream stands when it gets here."""
        self._check_open()
        index = self.stream.take_index()
        streams = [self.session.new_stream((*self.stream.path, index, i)) for i in range(number)]
        self.stream.add(Fork(tuple(streams)))
        return [
            Writer(self.session, stream, self.roles, self.open_role, self.at_start, self.turn_stop, self.suffix)
            for stream in streams
        ]

    def join(self, branches: list[Writer], mode: JoinMode) -> None:
        self._check_open()
        for branch in branches:
            branch._check_open()
            if mode == "concate_and_append" and branch.roles != self.roles:
                raise SglbatchError(
                    "joined-roles",
                    'join("concate_and_append") cannot append whole messages of a branch',
                    hint="open and close the message around the fork, or gather variables",
                )
            branch.ended = True
            branch.stream.joiner = self.stream
        self.stream.add(Join(tuple(branch.stream for branch in branches), mode))

    # --- expressions ---

    def _constant(self, text: str) -> None:
        if self.at_start:
            text = text.lstrip()
        if text:
            self._text(text, self._constant_specials())

    def _constant_specials(self) -> frozenset[str]:
        environment = self.session.environment
        return frozenset(environment.specials) if environment.parse_special else self.session.guard.specials

    def _text(self, text: str, specials: frozenset[str]) -> None:
        self.at_start = False
        self.stream.add(Append(Text(text, specials), self.session.turn))

    def _gen(self, item: Gen, defaults: SamplingOverride) -> None:
        session = self.session
        sampling = session.sampling.updated(defaults).updated(session.forced).updated(item.sampling)
        _check_logprobs(sampling)
        stop = sampling.stop if self.turn_stop is None else (*sampling.stop, self.turn_stop)
        constraint, var_type = item.constraint, item.var_type
        record = session.record
        if record is not None and item.name == record.name:
            if constraint is not None:
                raise _constrained(record.name, constraint.kind)
            constraint, var_type = record.constraint, record.var_type
        if constraint is not None and constraint.kind == "json_schema" and sampling.allow_unenforced:
            constraint = replace(constraint, lax=True)
        question = Generate(
            max_tokens=sampling.max_tokens,
            stop=stop,
            temperature=float(sampling.temperature),
            top_p=float(sampling.top_p),
            top_k=sampling.top_k,
            min_p=float(sampling.min_p),
            constraint=constraint,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            stop_regex=sampling.stop_regex,
            frequency_penalty=float(sampling.frequency_penalty),
            presence_penalty=float(sampling.presence_penalty),
            ignore_eos=sampling.ignore_eos,
            num_top_logprobs=sampling.top_logprobs_num if sampling.return_logprob else None,
            input_logprobs_from=sampling.logprob_start_len if sampling.logprob_start_len >= 0 else None,
            complete=sampling.complete and constraint is not None,
            exact_choices=constraint is not None and _decides_exactly(constraint, sampling),
        )
        if sampling.n > 1:
            var_type = list_of(var_type)
        self._ask(item.name, question, var_type, n=sampling.n, with_text=sampling.return_text_in_logprobs)

    def _select(self, item: Select) -> None:
        record = self.session.record
        if record is not None and item.name == record.name:
            raise _constrained(record.name, "choices")
        question = Choices(
            choices=item.choices,
            temperature=float(item.temperature),
            specials=self._constant_specials(),
            method=item.method,
        )
        self._ask(item.name, question, VarType(kind="enum", choices=item.choices))

    def _ask(
        self,
        name: str | None,
        question: Generate | Choices,
        var_type: VarType,
        *,
        n: int = 1,
        with_text: bool = False,
    ) -> None:
        self.session.count_call(n)
        self.at_start = False
        ask = Ask(
            index=self.stream.take_index(),
            turn=self.session.turn,
            name=name,
            question=question,
            var_type=var_type,
            n=n,
            with_text=with_text,
        )
        self.stream.add(ask)

    def _any_order(self, parts: dict[str, str]) -> None:
        self.stream.add(OrderFree(tuple(parts)))
        first = [name for name in self.session.environment.reorder if name in parts]
        for name in (*first, *(name for name in parts if name not in first)):
            self._constant(parts[name])

    def _attach(self, media: Media) -> None:
        if not self.session.environment.takes_media:
            raise TemplateError(
                "unsupported-media",
                f"{media.kind}s are not supported yet",
                hint=f"describe the {media.kind} in text",
            )
        self.at_start = False
        self.stream.add(Attach(media))

    # --- roles ---

    def _begin(self, role: str) -> None:
        if self.open_role is not None:
            raise SglbatchError(
                "open-role",
                f"a {role} message begins inside a {self.open_role} message",
                hint=f"end it first: s += sgl.{self.open_role}_end()",
            )
        environment = self.session.environment
        frame = environment.chat.frame((*self.roles, role))
        self.roles = (*self.roles, role)
        self.open_role = role
        self.suffix = frame.suffix
        self._text(frame.prefix, frozenset(environment.specials))
        self.stream.add(Mark(role))
        self.at_start = True
        end = turn_end(frame.suffix, environment.specials) if role == "assistant" else None
        if end is not None and environment.specials[end] not in environment.eos_token_ids:
            self.turn_stop = end

    def _end(self, role: str) -> None:
        if self.open_role != role:
            what = f"a {self.open_role} message is open" if self.open_role else "no message is open"
            raise SglbatchError("open-role", f"a {role} message ends, but {what}")
        self.stream.add(Mark(None))
        self._text(self.suffix, frozenset(self.session.environment.specials))
        self.open_role = None
        self.turn_stop = None

    def _check_open(self) -> None:
        if self.ended:
            raise SglbatchError(
                "joined-branch",
                "this branch has been joined, nothing can be added to it",
                hint="add to the state that it was forked from",
            )
        if self.stream.error is not None:
            self.session.unhandled(self.stream.error)


def _constrained(name: str, has: str) -> TemplateError:
    """For a constraint that the function's source does not show."""
    error = constrained_record(name, has)
    return TemplateError(error.code, error.message, hint=error.hint)


def _decides_exactly(constraint: Constraint, sampling: Sampling) -> bool:
    """Whether texts among which the constraint leaves a choice are scored whole, where it can leave one."""
    penalised = sampling.frequency_penalty or sampling.presence_penalty
    return sampling.choice_decoding == "exact" and not penalised and constraint.source not in CHOICELESS


def _check_logprobs(sampling: Sampling) -> None:
    """What needs ``return_logprob`` would be ignored without it."""
    if sampling.return_logprob:
        return
    asked = {
        "top_logprobs_num": sampling.top_logprobs_num > 0,
        "logprob_start_len": sampling.logprob_start_len >= 0,
        "return_text_in_logprobs": sampling.return_text_in_logprobs,
    }
    for name, given in asked.items():
        if given:
            raise TemplateError(
                "invalid-argument", f"{name} needs return_logprob=True", hint=f"add return_logprob=True or drop {name}"
            )
