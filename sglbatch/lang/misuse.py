"""Mistakes in a template that Python reports as it runs, although no row has a part in them."""

from __future__ import annotations

import difflib
import inspect
import re
import traceback
from pathlib import Path

from sglbatch.lang import primitives
from sglbatch.lang.expressions import TemplateError
from sglbatch.lang.outcome import template_line

_CALL = re.compile(r"(\w+)\(\) (.+)")
_UNKNOWN = re.compile(r"got an unexpected keyword argument '(\w+)'")


def misused_primitive(error: BaseException, source: Path) -> TemplateError | None:
    """The error of a template that calls one of the language's functions as it cannot be called; None for others."""
    called = _CALL.match(str(error)) if isinstance(error, TypeError) else None
    function = getattr(primitives, called[1], None) if called else None
    if called is None or not inspect.isfunction(function):
        return None
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_code.co_filename not in (str(source), primitives.__file__):
        return None  # raised further in, not by calling it
    names = list(inspect.signature(function).parameters)
    unknown = _UNKNOWN.match(called[2])
    near = next(iter(difflib.get_close_matches(unknown[1], names, n=1)), None) if unknown else None
    return TemplateError(
        "unknown-argument" if unknown else "bad-arguments",
        f"{called[1]} has no argument {unknown[1]!r}" if unknown else f"{called[1]}() {called[2]}",
        hint=f"{called[1]}({near}=...)" if near else f"it takes: {', '.join(names)}",
        where=template_line(error, source),
    )
