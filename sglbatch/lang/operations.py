"""What waits in a stream's queue: a program's expressions, resolved, in the order in which they were added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sglbatch.lang.calls import Choices
from sglbatch.lang.media import Media
from sglbatch.types import Generate, Text, VarType

if TYPE_CHECKING:
    from sglbatch.lang.stream import Stream

JoinMode: TypeAlias = Literal["gather_variable", "concate_and_append"]


@dataclass(frozen=True, slots=True)
class Append:
    """Constant text. ``turn``: how often the program had read something when it was added."""

    text: Text
    turn: int


@dataclass(frozen=True, slots=True)
class Attach:
    """An image or video."""

    media: Media


@dataclass(frozen=True, slots=True)
class Mark:
    """A message's content begins (a role) or ends (None) here."""

    role: str | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ask:
    """A gen or a select.

    Args:
        index: its place among the stream's calls and forks.
        n: answers to draw, each a call of its own.
        with_text: log-probabilities come with the text of their tokens.
    """

    index: int
    turn: int
    name: str | None
    question: Generate | Choices
    var_type: VarType
    n: int = 1
    with_text: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Assign:
    """``s[name] = value`` behind operations that may set the same name."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class OpenScope:
    """The text from here on becomes a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class CloseScope:
    """The scope's text is complete: the variable is set."""

    name: str


@dataclass(frozen=True, slots=True)
class SplitReasoning:
    """The variable that was set last is split into its reasoning and its answer."""

    name: str
    model_type: str


@dataclass(frozen=True, slots=True)
class OrderFree:
    """The texts of these names follow, in an order that does not matter."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    children: tuple[Stream, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    children: tuple[Stream, ...]
    mode: JoinMode


Operation: TypeAlias = (
    Append | Attach | Mark | Ask | Assign | OpenScope | CloseScope | SplitReasoning | OrderFree | Fork | Join
)


def names_set(operation: Operation) -> tuple[str, ...]:
    """The variables that an operation will set, joins aside."""
    match operation:
        case Ask(name=name):
            return () if name is None else (name,)
        case Assign(name=name) | CloseScope(name=name):
            return (name,)
        case SplitReasoning(name=name):
            return (name, reasoning_name(name))
        case _:
            return ()


def reasoning_name(name: str) -> str:
    """The variable that holds the reasoning of ``name``."""
    return f"{name}_reasoning_content"
