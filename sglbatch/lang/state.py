"""What a program's function holds: one branch of its text and variables."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sglbatch.errors import SglbatchError
from sglbatch.lang.calls import ProgramError
from sglbatch.lang.expressions import RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, check_name
from sglbatch.lang.fork_group import ForkGroup
from sglbatch.lang.guard import strip_guard
from sglbatch.lang.outcome import Outcome
from sglbatch.lang.primitives import role
from sglbatch.lang.sampling import SamplingOverride
from sglbatch.lang.stream import Stream
from sglbatch.lang.variables import Variable
from sglbatch.lang.waits import Drained, Ready, Settled
from sglbatch.lang.writer import Session, Writer
from sglbatch.types import ErrorInfo


class RunningProgram(Session, Protocol):
    """What a state needs of its program."""

    done: bool
    outcome: Outcome
    exception: BaseException | None

    def wait(self, ready: Ready) -> None: ...

    def handled(self, error: ErrorInfo) -> None: ...

    def step(self) -> None: ...

    def traced(self, value: Any, stream: Stream, name: str | None) -> Any: ...

    def no_trace(self, what: str) -> None: ...

    def partial_text(self, stream: Stream) -> str: ...

    @property
    def is_inside(self) -> bool: ...

    @property
    def rng(self) -> random.Random: ...


class ProgramState:
    """Text and variables of one branch. ``+=`` never waits; reading a value waits until it is there."""

    def __init__(
        self,
        program: RunningProgram,
        writer: Writer,
        defaults: SamplingOverride,
        group: ForkGroup | None = None,
    ) -> None:
        self._program = program
        self._writer = writer
        self._defaults = defaults
        self._group = group
        self.ret_value: Any = None
        """What the function returned, once it has."""

    # --- writing ---

    def __iadd__(self, value: object) -> ProgramState:
        self._check_running()
        self._writer.add(value, self._defaults)
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable; it becomes an output column like a generated one."""
        self._check_running()
        check_name(name)
        self._writer.assign(name, value)

    def user(self, content: object = None) -> Any:
        """A user message: ``with s.user(): ...``, or at once with its content."""
        return self._role("user", content)

    def system(self, content: object = None) -> Any:
        """A system message: ``with s.system(): ...``, or at once with its content."""
        return self._role("system", content)

    def assistant(self, content: object = None) -> Any:
        """An assistant message: ``with s.assistant(): ...``, or at once with its content."""
        return self._role("assistant", content)

    def _role(self, name: str, content: object) -> Any:
        if content is None:
            return self._message(name)
        self += role(name, content)
        return None

    @contextmanager
    def _message(self, name: str) -> Iterator[None]:
        self._writer.add(RoleBegin(name), self._defaults)
        yield
        self._writer.add(RoleEnd(name), self._defaults)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """``with s.var_scope("x"): ...``: the variable is all the text that is added inside."""
        self._check_running()
        check_name(name)
        self._writer.add(ScopeBegin(name), self._defaults)
        yield
        self._writer.add(ScopeEnd(name), self._defaults)

    def fork(self, size: int = 1, position_ids_offset: object = None) -> ForkGroup:
        """``size`` branches that begin where this state stands.

        Raises:
            SglbatchError: ``invalid-argument`` for a size below 1, ``unsupported-argument``.
        """
        self._check_running()
        if position_ids_offset is not None:
            raise SglbatchError("unsupported-argument", "fork(position_ids_offset=...) is not supported")
        if not isinstance(size, int) or size < 1:
            raise SglbatchError("invalid-argument", f"fork needs at least one branch, not {size!r}")
        writers = self._writer.fork(size)
        return ForkGroup([self._with(writer) for writer in writers], lambda mode: self._writer.join(writers, mode))

    def copy(self, position_ids_offset: object = None) -> ProgramState:
        """A fork of one. ``with s.copy() as branch: ...`` joins it at the end, gathering its variables."""
        group = self.fork(1, position_ids_offset)
        group[0]._group = group
        return group[0]

    def __enter__(self) -> ProgramState:
        if self._group is None:
            raise SglbatchError("invalid-argument", "only a copy can be used in a with statement", hint="s.copy()")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self._group is not None:
            self._group.join()

    def _with(self, writer: Writer) -> ProgramState:
        return ProgramState(self._program, writer, self._defaults)

    def under(self, defaults: SamplingOverride) -> ProgramState:
        """The same branch, as another function writes to it."""
        return ProgramState(self._program, self._writer, defaults.over(self._defaults))

    # --- reading ---

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def get_var(self, name: str) -> Any:
        """The variable's value; waits for it.

        Raises:
            CallError: the call that should have set it failed.
            SglbatchError: ``unknown-variable``.
        """
        assigned = self._stream.last_assign.get(name)
        if assigned is not None:
            return assigned.value
        return self._readable(self._variable(name), name)

    def get_meta_info(self, name: str) -> Any:
        """What is known of the call that set ``name``, a dict: token counts, finish reason, log-probabilities where it
        asked for them, what a select compared. A list of dicts for n > 1. See docs/language.md.
        """
        meta = self._variable(name).meta
        self._program.no_trace(f"reads the meta info of {name!r}")
        if meta is None:
            raise SglbatchError("unknown-variable", f"the variable {name!r} was not set by one gen or select")
        return copy.deepcopy(meta)

    def __contains__(self, name: str) -> bool:
        self._program.wait(Settled(self._stream, name))
        if self._stream.error is not None and name in self._stream.lost:
            self._raise_error()
        return name in self._stream.variables

    def text(self) -> str:
        """The whole text so far, markup of the chat template included; waits for what is queued."""
        self.sync()
        return self._text(0, None)

    def messages(self) -> list[dict[str, str]]:
        """The messages so far as role and content; an open message has what it holds until now."""
        self.sync()
        return [
            {"role": message.role, "content": self._text(message.start, message.end)}
            for message in self._stream.text.messages
        ]

    def sync(self) -> None:
        """Wait until all that was added has been carried out.

        Raises:
            CallError: a call on this branch failed.
        """
        stream = self._stream
        self._program.wait(Drained(stream))
        if stream.error is not None:
            self._raise_error()

    def error(self) -> SglbatchError | None:
        """Why this branch (after the end: the whole program) failed, or None; waits like ``sync``."""
        stream = self._stream
        self._program.wait(Drained(stream))
        info = stream.error or (self._program.outcome.error if self._program.done else None)
        return None if info is None else ProgramError(info)

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or a variable's, piece by piece. After ``run(stream=True)`` pieces come as they are generated.

        Raises:
            CallError: what the pieces come from failed; SglbatchError ``unknown-variable``.
        """
        sent = ""
        while True:
            text, complete = self._so_far(var_name)
            if len(text) > len(sent):
                yield text[len(sent) :]
                sent = text
            if complete:
                break
            self._program.step()
        if var_name is None:
            self.sync()
        else:
            self.get_var(var_name)

    async def text_async_iter(self, var_name: str | None = None) -> AsyncIterator[str]:
        """``text_iter`` for a coroutine: other tasks run between the backend's steps."""
        for piece in self.text_iter(var_name):
            yield piece
            await asyncio.sleep(0)

    def _so_far(self, var_name: str | None) -> tuple[str, bool]:
        """What there is of the text or the variable, and whether it is all."""
        if self._program.is_inside:
            return (self.text() if var_name is None else str(self.get_var(var_name))), True
        stream, ended = self._stream, self._program.done
        failed = ended or stream.error is not None
        if var_name is None:
            return self._text(0, None) + self._program.partial_text(stream), failed
        if var_name in stream.variables and (stream.settled(var_name) or ended):
            return str(self._readable(stream.variables[var_name], var_name)), True
        asked = stream.waiting is not None and stream.waiting.name == var_name
        return self._program.partial_text(stream) if asked else "", failed

    @property
    def rng(self) -> random.Random:
        """Random numbers that depend on the job's seed and the row only."""
        return self._program.rng

    @property
    def _stream(self) -> Stream:
        return self._writer.stream

    def _variable(self, name: str) -> Variable:
        stream = self._stream
        self._program.wait(Settled(stream, name))
        failed = stream.error is not None
        if name in stream.variables and not (failed and name in stream.lost):
            return stream.variables[name]
        if failed or (self._program.done and self._program.outcome.error is not None):
            self._raise_error()
        known = ", ".join(stream.variables) or "none"
        raise SglbatchError("unknown-variable", f"there is no variable {name!r} here; there are: {known}")

    def _readable(self, variable: Variable, name: str) -> Any:
        if not self._program.is_inside:
            return variable.value if variable.generated else strip_guard(variable.value)
        value = self._program.guard.protect(variable.value) if variable.generated else variable.value
        return self._program.traced(value, self._stream, name)

    def _text(self, start: int, end: int | None) -> str:
        pieces = self._stream.text.pieces[start:end]
        if not self._program.is_inside:
            return "".join(text if generated else strip_guard(text) for text, generated in pieces)
        guard = self._program.guard
        text = "".join(guard.protect(text) if generated else text for text, generated in pieces)
        return str(self._program.traced(text, self._stream, None))

    def _raise_error(self) -> None:
        info = self._stream.error or self._program.outcome.error
        assert info is not None
        self._program.handled(info)
        raise ProgramError(info) from self._program.exception

    def _check_running(self) -> None:
        if self._program.done:
            raise SglbatchError(
                "program-ended", "the program has ended, nothing can be added to its state", hint="start a new run"
            )
