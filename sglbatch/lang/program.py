"""One row's program: its function as it runs, its streams, and the answers it has had so far."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from greenlet import GreenletExit

from sglbatch.errors import CallError, SglbatchError
from sglbatch.lang.abstract import TraceStop
from sglbatch.lang.calls import Answer, Call, ModelCall, OutsideAnswer, OutsideCall, ProgramError
from sglbatch.lang.environment import Environment
from sglbatch.lang.expressions import TemplateError
from sglbatch.lang.function_run import FunctionRun, GreenletRun, current_program
from sglbatch.lang.guard import Guard, strip_guard
from sglbatch.lang.meta_info import TokenText
from sglbatch.lang.misuse import misused_primitive
from sglbatch.lang.operations import Operation
from sglbatch.lang.outcome import Outcome, describe, outcome_of, template_line
from sglbatch.lang.sampling import Sampling, SamplingOverride
from sglbatch.lang.schemas import Record
from sglbatch.lang.script import Script, ScriptRun
from sglbatch.lang.state import ProgramState
from sglbatch.lang.stream import Stream
from sglbatch.lang.waits import Ready
from sglbatch.lang.writer import Writer
from sglbatch.types import CallPath, ErrorInfo, Result

if TYPE_CHECKING:
    from sglbatch.lang.function import SglFunction

NO_OVERRIDE = SamplingOverride()


class Tracer(Protocol):
    """Watches a program that runs on abstract values. Every method may raise TraceStop."""

    def wrap(self, value: Any, stream: Stream, name: str | None) -> Any:
        """What the program may read instead of a variable's value, or of a stream's text (no name)."""

    def added(self, stream: Stream, operation: Operation) -> None:
        """The program adds this."""

    def waits(self, ready: Ready) -> None:
        """The program cannot go on before this."""

    def ends(self, returned: Any) -> None:
        """The program's function has returned this."""


class Feed(Protocol):
    """What a program that is read while it runs needs of its driver."""

    def step(self) -> object: ...

    def partial_text(self, program_id: int, path: CallPath) -> str: ...


class Program:
    """A function over one row. The driver starts it and delivers its answers.

    The function's streams advance whenever it waits or has ended, never beside it, so which calls exist at each point
    depends on the row and the answers alone. Where it has a script, the script runs in its place, as far as it goes.

    Args:
        arguments: parameter name -> value, as data (they are guarded here).
        row_key: seeds the row's random numbers and names its outside calls.
        sampling: the run's defaults.
        forced: values that replace the run's defaults and the function's own, but not a gen's own argument.
        record: a schema from outside for the last gen, which has no constraint of its own; a row without it is an
            error.
        keep_state: leave ``state`` readable after the end.
        error: the row cannot run: the program ends with this error as soon as it is started.
    """

    def __init__(
        self,
        function: SglFunction,
        arguments: Mapping[str, Any],
        *,
        program_id: int,
        row_key: str,
        sampling: Sampling | None = None,
        forced: SamplingOverride = NO_OVERRIDE,
        record: Record | None = None,
        keep_state: bool = False,
        error: ErrorInfo | None = None,
    ) -> None:
        self.function = function
        self.arguments = dict(arguments)
        self.program_id = program_id
        self.row_key = row_key
        self.sampling = Sampling() if sampling is None else sampling
        self.forced = forced
        self.record = record
        self.done = False
        self.outcome = Outcome(error=error)
        self.template_error: TemplateError | None = None
        self.exception: BaseException | None = None
        self.parked = False
        self.tracer: Tracer | None = None
        """Set before the start where the program is only traced."""
        self.script: tuple[Script, dict[str, Any]] | None = None
        """Set before the start where the function is known by its script, with what the script's holes stand for."""
        self.feed: Feed | None = None
        """The driver, for a reader outside who waits; None where nobody may."""
        self.turn = 0
        self.returned: Any = None
        self._keep_state = keep_state
        self._error = error
        self._answers: dict[CallPath, tuple[str, Answer, int | None]] = {}
        self._asked: dict[CallPath, str] = {}
        self._new_calls: list[Call] = []
        self._reset()

    def _reset(self) -> None:
        self.turn = 0
        self.num_calls = 0
        self.returned = None
        self.function_ended = False
        self._raised: ErrorInfo | None = None
        self._handled: set[int] = set()
        self._streams: list[Stream] = []
        self._touched: deque[Stream] = deque()
        self._waiting: dict[CallPath, Stream | None] = {}
        self._ready: Ready | None = None
        self._function_run: FunctionRun | None = None
        self._rng: random.Random | None = None
        self.state: ProgramState | None = None

    # --- the driver's side ---

    def start(self, environment: Environment, guard: Guard) -> None:
        """Run to the first missing answers; ``take_calls`` has the calls, ``done`` says whether it ended at once."""
        self.environment = environment
        self.guard = guard
        self._run()

    @property
    def streams(self) -> list[Stream]:
        """The root's, and those of its branches in the order in which they were made."""
        return self._streams

    def take_calls(self) -> list[Call]:
        """The calls asked for since this was last read."""
        calls, self._new_calls = self._new_calls, []
        return calls

    def deliver(self, path: CallPath, answer: Answer, position: int | None = None) -> None:
        """Give the answer of one call and go on as far as it leads.

        Args:
            position: the plan position under which the call ran; its follow-ups keep it.
        """
        self._answers[path] = (self._asked[path], answer, position)
        if self.parked:
            self.parked = False
            self._run()
            return
        stream = self._waiting.pop(path)
        if stream is not None:
            self._answer(stream, path)
        self._advance()

    def may_extend(self, path: CallPath) -> bool:
        """A later call may begin with this call's prompt and answer."""
        stream = self._waiting.get(path)
        return stream is None or not self.function_ended or stream.has_later_call

    def state_after(self) -> ProgramState:
        """The state of a program that has ended and keeps it."""
        assert self.done and self.state is not None, "the program has not ended, or does not keep its state"
        return self.state

    def wake(self) -> None:
        """Do now what the first answer would wait for, unless that takes a greenlet."""

    def park(self) -> None:
        """Give up the function's run and the streams; the next answer runs the function again from its start.

        The answers it has had are fed to it again, so the function must not depend on anything else that changes.
        """
        assert not self.done, "a program that has ended cannot be parked"
        self._close()
        self._reset()
        self.parked = True

    def park_before_start(self, environment: Environment, guard: Guard, asked: Mapping[CallPath, str]) -> None:
        """Stand as if the program had been started, had asked for these calls (path -> name) and had been parked."""
        self.environment = environment
        self.guard = guard
        self._asked.update(asked)
        self.parked = True

    def _run(self) -> None:
        self._streams = []
        root = self.new_stream(())
        root.started = True
        if self._error is not None:
            self.function_ended = True
            self._raised = self._error
        elif self.script is not None:
            self._function_run = ScriptRun(self.script, self)
        else:
            self._function_run = GreenletRun(self)
        if self.script is None:
            self.state = ProgramState(self, Writer(self, root), self.function.defaults)
        self._advance()

    def _advance(self) -> None:
        while True:
            while self._touched:
                self._touched.popleft().advance()
            if self.script is not None and self._leaves_script():
                break
            if self.function_ended or not (self._ready is None or self._ready()):
                break
            self._switch()
        if self.script is not None and self._leaves_script():
            self.script = None
            self.park()
            self.parked = False
            self._run()
            return
        assert self._waiting or self.function_ended, "a program waits for something that nobody will answer"
        if self.function_ended and not self._waiting:
            self._finish()

    def _leaves_script(self) -> bool:
        """From here on only the function itself says what comes: a branch has failed, or a value is not as recorded."""
        run = self._function_run
        return (run is not None and run.left_off) or any(stream.error is not None for stream in self._streams)

    def _switch(self) -> None:
        assert self._function_run is not None
        self._ready = None
        self._function_run.resume()

    def _finish(self) -> None:
        root = self._streams[0]
        unhandled = [s.error for s in self._streams if s.error is not None and id(s.error) not in self._handled]
        error = self._raised or next(iter(unhandled), None) or self._without_record()
        results = [answer for _, answer, _ in self._answers.values() if isinstance(answer, Result)]
        returned = None if isinstance(self.returned, ProgramState) else self.returned
        self.outcome = outcome_of(root, returned=returned, error=error, results=results)
        self.done = True
        self._close()
        self._answers.clear()
        self._asked.clear()
        if not self._keep_state:
            self._streams = []
            self.state = None

    def _without_record(self) -> ErrorInfo | None:
        """The error of a row that does not end with the gen that the schema from outside is for."""
        if self.record is None:
            return None
        gens = [
            (path, name)
            for path, (name, answer, _) in self._answers.items()
            if isinstance(answer, Result) and answer.choice is None
        ]
        if any(name == self.record.name for _, name in gens):
            _, last = max((path, name) for path, name in gens if len(path) == 1 or name == self.record.name)
            if last == self.record.name:
                return None
        asked = "its last gen is another one" if gens else "it asks no gen"
        return ErrorInfo(
            code="no-record",
            message=f"the row does not end with the gen {self.record.name!r}, which --schema is for: {asked}",
        )

    def _close(self) -> None:
        if self._function_run is not None:
            self._function_run.close()
        self._function_run = None

    # --- the function's side ---

    def run_function(self) -> None:
        """Call the author's function. What is for the process, a trace or the greenlet passes on."""
        assert self.state is not None
        try:
            arguments = {name: self._protect_argument(name, value) for name, value in self.arguments.items()}
            self.returned = self.function.invoke(self.state, arguments)
            self.state.ret_value = self.returned
            if self.tracer is not None:
                self.tracer.ends(self.returned)
        except (KeyboardInterrupt, GreenletExit, TraceStop):
            raise
        except BaseException as error:  # noqa: BLE001  a row's code may raise anything; it is that row's error
            self._raise(error)
        self.function_ended = True

    def _protect_argument(self, name: str, value: Any) -> Any:
        if self.tracer is not None:
            return value
        try:
            return self.guard.protect(value)
        except CallError as error:
            raise CallError(error.code, f"column {name!r}: {error.message}") from None

    def _raise(self, error: BaseException) -> None:
        source = self.function.source
        self._raised = describe(error, source)
        self.exception = error if self._keep_state else None
        if isinstance(error, TemplateError):
            self.template_error = TemplateError(
                error.code, error.message, hint=error.hint, where=error.where or template_line(error, source)
            )
        else:
            self.template_error = misused_primitive(error, source)
        if self._raised.code in ("too-many-calls", "not-deterministic"):
            self._abort(self._raised)

    def _abort(self, error: ErrorInfo) -> None:
        """End the row now, whatever its streams still have to do."""
        self._raised = error
        self.function_ended = True
        for stream in self._streams:
            stream.fail(error)
        self._waiting.clear()

    def wait(self, ready: Ready) -> None:
        """Go on only when ``ready()``; every reading of a value comes through here."""
        self.turn += 1
        if self.tracer is not None:
            self.tracer.waits(ready)
        if ready():
            return
        if self.is_inside:
            self.hold(ready)
            assert isinstance(self._function_run, GreenletRun)
            self._function_run.leave()
            return
        while not ready() and not self.done:
            self.step()

    def hold(self, ready: Ready) -> None:
        """Resume the function only when this is so."""
        self._ready = ready

    def end_function(self, returned: Any) -> None:
        """The function has returned this."""
        self.returned = returned
        self.function_ended = True

    @property
    def is_inside(self) -> bool:
        """The caller is the program's own function."""
        return self._function_run is not None and self._function_run.is_inside

    def step(self) -> None:
        """Go on, for a reader outside of a program that was started with ``stream=True``."""
        if self.feed is None or current_program() is not None:
            raise SglbatchError(
                "foreign-state",
                "this state belongs to a program that is not running here",
                hint="read a state inside its own function, or after run() has returned it",
            )
        if not self.done:
            self.feed.step()

    def traced(self, value: Any, stream: Stream, name: str | None) -> Any:
        """What the function reads: the value, or in a trace an abstract one."""
        return value if self.tracer is None else self.tracer.wrap(value, stream, name)

    def added(self, stream: Stream, operation: Operation) -> None:
        """Told of what is added to a stream that keeps a log."""
        if self.tracer is not None:
            self.tracer.added(stream, operation)

    def no_trace(self, what: str) -> None:
        """Raises TraceStop in a trace, which cannot know what the program gets."""
        if self.tracer is not None:
            raise TraceStop(what)

    def partial_text(self, stream: Stream) -> str:
        """What is there of the answer that a stream waits for; "" unless the backend tells."""
        if self.feed is None or self.done or stream.waiting is None:
            return ""
        return self.feed.partial_text(self.program_id, (*stream.path, stream.waiting.index))

    def call_outside(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        """Ask for an outside call and wait for its value; raises ProgramError where it fails."""
        root = self._streams[0]
        self.count_call()
        self.no_trace(f"calls {function.__qualname__} outside")
        name = f"{getattr(function, '__module__', 'builtins')}.{function.__qualname__}"  # str.upper has no module
        path = (root.take_index(),)
        call = OutsideCall(path, name, function, strip_guard(args), timeout_s)
        if self._asked.get(path, name) != name:
            raise ProgramError(self._changed(call))
        if path not in self._answers:
            self._waiting[path] = None
            self._announce(call)
        self.wait(lambda: path in self._answers)
        answer = self._answers[path][1]
        assert isinstance(answer, OutsideAnswer)
        if answer.error is not None:
            raise ProgramError(answer.error)
        return self.guard.protect(answer.value)

    def count_call(self, number: int = 1) -> None:
        self.num_calls += number
        if self.num_calls > self.environment.max_calls:
            raise SglbatchError(
                "too-many-calls",
                f"the program makes more than {self.environment.max_calls} calls",
                hint="bound its loop, or raise the limit on calls for each row",
            )

    def handled(self, error: ErrorInfo) -> None:
        """The program has met this error; unless it leaves the function, the program has dealt with it."""
        self._handled.add(id(error))

    def unhandled(self, error: ErrorInfo | None) -> None:
        if error is not None:
            self._handled.discard(id(error))

    @property
    def token_text(self) -> TokenText:
        return self.environment.token_text

    @property
    def ahead_tokens(self) -> int | None:
        return self.function.num_api_spec_tokens

    @property
    def rng(self) -> random.Random:
        self.no_trace("draws random numbers")
        if self._rng is None:
            self._rng = random.Random(f"{self.environment.seed} {self.row_key}")
        return self._rng

    def new_stream(self, path: tuple[int, ...]) -> Stream:
        stream = Stream(self, path, log=None if self.tracer is None else [])
        self._streams.append(stream)
        return stream

    def new_root(self) -> Stream:
        """An empty stream beside the root, for a function that this one runs by itself."""
        root = self._streams[0]
        stream = self.new_stream((root.take_index(), 0))
        stream.started = True
        stream.position = root.position
        return stream

    # --- the streams' side ---

    def touch(self, stream: Stream) -> None:
        self._touched.append(stream)

    def ask(self, stream: Stream, call: ModelCall) -> None:
        if stream.error is not None and (call.path not in self._asked or stream.error is self._raised):
            return  # another of its n answers was an error; those that were asked for still count
        if call.path in self._asked and self._asked[call.path] != call.name:
            self._abort(self._changed(call))
        elif call.path in self._answers:
            self._answer(stream, call.path)
        else:
            self._waiting[call.path] = stream
            self._announce(call)

    def _announce(self, call: Call) -> None:
        if call.path not in self._asked:
            self._asked[call.path] = call.name
            self._new_calls.append(call)

    def _answer(self, stream: Stream, path: CallPath) -> None:
        name, answer, position = self._answers[path]
        assert isinstance(answer, Result)
        if answer.error is not None and answer.error.call is None and name:
            answer = replace(answer, error=replace(answer.error, call=name))
        stream.answer(path, answer, position)
        self.touch(stream)

    def _changed(self, call: Call) -> ErrorInfo:
        before = self._asked[call.path]
        return ErrorInfo(
            code="not-deterministic",
            message=f"run again on the same row, the function asks for {call.name!r} where it asked for {before!r} "
            "(take random numbers from s.rng, and clock, files and network through sgl.call)",
        )
