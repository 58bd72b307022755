"""What a program adds to its state: single expressions, and their concatenation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from sglbatch.errors import SglbatchError
from sglbatch.lang.abstract import plain
from sglbatch.lang.media import Media
from sglbatch.lang.sampling import SamplingOverride
from sglbatch.types import ChoicesMethod, Constraint, VarType

RESERVED_NAMES: Final = frozenset({"_error", "_usage", "_finish", "_return"})
"""Columns of the output that are ours."""


class TemplateError(SglbatchError):
    """A mistake in the template itself: every row would fail alike, so it ends the job before it starts."""


class Expr:
    """Anything that can be added to a state; ``+`` puts two after each other."""

    __slots__ = ()

    def __add__(self, other: object) -> Concat:
        return concatenate(self, other)

    def __radd__(self, other: object) -> Concat:
        return concatenate(other, self)


@dataclass(frozen=True, slots=True)
class Constant(Expr):
    """Text of the author's, put into the prompt as it is."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gen(Expr):
    """Generate text into the variable ``name`` (None: into the text only)."""

    name: str | None
    sampling: SamplingOverride
    constraint: Constraint | None
    var_type: VarType


@dataclass(frozen=True, kw_only=True, slots=True)
class Select(Expr):
    """Append the best (or, with a temperature, a sampled) choice."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float
    method: ChoicesMethod


@dataclass(frozen=True, slots=True)
class Attachment(Expr):
    """An image or a video in this place."""

    media: Media


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """Opens a message; the chat template says with which text."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """Closes the open message."""

    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """From here the text belongs to the variable too, until its ScopeEnd."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    """The variable is the text since its ScopeBegin."""

    name: str


@dataclass(frozen=True, slots=True)
class Separate(Expr):
    """Takes the reasoning out of a variable that was just generated; see ``primitives.separate_reasoning``."""

    name: str
    model_type: str


@dataclass(frozen=True, slots=True)
class AnyOrder(Expr):
    """Texts by name, whose order does not matter."""

    parts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Concat(Expr):
    """Expressions one after the other."""

    items: tuple[Atom, ...]


Atom: TypeAlias = (
    Constant | Gen | Select | Attachment | RoleBegin | RoleEnd | ScopeBegin | ScopeEnd | Separate | AnyOrder
)
_ATOMS: Final = (Constant, Gen, Select, Attachment, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Separate, AnyOrder)


def atoms(value: object) -> tuple[Atom, ...]:
    """What can be added to a state, as single expressions in order.

    Raises:
        SglbatchError: ``null-text`` for None, ``not-text`` for anything else that is no text.
    """
    if isinstance(value, Concat):
        return value.items
    if isinstance(value, _ATOMS):
        return (value,)
    if isinstance(value, str):
        return (Constant(plain(value)),)
    if value is None:
        raise SglbatchError("null-text", "None was added to the text", hint="test the value before adding it")
    raise SglbatchError(
        "not-text",
        f"a value of type {type(value).__name__} was added to the text",
        hint="turn it into text with str(...) or an f-string",
    )


def concatenate(left: object, right: object) -> Concat:
    return Concat(atoms(left) + atoms(right))


def check_name(name: str | None) -> None:
    """A variable's name must be a non-empty string and no column of ours."""
    if name is None:
        return
    if not isinstance(name, str) or not name:
        raise SglbatchError("invalid-argument", f"a variable's name must be a non-empty string, not {name!r}")
    if name in RESERVED_NAMES:
        raise TemplateError(
            "reserved-name",
            f"the variable name {name!r} is taken by a column of the output",
            hint=f"call it {name.lstrip('_')!r}",
        )
