"""Running programs by themselves, without a job: once, over a list, or read while they run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sglbatch.errors import SglbatchError
from sglbatch.lang.dialect import dialect_of
from sglbatch.lang.driver import Driver
from sglbatch.lang.environment import LanguageBackend
from sglbatch.lang.global_config import global_config
from sglbatch.lang.program import Program
from sglbatch.lang.sampling import OPTIONS, override_of
from sglbatch.lang.state import ProgramState

if TYPE_CHECKING:
    from sglbatch.lang.function import SglFunction

RUN_OPTIONS: Final = frozenset({*OPTIONS, "backend", "seed", "stream"})


def check_options(options: Mapping[str, Any], allowed: frozenset[str], where: str) -> None:
    """Raises SglbatchError ``unsupported-argument`` for an option that there is none of."""
    unknown = options.keys() - allowed
    if unknown:
        raise SglbatchError("unsupported-argument", f"{where} has no argument {min(unknown)!r}")


def run_one(function: SglFunction, arguments: dict[str, Any], options: Mapping[str, Any]) -> ProgramState:
    """Run to the end; with ``stream`` only start, and go on whenever the state is read."""
    driver, (program,) = _start(function, [arguments], options)
    state = program.state
    assert state is not None
    if options.get("stream", False):
        program.feed = driver
        return state
    return next(_in_order(driver, [program])).state_after()


def run_many(
    function: SglFunction, rows: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> Iterator[ProgramState]:
    """The states of finished programs, in the order of ``rows``, each as soon as it and those before it have ended."""
    if options.get("stream", False):
        raise SglbatchError("unsupported-argument", "run_batch has no argument 'stream'", hint="generator_style=True")
    driver, programs = _start(function, rows, options)
    return (program.state_after() for program in _in_order(driver, programs))


def with_progress(states: Iterator[ProgramState], number: int) -> Iterator[ProgramState]:
    from tqdm import tqdm

    yield from tqdm(states, total=number)


def _start(
    function: SglFunction, rows: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> tuple[Driver, list[Program]]:
    backend = global_config.backend(options.get("backend"))
    forced = override_of({name: value for name, value in options.items() if name in OPTIONS})
    driver = driver_of(backend, seed=options.get("seed") or 0)
    programs = [
        Program(function, arguments, program_id=i, row_key=str(i), forced=forced, keep_state=True)
        for i, arguments in enumerate(rows)
    ]
    for program in programs:
        driver.add(program)
    return driver, programs


def driver_of(backend: LanguageBackend, *, seed: int = 0) -> Driver:
    """A driver over a backend that brings its tokenizer or its dialect."""
    return Driver(
        dialect=dialect_of(backend),
        model_identity=backend.identity,
        context_len=backend.context_len,
        backend=global_config.shared_backends.port(backend),
        seed=seed,
    )


def _in_order(driver: Driver, programs: Sequence[Program]) -> Iterator[Program]:
    waiting = deque(programs)
    while waiting:
        program = waiting.popleft()
        while not program.done:
            driver.step()
        if global_config.verbosity >= 2:
            print(program.outcome.transcript)
        yield program
