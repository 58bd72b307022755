"""``@function``: a Python function over a program state, and how to run it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeVar, overload

from sglbatch.errors import SglbatchError
from sglbatch.lang.caching import cache_prefix
from sglbatch.lang.dialect import environment_of
from sglbatch.lang.environment import LanguageBackend
from sglbatch.lang.function_run import current_program
from sglbatch.lang.global_config import global_config
from sglbatch.lang.guard import strings_of_files, strings_of_function
from sglbatch.lang.program import NO_OVERRIDE, Program
from sglbatch.lang.running import RUN_OPTIONS, check_options, run_many, run_one, with_progress
from sglbatch.lang.sampling import OPTIONS, SamplingOverride, override_of
from sglbatch.lang.state import ProgramState
from sglbatch.lang.trace import PLAIN_ENVIRONMENT, Trace, trace_program
from sglbatch.lang.writer import Writer

T = TypeVar("T")

_GENERATORS: Final = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)


class SglFunction:
    """A program. Its first parameter is the state; the others are what it reads.

    Args:
        function: the author's function.
        defaults: sampling of its gens, where they do not say otherwise.
        bound: arguments that are fixed.
        source_files: the files whose string constants are the author's.
        num_api_spec_tokens: with an API model, how many tokens beyond a gen's own one call may generate for the gens
            that follow it in the same turn; None lets the backend decide, 0 is off.
    """

    def __init__(
        self,
        function: FunctionType,
        *,
        defaults: SamplingOverride = NO_OVERRIDE,
        bound: Mapping[str, Any] | None = None,
        source_files: Sequence[Path] | None = None,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        self.function = function
        self.num_api_spec_tokens = num_api_spec_tokens
        self.defaults = defaults
        self.bound = dict(bound or {})
        self.source = Path(function.__code__.co_filename)
        self.source_files = tuple(source_files) if source_files is not None else (self.source,)
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    @cached_property
    def parameters(self) -> tuple[inspect.Parameter, ...]:
        """The parameters behind the state, bound ones left out.

        Raises:
            SglbatchError: ``bad-function``: no state, parameters that have no name of their own, or a body that
                does not run when it is called.
        """
        parameters = list(inspect.signature(self.function).parameters.values())
        where = f"{self.source}:{self.function.__code__.co_firstlineno}"
        if not parameters:
            raise SglbatchError(
                "bad-function",
                f"the function {self.__name__} has no parameter for the state",
                hint=f"def {self.__name__}(s, ...):",
                where=where,
            )
        if any(kind(self.function) for kind in (inspect.iscoroutinefunction, *_GENERATORS)):
            raise SglbatchError(
                "bad-function",
                f"the function {self.__name__} is async or has a yield: calling it would run nothing of it",
                hint=f"make it a plain function: def {self.__name__}(s, ...):",
                where=where,
            )
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        for parameter in parameters[1:]:
            if parameter.kind not in named:
                raise SglbatchError(
                    "bad-function",
                    f"the parameter {parameter} of {self.__name__} cannot be given by name",
                    hint="list the parameters one by one: each is a column",
                    where=where,
                )
        return tuple(parameter for parameter in parameters[1:] if parameter.name not in self.bound)

    def strings(self) -> set[str]:
        """String constants of the author's: what may hold special tokens."""
        files = [file for file in self.source_files if file.is_file()]
        strings = strings_of_files(files) | strings_of_function(self.function)
        return strings | {value for value in self.bound.values() if isinstance(value, str)}

    def bind(self, **arguments: Any) -> SglFunction:
        """The same program with some arguments fixed."""
        self._check_names(arguments)
        return SglFunction(
            self.function,
            defaults=self.defaults,
            bound={**self.bound, **arguments},
            source_files=self.source_files,
            num_api_spec_tokens=self.num_api_spec_tokens,
        )

    def invoke(self, state: ProgramState, arguments: Mapping[str, Any]) -> Any:
        """Call the author's function on a state."""
        return self.function(state, **{**self.bound, **arguments})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside a program: with its state as the first argument, write to that state and give what the function
        returns; else run on a text of its own and give that state. Outside: ``run``.
        """
        if args and isinstance(args[0], ProgramState):
            return self.invoke(args[0].under(self.defaults), self._arguments(args[1:], kwargs))
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run once; the state holds the results, and reading what failed raises why.

        Keyword arguments that are parameters of the program go to it, whatever they are called. The others are those
        of gens (``max_new_tokens``, ``stop``, ``temperature``, ...), ``backend``, ``seed``, and ``stream``: return at
        once, and run on as the state is read (``text_iter``).

        Raises:
            SglbatchError: ``no-backend``, ``bad-arguments``, ``invalid-argument``; TemplateError.
        """
        names = {parameter.name for parameter in self.parameters}
        options = {name: value for name, value in kwargs.items() if name in RUN_OPTIONS and name not in names}
        arguments = self._arguments(args, {name: v for name, v in kwargs.items() if name not in options})
        inside = current_program()
        if inside is not None:
            return self._run_inside(inside, arguments, options)
        return run_one(self, arguments, options)

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        progress_bar: bool = False,
        generator_style: bool = False,
        num_threads: int | str = "auto",
        **options: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run once for each dict (or tuple) of arguments; states in the same order.

        A row that fails does not stop the others: its state's ``error()`` says why.

        Args:
            generator_style: give each state as soon as it and those before it have ended.
            num_threads: accepted for programs that pass it; programs run without threads.
        """
        check_options(options, RUN_OPTIONS, "run_batch")
        rows = [
            self._arguments((), row) if isinstance(row, Mapping) else self._arguments(tuple(row), {})
            for row in batch_kwargs
        ]
        states = run_many(self, rows, options)
        if progress_bar:
            states = with_progress(states, len(rows))
        return states if generator_style else list(states)

    def trace(self, *, backend: LanguageBackend | None = None, **arguments: Any) -> Trace:
        """Run once on abstract values: what the program adds, and where it stops being predictable.

        Args:
            backend: whose chat template is used; without one, and without a default, roles stand in brackets.
            arguments: those that are known; the others are abstract.
        """
        self._check_names(arguments)
        given = backend or global_config.default_backend
        return trace_program(self, arguments, PLAIN_ENVIRONMENT if given is None else environment_of(given))

    def cache(self, backend: LanguageBackend | None = None) -> None:
        """Compute the text that all runs begin with now, so that they find it in the backend's memory."""
        cache_prefix(self, global_config.backend(backend))

    def _run_inside(self, program: Program, arguments: dict[str, Any], options: dict[str, Any]) -> ProgramState:
        check_options(options, frozenset(OPTIONS), "a function that another one runs")
        defaults = override_of(options).over(self.defaults)
        state = ProgramState(program, Writer(program, program.new_root()), defaults)
        state.ret_value = self.invoke(state, arguments)
        return state

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        self._check_names(kwargs)
        names = [parameter.name for parameter in self.parameters]
        if len(args) > len(names):
            raise SglbatchError("bad-arguments", f"{self.__name__} takes {len(names)} arguments, not {len(args)}")
        arguments = dict(zip(names, args, strict=False))
        twice = arguments.keys() & kwargs.keys()
        if twice:
            raise SglbatchError("bad-arguments", f"{self.__name__} was given {min(twice)!r} twice")
        arguments.update(kwargs)
        missing = [p.name for p in self.parameters if p.default is p.empty and p.name not in arguments]
        if missing:
            raise SglbatchError("bad-arguments", f"{self.__name__} was not given {', '.join(missing)}")
        return arguments

    def _check_names(self, arguments: Mapping[str, Any]) -> None:
        names = [parameter.name for parameter in self.parameters]
        unknown = [name for name in arguments if name not in names]
        if unknown:
            known = ", ".join(names) or "none"
            raise SglbatchError("bad-arguments", f"{self.__name__} has no parameter {unknown[0]!r}; it has: {known}")


@overload
def function(func: Callable[..., Any], /) -> SglFunction: ...


@overload
def function(
    func: None = None, /, *, num_api_spec_tokens: int | None = None, **options: Any
) -> Callable[[Callable[..., Any]], SglFunction]: ...


def function(func: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a program of a function: ``@function``, or ``@function(max_new_tokens=..., temperature=...)``.

    Args:
        options: what its gens have where they do not say otherwise, ``sampling.OPTIONS``.

    Raises:
        SglbatchError: ``bad-function``, ``invalid-argument``.
    """
    names = (*OPTIONS, "num_api_spec_tokens")
    unknown = options.keys() - set(names)
    if unknown:
        raise SglbatchError(
            "invalid-argument",
            f"@function has no argument {min(unknown)!r}",
            hint=f"it takes {', '.join(names)}",
        )
    ahead = options.get("num_api_spec_tokens")
    if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0):
        raise SglbatchError("invalid-argument", f"num_api_spec_tokens must be at least 0, not {ahead!r}")
    defaults = override_of({name: value for name, value in options.items() if name in OPTIONS})

    def decorate(inner: Callable[..., Any]) -> SglFunction:
        if not isinstance(inner, FunctionType):
            raise SglbatchError("bad-function", f"@function needs a function, not {inner!r}")
        return SglFunction(inner, defaults=defaults, num_api_spec_tokens=ahead)

    return decorate if func is None else decorate(func)


def call(fn: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> T:
    """Run Python outside the program (a tool, a look-up) without holding up other programs.

    Its result must be a JSON value; it is journaled, so a resumed job does not call again.

    Raises:
        CallError: it failed, timed out, or gave no JSON value.
        SglbatchError: ``outside-program``, ``invalid-argument``.
    """
    program = current_program()
    if program is None:
        raise SglbatchError("outside-program", "sgl.call was used outside a program", hint="call the function itself")
    if not hasattr(fn, "__qualname__"):
        raise SglbatchError(
            "invalid-argument", f"sgl.call needs a function with a name, not {fn!r}", hint="wrap it in a def"
        )
    if timeout_s <= 0:
        raise SglbatchError("invalid-argument", f"timeout_s must be above 0, not {timeout_s!r}")
    result: T = program.call_outside(fn, args, timeout_s)
    return result
