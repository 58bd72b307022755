"""How a command ends: every outcome has an exit code, every error a text."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from sglbatch.errors import EXIT_BUG, EXIT_MODEL, SglbatchError


def guarded(command: Callable[[], int]) -> NoReturn:
    """Runs ``command`` on ``sys.argv`` and ends the process with the status that it returns, or that its error has.

    ``--debug`` is taken off the arguments wherever it stands, since it concerns only what happens here.
    """
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    # Until a job listens itself, a signal may end the process at once, with the exit status that a shell shows as 130.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = command()
    except SglbatchError as error:
        _tell(error.render(), debug)
        _leave(error.exit_code)
    except OSError as error:
        _tell(environment_error(error).render(), debug)
        _leave(EXIT_MODEL)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the last line of defence: exit code 70 instead of Python's 1
        _tell(
            f"error[internal]: {type(error).__name__}: {error}\n"
            "hint: this is a bug in sglbatch: please report it to the project's issue tracker, with the output of "
            "the same command and --debug. A job is not lost: the same command continues it.",
            debug,
        )
        _leave(EXIT_BUG)
    _leave(code)


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

    print("\n".join(map(escape_controls, text.split("\n"))), file=sys.stderr)


def _leave(code: int) -> NoReturn:
    sys.stderr.flush()
    raise SystemExit(code)
