"""How a command ends: every outcome has an exit code, every error a text."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TextIO

from sglbatch.errors import EXIT_BROKEN_PIPE, EXIT_BUG, EXIT_MODEL, SglbatchError


def guarded(command: Callable[[], int]) -> NoReturn:
    """Runs ``command`` on ``sys.argv`` and ends the process with the status that it returns, or that its error has.

    ``--debug`` is taken off the arguments wherever it stands, since it concerns only what happens here.
    """
    _open_closed_streams()
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    # Until a job listens itself, a signal may end the process at once, with the exit status that a shell shows as 130.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = _status(command, debug)
    except BrokenPipeError:
        _discard_output()
        code = EXIT_BROKEN_PIPE
    raise SystemExit(code)


def _status(command: Callable[[], int], debug: bool) -> int:
    """The exit status of a command, whose error has been told.

    Raises BrokenPipeError where nobody reads what it or its error prints.
    """
    try:
        code = command()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # not first at the interpreter's end, where it is too late for an exit status
        return code
    except SglbatchError as error:
        _tell(error.render(), debug)
        return error.exit_code
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _unread():
            raise
        _tell(environment_error(error).render(), debug)
        return EXIT_MODEL
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the last line of defence: exit code 70 instead of Python's 1
        _tell(
            f"error[internal]: {type(error).__name__}: {error}\n"
            "hint: this is a bug in sglbatch: please report it to the project's issue tracker, with the output of "
            "the same command and --debug. A job is not lost: the same command continues it.",
            debug,
        )
        return EXIT_BUG


def environment_error(error: OSError) -> SglbatchError:
    """A disk that is full, a file system that is gone: the outside world, exit code 3."""
    return SglbatchError(
        "environment",
        f"{error.strerror or error}",
        where=str(error.filename) if error.filename else None,
        hint="mend it and run the same command again: everything finished so far is kept",
        exit_code=EXIT_MODEL,
    )


def _tell(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    from sglbatch.planner import escape_controls  # only now: it brings numpy

    print("\n".join(map(escape_controls, text.split("\n"))), file=sys.stderr, flush=True)


def _open_closed_streams() -> None:
    """Streams that were closed when the process began (``2>&-``) are empty, or lead nowhere.

    Python has None for them, and what is printed to None goes to stdout. A descriptor that stays free is the next
    file's that is opened, and a library's warnings would go into that one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115 - stays open


def _unread() -> list[TextIO]:
    """Those of stdout and stderr whose reader has gone."""
    return [stream for stream in (sys.stdout, sys.stderr) if _has_lost_its_reader(stream)]


def _has_lost_its_reader(stream: TextIO) -> bool:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # kept in memory
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _discard_output() -> None:
    """What is still buffered goes nowhere; else Python complains of it at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in _unread():
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
