"""Errors a user can meet. Every one says what is wrong and, where we know it, what to do."""

from __future__ import annotations

from typing import Final

EXIT_DONE: Final = 0
EXIT_FAILED_ROWS: Final = 1
EXIT_USAGE: Final = 2
EXIT_MODEL: Final = 3
EXIT_COST_CAP: Final = 4
EXIT_BUG: Final = 70
EXIT_RESUMABLE: Final = 75
EXIT_BROKEN_PIPE: Final = 128 + 13
"""As a shell shows that SIGPIPE ended a program: nobody reads what it prints any more."""


class SglbatchError(Exception):
    """A mistake of the user's or a failure of the outside world; never a bug of ours.

    Printed as ``error[code]: where: message`` and ``hint: ...``.

    Args:
        code: short kebab-case name, stable across versions (``unknown-parameter``).
        message: one sentence, no trailing period needed.
        hint: what to do, ready to paste.
        where: ``file`` or ``file:line`` when there is one.
        exit_code: the process's exit status when the error ends a job.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str | None = None,
        where: str | None = None,
        exit_code: int = EXIT_USAGE,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.where = where
        self.exit_code = exit_code

    def render(self) -> str:
        """The text shown on a terminal."""
        place = f"{self.where}: " if self.where else ""
        lines = [f"error[{self.code}]: {place}{self.message}"]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.message


class ModelError(SglbatchError):
    """The model or the environment cannot do the job (exit code 3)."""

    def __init__(self, code: str, message: str, *, hint: str | None = None, where: str | None = None) -> None:
        super().__init__(code, message, hint=hint, where=where, exit_code=EXIT_MODEL)


class BackendStopped(SglbatchError):
    """The backend makes no more calls for now; what it has answered is kept, and the job can be continued."""


class ConstraintError(SglbatchError):
    """A regex, schema or choice list that cannot be enforced."""


class UnsupportedSchemaError(ConstraintError):
    """A JSON Schema uses a keyword that cannot be enforced while generating.

    Args:
        keyword: the keyword, such as ``uniqueItems``.
        path: where it stands in the schema, as a JSON pointer fragment (``#/properties/tags``).
    """

    def __init__(self, keyword: str, path: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__("unsupported-schema", f"{keyword} at {path} cannot be enforced: {reason}", hint=hint)
        self.keyword = keyword
        self.path = path


class CallError(SglbatchError):
    """One call of one program failed; it becomes that row's ``_error``."""
