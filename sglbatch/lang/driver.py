"""Runs many programs over one backend: tokenises their calls, answers known ones, submits the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from sglbatch.errors import CallError
from sglbatch.lang.calls import (
    Answer,
    CallMemo,
    Choices,
    ModelCall,
    OutsideAnswer,
    OutsideCall,
    PendingCall,
    answer_of,
    call_key,
    call_seed,
    memo_entry,
    outside_key,
)
from sglbatch.lang.dialect import Dialect, Form, TokenDialect
from sglbatch.lang.environment import LanguageTokenizer, RunsSlabs, TellsPartialTexts
from sglbatch.lang.guard import Guard
from sglbatch.lang.outside import OutsidePool
from sglbatch.lang.row_program import RowProgram
from sglbatch.lang.schemas import Checks
from sglbatch.types import (
    Backend,
    CallPath,
    ErrorInfo,
    Request,
    Result,
    TokenIds,
)

if TYPE_CHECKING:
    from sglbatch.lang.function import SglFunction

_ENCODE_PROMPTS = 4096
"""Prompts tokenised at a time, which bounds the text held twice."""

WAKE_TOKENS: Final = 4096
"""Programs with longer prompts wait for their answers asleep: awake, each holds its text."""

_BEHIND_THE_PLAN: Final = 1 << 40
"""The first plan position of calls that follow none of the plan."""


class Question(NamedTuple):
    """A call to the model that is not tokenised yet. ``keep``: see ``types.Request``."""

    program: RowProgram
    call: ModelCall
    keep: bool


class Driver:
    """Drives programs from question to question.

    Equal questions in flight are asked once. A follow-up keeps the plan position of the call it follows.

    Args:
        model_identity: part of every call's key.
        context_len: tokens; a prompt that leaves no room for an answer fails.
        dialect: how calls are put to the backend; None: as token ids of ``tokenizer``.
        memo: answers of earlier runs, and where new ones go.
        seed: of the job.
        parse_special: data may make special tokens.
        max_live_programs: above it, the programs added last give up their greenlets while they wait.
        max_calls_per_row: bounds loops on answers.
        max_outside_calls: how many ``sgl.call`` run at a time.
        reorder: see ``Environment``.
    """

    def __init__(
        self,
        *,
        tokenizer: LanguageTokenizer | None = None,
        model_identity: str,
        context_len: int,
        dialect: Dialect | None = None,
        backend: Backend | None = None,
        memo: CallMemo | None = None,
        seed: int = 0,
        parse_special: bool = False,
        max_live_programs: int = 20_000,
        max_calls_per_row: int = 1000,
        max_outside_calls: int = 8,
        reorder: tuple[str, ...] = (),
    ) -> None:
        if dialect is None:
            assert tokenizer is not None, "a driver needs a tokenizer or another dialect"
            dialect = TokenDialect(tokenizer, context_len=context_len)
        self._dialect = dialect
        self._model_identity = model_identity
        self._backend = backend
        self._memo = memo
        self._seed = seed
        self._max_live_programs = max_live_programs
        environment = dialect.environment(seed=seed, parse_special=parse_special, max_calls=max_calls_per_row)
        self._environment = replace(environment, reorder=reorder)
        self._guards: dict[SglFunction, Guard] = {}
        self._programs: dict[int, RowProgram] = {}
        self._live: dict[int, RowProgram] = {}
        self._asked: list[Question] = []
        self._num_held = 0
        self._outside_asked: list[tuple[RowProgram, OutsideCall]] = []
        self._outside_unknown: list[tuple[RowProgram, OutsideCall, str]] = []  # with its key: to be made
        self._outside = OutsidePool(max_outside_calls)
        self._outside_keys: dict[tuple[int, CallPath], str] = {}
        self._in_flight: dict[str, PendingCall] = {}
        self._checks = Checks()
        self._requests: dict[int, PendingCall] = {}
        self._made: set[str] = set()
        self._finished: list[RowProgram] = []
        self._used_backend: set[int] = set()
        self._next_request_id = 0
        self._is_planned = False
        self._behind = count(_BEHIND_THE_PLAN)
        self.calls_reused = 0
        """Calls answered by an earlier run."""
        self.calls_collapsed = 0
        """Calls answered by an equal call of this run."""
        self.calls_made = 0
        """Calls put to the backend or to outside functions."""
        self.calls_ahead = 0
        """Calls answered by what an earlier call of the same program generated beyond its own answer."""

    @property
    def unfinished(self) -> bool:
        """``step`` still has programs to return."""
        return bool(self._programs or self._finished)

    @property
    def num_waiting_outside(self) -> int:
        """Programs that have asked for an outside call which ``collect`` has not made."""
        return len({program.program_id for program, _, _ in self._outside_unknown if not program.done})

    def attach(self, backend: Backend) -> None:
        """The backend, where it is made after planning."""
        self._backend = backend

    def add(self, program: RowProgram) -> None:
        """Run a program to its first missing answers.

        Raises:
            TemplateError: the template itself is wrong, whatever the row.
        """
        assert program.program_id not in self._programs, "program ids must be unique"
        program.start(self._environment, self._guard_of(program.function))
        if program.template_error is not None:
            raise program.template_error
        self._programs[program.program_id] = program
        self._live[program.program_id] = program
        self._follow(program)

    def collect(self, *, run_outside: bool = False) -> list[PendingCall]:
        """Tokenise what has been asked for and answer what is known, until every program waits for something unknown.

        Args:
            run_outside: also make the outside calls that nobody has made yet, and wait for them; they may have side
                effects.

        Returns:
            The new questions to the model, one for each distinct key, in the order in which they were asked.
        """
        new: list[PendingCall] = []
        while True:
            while self._asked or self._outside_asked:
                asked, self._asked = self._asked, []
                for batch in _batches(asked):
                    new += self._resolve(batch)
                self._answer_outside()
            if run_outside:
                self._start_outside()
            if not (run_outside and self._outside.pending):
                break
            self._deliver_outside(0.1)
        self.park()
        return new

    def park(self) -> None:
        """Let programs that wait give up their greenlets where there are too many of these."""
        while len(self._live) > self._max_live_programs:
            _, program = self._live.popitem()
            program.park()

    def settle_outside(self) -> None:
        """Make the outside calls that have been asked for, and wait for them and for those that follow from them.

        What they lead to has then been asked, and is not tokenised yet.
        """
        while self._outside_asked or self._outside_unknown or self._outside.pending:
            self._answer_outside()
            self._start_outside()
            self._deliver_outside(0.1)

    def hold(self) -> list[Question]:
        """Take the questions that have been asked and not been tokenised; they wait until they are released."""
        held, self._asked = self._asked, []
        self._num_held += len(held)
        self.park()
        return held

    def release(self, questions: Sequence[Question]) -> None:
        """Give held questions back, in any order and in parts: ``collect`` goes on with them."""
        self._num_held -= len(questions)
        self._asked += questions

    def prompt_ids(self, question: Question) -> TokenIds | None:
        """The prompt of a held question; None where it cannot be asked."""
        (form,) = self._dialect.forms([question.call])
        return form.prompt_ids if isinstance(form, Form) else None

    def take_finished(self) -> list[RowProgram]:
        """The programs that have finished since this or ``step`` last told."""
        finished, self._finished = self._finished, []
        return finished

    def expect_more(self, more: bool) -> None:
        """Tell the backend whether more of the plan will be submitted, where it wants to know."""
        if isinstance(self._backend, RunsSlabs):
            self._backend.expect_more(more)

    @property
    def asked(self) -> Sequence[Question]:
        """What has been asked and not been tokenised or held."""
        return self._asked

    @property
    def num_held(self) -> int:
        """Questions that have been held and not been released."""
        return self._num_held

    @property
    def num_submitted(self) -> int:
        """Requests so far."""
        return self._next_request_id

    @property
    def num_waiting(self) -> int:
        """Requests that the backend has not begun; 0 where it does not tell."""
        return self._backend.num_waiting if isinstance(self._backend, RunsSlabs) else 0

    def submit(self, calls: Sequence[PendingCall], positions: Sequence[int] | None = None) -> None:
        """Hand calls to the backend.

        Args:
            positions: each call's place in the plan; None lets the backend order them.
        """
        assert self._backend is not None, "attach a backend before submitting"
        if positions is not None:
            self._is_planned = True
            for call, position in zip(calls, positions, strict=True):
                call.position = int(position)
        self.calls_made += len(calls)
        self._backend.submit([self._request(call) for call in calls])
        if isinstance(self._backend, RunsSlabs):  # which has few requests at a time, and computes beside this
            for call in calls:
                if len(call.prompt_ids) <= WAKE_TOKENS:
                    for program in filter(None, map(self._programs.get, call.program_ids)):
                        program.wake()

    def step(self) -> list[RowProgram]:
        """One step of the backend, and everything that follows from its results.

        Returns:
            The programs that have finished since the last step, those that finished in ``collect`` included.

        Raises:
            TemplateError, KeyboardInterrupt: see ``add`` and ``Program``.
        """
        if self._requests:
            assert self._backend is not None
            for result in self._backend.step():
                self._deliver_result(result)
        self._answer_outside()
        self._start_outside()
        self._deliver_outside(0.0 if self._requests or self._asked or self._finished else 0.1)
        followups = self.collect()
        if followups:
            self.submit(self._placed(followups))
        finished = self.take_finished()
        waiting = self._requests or self._outside.pending or self._outside_unknown or self._num_held
        assert finished or not self._programs or waiting, "programs wait for calls that were never submitted"
        return finished

    def keep(self, results: Sequence[Result]) -> list[RowProgram]:
        """Take the last answers of a run that is to end: what follows from them is not asked any more.

        Returns:
            The programs that have finished.
        """
        for result in results:
            self._deliver_result(result)
        finished, self._finished = self._finished, []
        return finished

    def partial_text(self, program_id: int, path: CallPath) -> str:
        """The text so far of a call that is being answered; "" where the backend does not tell."""
        if not isinstance(self._backend, TellsPartialTexts):
            return ""
        texts = self._backend.partial_texts()
        asked = (program_id, path)
        return next((texts.get(i, "") for i, call in self._requests.items() if asked in call.waiters), "")

    # --- programs ---

    def _guard_of(self, function: SglFunction) -> Guard:
        if function not in self._guards:
            self._guards[function] = Guard.of_template(function.strings(), self._environment)
        return self._guards[function]

    def _follow(self, program: RowProgram) -> None:
        """Take what a program has asked for, or its end, after it has run."""
        calls = program.take_calls()
        if program.done:
            del self._programs[program.program_id]
            self._live.pop(program.program_id, None)
            self._finished.append(program)
            if program.program_id in self._used_backend and self._backend is not None:
                self._used_backend.discard(program.program_id)
                self._backend.finish_program(program.program_id)
            return
        for call in calls:
            if isinstance(call, ModelCall):
                self._asked.append(Question(program, call, program.may_extend(call.path)))
            else:
                self._outside_asked.append((program, call))

    def _deliver(self, program_id: int, path: CallPath, answer: Answer, position: int | None) -> None:
        program = self._programs.get(program_id)
        if program is None:
            return  # it ended with an error before this answer came
        program.deliver(path, answer, position)
        self._live[program_id] = program
        self._follow(program)

    # --- questions ---

    def _resolve(self, asked: Sequence[Question]) -> list[PendingCall]:
        """Tokenise calls, answer those that are known, and return the distinct new ones."""
        forms = self._dialect.forms([question.call for question in asked])
        new: list[PendingCall] = []
        for question, form in zip(asked, forms, strict=True):
            program, call, _ = question
            if isinstance(form, Form):
                new += self._pending(question, form)
            else:
                info = ErrorInfo(code=form.code, message=form.message, call=call.name or None)
                self._deliver(program.program_id, call.path, Result(request_id=-1, error=info), call.position)
        return new

    def _pending(self, question: Question, form: Form) -> list[PendingCall]:
        program, call, keep = question
        material = None if form.operation.greedy else (self._seed, program.row_key, call.path)
        key = call_key(
            model_identity=self._model_identity,
            prompt_ids=form.prompt_ids,
            operation=form.operation,
            seed_material=material,
            text=form.text,
        )
        entry = self._memo.get(key) if self._memo is not None else None
        if entry is not None:
            self._count_known(key)
            self._deliver(program.program_id, call.path, answer_of(entry), call.position)
            return []
        if call.known is not None:
            self.calls_ahead += 1
            self._remember(key, call.known)
            self._deliver(program.program_id, call.path, call.known, call.position)
            return []
        waiting = self._in_flight.get(key)
        if waiting is not None:
            self.calls_collapsed += 1
            waiting.add(program.program_id, call, keep=keep, text=form.text)
            return []
        pending = PendingCall(
            key=key,
            prompt_ids=form.prompt_ids,
            operation=form.operation,
            path=call.path,
            name=call.name,
            follow_up=call.position is not None,
            seed=call_seed(self._seed, program.row_key, call.path),
            decode=self._dialect.show,
            text=form.text,
        )
        pending.add(program.program_id, call, keep=keep, text=form.text)
        self._in_flight[key] = pending
        return [pending]

    def _count_known(self, key: str) -> None:
        if key in self._made:
            self.calls_collapsed += 1
        else:
            self.calls_reused += 1

    def _placed(self, calls: Sequence[PendingCall]) -> Sequence[PendingCall]:
        """Once there is a plan, a call that follows none of it goes behind it."""
        for call in calls:
            if call.position is None and self._is_planned:
                call.position = next(self._behind)
        return calls

    def _request(self, call: PendingCall) -> Request:
        request_id = self._next_request_id
        self._next_request_id += 1
        self._requests[request_id] = call
        self._used_backend.update(call.program_ids)
        return Request(
            request_id=request_id,
            program_id=call.program_ids[0],
            prompt_ids=call.prompt_ids,
            operation=call.operation,
            seed=call.seed,
            priority=None if call.position is None else (call.position, *call.path),
            keep=call.keep,
            follow_up=call.follow_up,
            text=call.text,
        )

    # --- answers ---

    def _deliver_result(self, result: Result) -> None:
        call = self._requests.pop(result.request_id)
        del self._in_flight[call.key]
        result = self._checks.checked(call.operation, result)
        self._remember(call.key, result)
        alone = replace(result, ahead=()) if result.ahead else result
        for (program_id, path), same_following in zip(call.waiters, call.same_following, strict=True):
            self._deliver(program_id, path, result if same_following else alone, call.position)

    def _remember(self, key: str, answer: Answer) -> None:
        if self._memo is not None and answer.error is None:
            self._made.add(key)
            self._memo.put(key, memo_entry(answer))

    def _answer_outside(self) -> None:
        """Deliver what an earlier run's outside calls gave; the others wait to be made."""
        asked, self._outside_asked = self._outside_asked, []
        for program, call in asked:
            try:
                key = outside_key(call, row_key=program.row_key)
            except CallError as error:
                info = ErrorInfo(code=error.code, message=error.message, call=call.name)
                self._deliver(program.program_id, call.path, OutsideAnswer(error=info), None)
                continue
            entry = self._memo.get(key) if self._memo is not None else None
            if entry is not None:
                self._count_known(key)
                self._deliver(program.program_id, call.path, answer_of(entry), None)
            else:
                self._outside_unknown.append((program, call, key))

    def _start_outside(self) -> None:
        for program, call, key in self._outside_unknown:
            self.calls_made += 1
            self._outside_keys[program.program_id, call.path] = key
            self._outside.submit((program.program_id, call.path), call)
        self._outside_unknown = []

    def _deliver_outside(self, timeout_s: float) -> None:
        if not self._outside.pending:
            return
        for (program_id, path), answer in self._outside.poll(timeout_s):
            self._remember(self._outside_keys.pop((program_id, path)), answer)
            self._deliver(program_id, path, answer, None)


def _batches(asked: Sequence[Question]) -> Iterable[list[Question]]:
    """Calls in groups of about ``_ENCODE_PROMPTS`` prompts."""
    batch: list[Question] = []
    size = 0
    for item in asked:
        question = item.call.question
        size += len(question.choices) if isinstance(question, Choices) else 1
        batch.append(item)
        if size >= _ENCODE_PROMPTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
