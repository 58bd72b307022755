"""Values that a program is traced with: they can be put into text, and nothing else.

In text they are placeholders in private-use characters, so that an f-string works as it does with a real value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

OPEN: Final = "\ue0f3"
CLOSE: Final = "\ue0f4"
_PLACEHOLDER: Final = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
_ALLOWED: Final = frozenset(
    {"__new__", "__init__", "__class__", "__doc__", "__getattribute__", "__setattr__", "__delattr__", "__dir__"}
    | {"__str__", "__format__", "__init_subclass__", "__subclasshook__", "__reduce__", "__reduce_ex__"}
    | {"__getnewargs__", "__getstate__", "__sizeof__"}
)


class TraceStop(BaseException):
    """The program did something that a trace cannot follow. No Exception, so that its own handlers let it pass."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Abstract(str):
    """A value that is not known: a column's or an answer's.

    Anything but adding to it and formatting it raises TraceStop.
    """

    what: str

    @staticmethod
    def of(name: str, what: str) -> Abstract:
        """A placeholder with this name; ``what`` is it for people: ``the column 'x'``."""
        return Abstract._plain(placeholder(name), what)

    @staticmethod
    def _plain(text: str, what: str) -> Abstract:
        value = Abstract(text)
        object.__setattr__(value, "what", what)
        return value

    def __str__(self) -> str:
        return self

    def __format__(self, spec: str) -> str:
        if spec:
            raise TraceStop(f"formats {self.what} as {spec!r}")
        return plain(self)

    def __add__(self, other: Any) -> Any:
        return Abstract._plain(plain(self) + plain(other), self.what) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return Abstract._plain(plain(other) + plain(self), self.what) if isinstance(other, str) else NotImplemented

    def __int__(self) -> int:
        raise TraceStop(f"makes a number of {self.what}")

    def __float__(self) -> float:
        raise TraceStop(f"makes a number of {self.what}")

    def __bool__(self) -> bool:
        raise TraceStop(f"branches on {self.what}")


class AbstractNumber:
    """A number that is not known: it can be put into text, and nothing else."""

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        self.what = what

    def __str__(self) -> str:
        return placeholder(self.name)

    def __format__(self, spec: str) -> str:
        if spec:
            raise TraceStop(f"formats {self.what} as {spec!r}")
        return placeholder(self.name)


def _refusing(name: str) -> Callable[..., Any]:
    comparing = name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "__bool__")

    def method(self: Abstract | AbstractNumber, *_: Any, **__: Any) -> Any:
        raise TraceStop(f"branches on {self.what}" if comparing else f"looks into {self.what} ({name.strip('_')})")

    return method


for _name in dir(str):
    if _name not in _ALLOWED and _name not in vars(Abstract):
        setattr(Abstract, _name, _refusing(_name))
for _name in {*dir(int), *dir(float)} - _ALLOWED:
    setattr(AbstractNumber, _name, _refusing(_name))


def placeholder(name: str) -> str:
    return f"{OPEN}{name}{CLOSE}"


def plain(text: str) -> str:
    """The characters of a text that may be abstract."""
    return str.__str__(text)


def parts(text: str) -> Iterator[tuple[bool, str]]:
    """A text cut at its placeholders: (is a placeholder, its name or the text), empty texts left out."""
    for i, part in enumerate(_PLACEHOLDER.split(text)):
        if part or i % 2:
            yield bool(i % 2), part


def has_placeholder(text: str) -> bool:
    """The text depends on an unknown value."""
    return OPEN in plain(text)


def shows_placeholder(value: object) -> bool:
    """A string in ``value`` (as its repr shows it) depends on an unknown value.

    Raises:
        TraceStop: one is such a value.
    """
    return OPEN in repr(value) or repr(OPEN).strip("'") in repr(value)
