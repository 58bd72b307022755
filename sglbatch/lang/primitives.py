"""The expressions a program adds to its state: gen, select, roles, constants, and their concatenation.

Names and arguments are those of SGLang's frontend, so that its programs run with only the import changed.
Every argument is checked here, when the expression is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sglbatch.errors import SglbatchError
from sglbatch.lang.sampling import SamplingOverride, stop_strings
from sglbatch.lang.vartypes import DTYPE_REGEX
from sglbatch.types import Constraint, VarType

RESERVED_NAMES: Final = frozenset({"_error", "_usage", "_finish", "_return"})
"""Columns of the output that are ours."""

DTYPE_NAMES: Final = {int: "int", float: "float", bool: "bool", str: "str"}


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
    """Append the likeliest (or, with a temperature, a sampled) choice."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """Opens a message; the chat template says with which text."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """Closes the open message."""

    role: str


@dataclass(frozen=True, slots=True)
class Concat(Expr):
    """Expressions one after the other."""

    items: tuple[Atom, ...]


Atom: TypeAlias = Constant | Gen | Select | RoleBegin | RoleEnd


def atoms(value: object) -> tuple[Atom, ...]:
    """What can be added to a state, as single expressions in order.

    Raises:
        SglbatchError: ``null-text`` for None, ``not-text`` for anything else that is no text.
    """
    if isinstance(value, Concat):
        return value.items
    if isinstance(value, (Constant, Gen, Select, RoleBegin, RoleEnd)):
        return (value,)
    if isinstance(value, str):
        return (Constant(value),)
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


def gen(  # noqa: PLR0917  the language's own order
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: object = None,
    regex: str | None = None,
    json_schema: str | None = None,
) -> Gen | Select:
    """Generate text; ``choices`` makes it a ``select``. None inherits the function's defaults, then the run's.

    Args:
        name: variable that receives the text; None keeps it in the text only.
        stop: strings that end the text; they are not part of it.
        dtype: int, float, bool or str (quoted): constrains the text; the variable stays text, its column is typed.
        regex: the whole text must match.

    Raises:
        SglbatchError: ``unsupported-argument`` or ``invalid-argument``.
    """
    _refuse(
        min_tokens=min_tokens,
        n=None if n == 1 else n,
        stop_token_ids=stop_token_ids,
        stop_regex=stop_regex,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
        json_schema=json_schema,
    )
    sampling = SamplingOverride(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=stop_strings(stop),
    )
    if choices is not None:
        _exclusive("choices", regex=regex, dtype=dtype, top_p=top_p, top_k=top_k, min_p=min_p)
        return select(name, choices, 0.0 if temperature is None else temperature, choices_method)
    _refuse(choices_method=choices_method)
    check_name(name)
    constraint, var_type = _constraint(regex, dtype)
    return Gen(name=name, sampling=sampling, constraint=constraint, var_type=var_type)


def gen_int(name: str | None = None, **options: Any) -> Gen | Select:
    """``gen`` of an integer."""
    return gen(name, dtype=int, **options)


def gen_string(name: str | None = None, **options: Any) -> Gen | Select:
    """``gen`` of a quoted string."""
    return gen(name, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: object = None,
) -> Select:
    """Append one of ``choices``, scored exactly: the likeliest, or a sample where ``temperature`` is above 0.

    Raises:
        SglbatchError: ``invalid-argument``; ``unsupported-argument`` for a choices_method other than "exact".
    """
    _refuse(choices_method=None if choices_method == "exact" else choices_method)
    check_name(name)
    if choices is None or isinstance(choices, str) or not choices:
        raise SglbatchError(
            "invalid-argument",
            f"choices must be a non-empty list of strings, not {choices!r}",
            hint='select("answer", choices=["yes", "no"])',
        )
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise SglbatchError(
                "invalid-argument",
                f"every choice must be a non-empty string, not {choice!r}",
                hint="turn values into text with str(...)",
            )
    repeated = next((choice for i, choice in enumerate(choices) if choice in choices[:i]), None)
    if repeated is not None:
        raise SglbatchError("invalid-argument", f"the choice {repeated!r} is listed twice")
    SamplingOverride(temperature=temperature)
    return Select(name=name, choices=tuple(choices), temperature=float(temperature))


def _constraint(regex: str | None, dtype: type | str | None) -> tuple[Constraint | None, VarType]:
    if dtype is None and regex is None:
        return None, VarType(kind="text")
    if regex is not None:
        _exclusive("regex", dtype=dtype)
        if not isinstance(regex, str) or not regex:
            raise SglbatchError("invalid-argument", f"regex must be a non-empty pattern, not {regex!r}")
        return Constraint(kind="regex", source=regex), VarType(kind="text")
    name = DTYPE_NAMES.get(dtype, dtype) if isinstance(dtype, type) else dtype
    source = DTYPE_REGEX.get(name) if isinstance(name, str) else None
    if source is None:
        raise SglbatchError("invalid-argument", f"dtype must be int, float, bool or str, not {dtype!r}")
    kinds: dict[str, VarType] = {
        "int": VarType(kind="int"),
        "float": VarType(kind="float"),
        "bool": VarType(kind="bool"),
        "str": VarType(kind="text"),
    }
    return Constraint(kind="regex", source=source), kinds[str(name)]


def _exclusive(what: str, **others: object) -> None:
    for name, value in others.items():
        if value is not None:
            raise SglbatchError("invalid-argument", f"{what} and {name} cannot be given together")


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise TemplateError(
                "unsupported-argument", f"the argument {name}={value!r} is not supported", hint=f"leave {name} out"
            )


# --- roles -------------------------------------------------------------------------------------


def role(name: str, content: object = None) -> Concat:
    """A whole message."""
    inner = () if content is None else atoms(content)
    return Concat((RoleBegin(name), *inner, RoleEnd(name)))


def system(content: object = None) -> Concat:
    return role("system", content)


def user(content: object = None) -> Concat:
    return role("user", content)


def assistant(content: object = None) -> Concat:
    return role("assistant", content)


def system_begin() -> RoleBegin:
    return RoleBegin("system")


def system_end() -> RoleEnd:
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    return RoleBegin("user")


def user_end() -> RoleEnd:
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    return RoleEnd("assistant")
