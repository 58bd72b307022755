"""Texts and values with holes for what is different in every row, and the shapes of rows' values.

A hole has a name: ``a:question`` for an argument, ``r:3`` for what the fourth reading of a variable gave, with the way
to an item behind it (``a:choices.2``). A value that is traced holds its holes as placeholders, see ``abstract``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sglbatch.lang.abstract import Abstract, AbstractNumber, TraceStop, parts, placeholder, plain

MAX_ITEMS: Final = 256
"""Of a row's lists and dictionaries together: larger ones are hardly ever the same shape again."""

Shape: TypeAlias = tuple[Any, ...] | str
"""Equal for values that differ in their texts and numbers only."""


class ShapelessError(Exception):
    """A value of a kind that is not traced."""


def flatten(name: str, value: Any, holes: dict[str, Any]) -> Shape:
    """The shape of a value. Its texts and numbers are put into ``holes``; None, truth values and keys are in the shape.

    Raises:
        ShapelessError: the value is something else than JSON has, or too large.
    """
    kind = type(value)
    if kind is str or kind is Abstract:
        holes[name] = value
        return "text"
    if kind is int or kind is float or kind is AbstractNumber:
        holes[name] = value
        return "number"
    if value is None or kind is bool:
        return str(value)
    if kind not in (list, dict) or len(holes) + len(value) > MAX_ITEMS:
        raise ShapelessError(name)
    if kind is list:
        return ("list", *(flatten(f"{name}.{i}", item, holes) for i, item in enumerate(value)))
    if not all(type(key) is str for key in value):
        raise ShapelessError(name)
    return ("dict", *((key, flatten(f"{name}.{i}", item, holes)) for i, (key, item) in enumerate(value.items())))


def abstracted(name: str, value: Any, what: str) -> Any:
    """The same value with abstract ones in the place of its holes."""
    kind = type(value)
    if kind is str or kind is Abstract:
        return Abstract.of(name, what)
    if kind is int or kind is float or kind is AbstractNumber:
        return AbstractNumber(name, what)
    if kind is list:
        return [abstracted(f"{name}.{i}", item, what) for i, item in enumerate(value)]
    if kind is dict:
        return {key: abstracted(f"{name}.{i}", item, what) for i, (key, item) in enumerate(value.items())}
    return value


# --- texts and values with holes ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HoledText:
    """``pieces``: constant texts, and between each two the name of a hole."""

    pieces: tuple[str, ...]

    @staticmethod
    def of(text: str) -> HoledText:
        """Of a text with placeholders."""
        pieces = [""]
        for known, part in parts(plain(text)):
            pieces += [part, ""] if known else [pieces.pop() + part]
        return HoledText(tuple(pieces))

    @property
    def is_constant(self) -> bool:
        return len(self.pieces) == 1

    @property
    def names(self) -> tuple[str, ...]:
        return self.pieces[1::2]

    def filled(self, holes: Mapping[str, Any]) -> str:
        if len(self.pieces) == 1:
            return self.pieces[0]
        texts = list(self.pieces)
        for i in range(1, len(texts), 2):
            texts[i] = str(holes[texts[i]])
        return "".join(texts)


@dataclass(frozen=True, slots=True)
class Hole:
    """A value that is a hole as a whole."""

    name: str


class OwnHoles(dict[str, str]):
    """Every hole stands for its own placeholder."""

    def __missing__(self, name: str) -> str:
        return placeholder(name)


def holed(value: Any, what: str) -> Any:
    """What a traced program has made of abstract values, as ``fill`` takes it; lists and dictionaries are copied.

    Raises:
        TraceStop: ``what`` the program does with a value that cannot be made again.
    """
    if isinstance(value, AbstractNumber):
        return Hole(value.name)
    kind = type(value)
    if kind is Abstract or kind is str:
        text = HoledText.of(value)
        if kind is Abstract and text.pieces[::2] == ("", ""):
            return Hole(text.names[0])
        return plain(value) if text.is_constant else text
    if kind is list or kind is tuple:
        return kind(holed(item, what) for item in value)
    if kind is dict and all(type(key) is str for key in value):
        return {key: holed(item, what) for key, item in value.items()}
    if value is None or kind in (bool, int, float):
        return value
    raise TraceStop(f"{what} a value of type {kind.__name__}")


def fill(value: Any, holes: Mapping[str, Any]) -> Any:
    """The value that a row has in the place of what ``holed`` gave."""
    if isinstance(value, Hole):
        return holes[value.name]
    if isinstance(value, HoledText):
        return value.filled(holes)
    if isinstance(value, list):
        return [fill(item, holes) for item in value]
    if isinstance(value, tuple):
        return tuple(fill(item, holes) for item in value)
    if isinstance(value, dict):
        return {key: fill(item, holes) for key, item in value.items()}
    return value
