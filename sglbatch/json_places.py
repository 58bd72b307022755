"""Places inside a JSON value, written as the fragment of a URI (RFC 6901): ``#/properties/a~1b``."""

from __future__ import annotations

import math
from typing import Any

from sglbatch.errors import ConstraintError


def below(place: str, step: str | int) -> str:
    """The place of one member of what stands at ``place``."""
    return f"{place}/{str(step).replace('~', '~0').replace('/', '~1')}"


def check_finite(schema: Any, *, where: str | None = None) -> None:
    """Looks for NaN and Infinity, which Python reads as JSON; they can stand anywhere in a schema, also in an enum.

    Raises ConstraintError: invalid-schema, with the number's place in the schema.
    """
    stack = [("#", schema)]
    while stack:
        place, item = stack.pop()
        if isinstance(item, float) and not math.isfinite(item):
            message = f"{place}: JSON has neither NaN nor Infinity, and numbers beyond 1.8e308 cannot be held"
            raise ConstraintError("invalid-schema", message, where=where, hint="correct the schema")
        if isinstance(item, dict):
            stack += [(below(place, name), inner) for name, inner in item.items()]
        elif isinstance(item, list | tuple):
            stack += [(below(place, i), inner) for i, inner in enumerate(item)]
