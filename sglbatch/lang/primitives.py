"""What programs write: gen, select, roles, media, reasoning.

Names and arguments are those of SGLang's frontend, so that its programs run with only the import changed.
Every argument is checked here, when the expression is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sglbatch.errors import SglbatchError
from sglbatch.lang.abstract import plain
from sglbatch.lang.choices_methods import method_of
from sglbatch.lang.expressions import (
    AnyOrder,
    Attachment,
    Concat,
    Gen,
    RoleBegin,
    RoleEnd,
    Select,
    Separate,
    atoms,
    check_name,
)
from sglbatch.lang.media import read_media
from sglbatch.lang.reasoning import check_model_type
from sglbatch.lang.sampling import SamplingOverride, patterns, stop_strings, token_ids
from sglbatch.lang.schemas import schema_constraint
from sglbatch.lang.vartypes import DTYPE_REGEX
from sglbatch.types import Constraint, VarType

DTYPE_NAMES: Final = {int: "int", float: "float", bool: "bool", str: "str"}

_NOTHING_TO_A_SELECT: Final = frozenset({"max_tokens", "temperature", "stop"})
"""Arguments of a gen that its ``choices`` may come with: temperature is the select's, the others say nothing there."""


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
    json_schema: Any = None,
) -> Gen | Select:
    """Generate text; ``choices`` makes it a ``select``. None inherits the function's defaults, then the run's.

    Args:
        name: variable that receives the text; None keeps it in the text only.
        min_tokens: nothing ends the text before so many tokens.
        n: answers to draw; above 1 the variable is a list, and the text goes on with the first.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text; they are not part of it.
        stop_regex: patterns of Python's ``re``; the text ends before the first match.
        frequency_penalty, presence_penalty: -2 to 2; taken off the logits of tokens that were generated before, for
            each time or once.
        ignore_eos: go on to max_tokens whatever the model says; a constraint or a stop still ends the text.
        return_logprob: ``get_meta_info(name)`` gets ``output_token_logprobs``: (log-probability, token id, text or
            None) of every generated token, under the model's own distribution.
        logprob_start_len: also ``input_token_logprobs``, from this token of the prompt on.
        top_logprobs_num: also ``output_top_logprobs``: so many of the likeliest tokens in each place.
        return_text_in_logprobs: with the tokens' text.
        dtype: int, float, bool or str (a string in quotes): constrains the text; the variable stays text, its column
            is typed, a str's without the quotes.
        choices_method: see ``select``.
        regex: the whole text must match.
        json_schema: a dict, JSON text, a pydantic model or a type; the text is JSON that satisfies it, and is checked
            again when it is finished. Properties are written in the schema's order. The variable stays text, its
            column has the schema's type.

    Raises:
        SglbatchError: ``invalid-argument``.
    """
    sampling = SamplingOverride(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=stop_strings(stop),
        min_tokens=min_tokens,
        n=n,
        stop_token_ids=token_ids(stop_token_ids),
        stop_regex=patterns(stop_regex),
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
    )
    if choices is not None:
        given = {name: value for name, value in sampling.given().items() if name not in _NOTHING_TO_A_SELECT}
        _exclusive("choices", regex=regex, dtype=dtype, json_schema=json_schema, **given)
        return select(name, choices, 0.0 if temperature is None else temperature, choices_method)
    if choices_method is not None:
        raise SglbatchError("invalid-argument", "choices_method belongs to choices", hint="give choices=[...] too")
    check_name(name)
    constraint, var_type = _constraint(regex, dtype, json_schema)
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
    """Append one of ``choices``: the likeliest, or a sample where ``temperature`` is above 0.

    Args:
        choices_method: ``sgl.exact`` (the default) compares the choices' whole probabilities, and its temperature draws
            among them. ``sgl.token_length_normalized``, ``sgl.greedy_token_selection`` and
            ``sgl.unconditional_likelihood_normalized`` decide as SGLang does, without temperature.

    Raises:
        SglbatchError: ``invalid-argument``.
    """
    method = method_of(choices_method)
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
    if temperature > 0 and method != "exact":
        raise SglbatchError(
            "invalid-argument",
            f"choices_method={method} takes no temperature, not {temperature!r}",
            hint="leave choices_method out to draw from the choices' exact probabilities",
        )
    return Select(name=name, choices=tuple(choices), temperature=float(temperature), method=method)


def _constraint(regex: str | None, dtype: type | str | None, json_schema: Any) -> tuple[Constraint | None, VarType]:
    if json_schema is not None:
        _exclusive("json_schema", regex=regex, dtype=dtype)
        return schema_constraint(json_schema)
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
        "str": VarType(kind="text", quoted=True),
    }
    return Constraint(kind="regex", source=source), kinds[str(name)]


def _exclusive(what: str, **others: object) -> None:
    for name, value in others.items():
        if value is not None:
            raise SglbatchError("invalid-argument", f"{what} and {name} cannot be given together")


# --- media and reasoning -----------------------------------------------------------------------


def image(path: str | Path | bytes) -> Attachment:
    """An image in this place: a file, or its bytes.

    Raises:
        SglbatchError: ``media-not-found``.
    """
    return Attachment(read_media("image", path))


def video(path: str | Path | bytes, num_frames: int) -> Attachment:
    """``num_frames`` frames of a video in this place.

    Raises:
        SglbatchError: ``media-not-found``, ``invalid-argument``.
    """
    if not isinstance(num_frames, int) or num_frames < 1:
        raise SglbatchError("invalid-argument", f"num_frames must be a whole number above 0, not {num_frames!r}")
    return Attachment(read_media("video", path, num_frames=num_frames))


def separate_reasoning(expr: object = None, model_type: str | None = None) -> Concat:
    """Gens of a model that thinks aloud: each variable keeps the answer, NAME_reasoning_content gets the reasoning.

    The reasoning is taken out of the text too, so what follows does not see it.

    Args:
        model_type: which marks surround the reasoning, see ``reasoning.MARKS``.

    Raises:
        SglbatchError: ``invalid-argument``.
    """
    marks = check_model_type(model_type)
    items = []
    for item in atoms(expr):
        items.append(item)
        if isinstance(item, (Gen, Select)):
            if item.name is None:
                raise SglbatchError("invalid-argument", "separate_reasoning needs gens with names")
            items.append(Separate(item.name, marks))
    return Concat(tuple(items))


def any_order(**parts: str) -> AnyOrder:
    """Texts, named by their columns, that mean the same in any order. They stand as they are written here unless a run
    says ``--reorder``; ``plan`` says which order shares most.
    """
    for name, text in parts.items():
        if not isinstance(text, str):
            raise SglbatchError("not-text", f"any_order({name}=...) takes text, not {type(text).__name__}")
    return AnyOrder(tuple((name, plain(text)) for name, text in parts.items()))


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
