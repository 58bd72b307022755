"""What the families of models differ in: one table, looked up by the model's name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from sglbatch.errors import SglbatchError
from sglbatch.types import Generate, TextChoices


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models that take the same arguments.

    Args:
        chat, completions: the endpoints that serve them.
        max_tokens_field: the argument that bounds an answer.
        num_stops: how many stop strings a request takes; others are cut off the answer here.
        sampling: temperature, top_p and penalties are taken.
        extra_sampling: top_k and min_p are taken (the open servers).
        schema: answers can be held to a JSON schema.
        hidden_tokens: room for tokens that are generated, billed and not shown, beyond an answer's own.
        num_top_logprobs: how many of the likeliest tokens in a place the chat endpoint names; 0: it names none.
        num_completion_logprobs: the same of the completions endpoint.
        schema_in_prompt: a schema is billed as part of the prompt, in a form that is not published.
        encoding: the tokenizer's name, where it is known.
        known_framing: what goes around its messages is published.
    """

    name: str
    pattern: str
    chat: bool = True
    completions: bool = False
    max_tokens_field: str = "max_tokens"
    num_stops: int = 4
    sampling: bool = True
    extra_sampling: bool = False
    schema: bool = True
    hidden_tokens: int = 0
    num_top_logprobs: int = 20
    num_completion_logprobs: int = 0
    schema_in_prompt: bool = True
    encoding: str | None = None
    known_framing: bool = True


FAMILIES: Final = (
    Family(
        name="reasoning",
        pattern=r"(gpt-5(?!.*chat)|o[1-9])",
        max_tokens_field="max_completion_tokens",
        num_stops=0,
        sampling=False,
        hidden_tokens=4096,
        num_top_logprobs=0,
        encoding="o200k",
        known_framing=False,
    ),
    Family(
        name="instruct",
        pattern=r"(gpt-3\.5-turbo-instruct|davinci-002|babbage-002)",
        chat=False,
        completions=True,
        schema=False,
        num_top_logprobs=0,
        num_completion_logprobs=5,
        encoding="cl100k",
    ),
    Family(name="gpt-3.5 and gpt-4", pattern=r"(gpt-3\.5|gpt-4(?!o|\.))", schema=False, encoding="cl100k"),
    Family(name="gpt", pattern=r"(gpt-|chatgpt)", max_tokens_field="max_completion_tokens", encoding="o200k"),
)

OPEN_SERVER: Final = Family(
    name="open server",
    pattern="",
    completions=True,
    extra_sampling=True,
    num_completion_logprobs=20,
    schema_in_prompt=False,
)
"""vLLM, SGLang, llama.cpp and others that serve any model: both endpoints, all of the sampling arguments."""


def family_of(model: str, *, own_endpoint: bool) -> Family:
    """The family of an OpenAI model, or of whatever a server at another address serves.

    Raises:
        SglbatchError: ``unknown-api-model`` for a name that no family of OpenAI's own has.
    """
    if own_endpoint:
        return OPEN_SERVER
    for family in FAMILIES:
        if re.match(family.pattern, model.removeprefix("ft:")):
            return family
    raise SglbatchError(
        "unknown-api-model",
        f"OpenAI's models are not called like {model!r}",
        hint=f"check the name; for another server's model: --model openai/{model} --base-url http://HOST:PORT/v1",
    )


def check_question(question: Generate | TextChoices, family: Family, model: str, *, completions: bool = False) -> None:
    """Raises SglbatchError ``unsupported-by-model`` for an argument that the model cannot honour.

    Args:
        completions: it is asked on the completions endpoint.
    """
    for name, value in _refused(question, family, completions=completions):
        raise SglbatchError(
            "unsupported-by-model",
            f"{model} cannot honour {name}={value!r}",
            hint=_hint(name, question, _num_logprobs(family, completions=completions)),
        )


def _num_logprobs(family: Family, *, completions: bool) -> int:
    return family.num_completion_logprobs if completions else family.num_top_logprobs


def _refused(question: Generate | TextChoices, family: Family, *, completions: bool) -> list[tuple[str, object]]:
    if isinstance(question, TextChoices):
        given: list[tuple[str, object]] = [("temperature", question.temperature)]
        return [] if family.sampling or question.temperature in (0, 1) else given
    refused: list[tuple[str, object]] = []
    if not family.sampling:
        neutral = {"temperature": 1.0, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
        refused += [
            (name, getattr(question, name)) for name, value in neutral.items() if getattr(question, name) != value
        ]
    if not family.extra_sampling:
        refused += [("top_k", question.top_k)] if question.top_k > 0 else []
        refused += [("min_p", question.min_p)] if question.min_p > 0 else []
    unknown = {
        "min_tokens": 0,
        "stop_token_ids": (),
        "ignore_eos": False,
    }
    refused += [(n, getattr(question, n)) for n, value in unknown.items() if getattr(question, n) != value]
    return refused + _refused_logprobs(question, _num_logprobs(family, completions=completions))


def _refused_logprobs(question: Generate, most: int) -> list[tuple[str, object]]:
    """The answer to a form may come inside an object, whose tokens are not the value's."""
    if question.input_logprobs_from is not None:
        return [("logprob_start_len", question.input_logprobs_from)]
    if question.num_top_logprobs is None:
        return []
    if not most or question.constraint is not None:
        return [("return_logprob", True)]
    return [("top_logprobs_num", question.num_top_logprobs)] if question.num_top_logprobs > most else []


def _hint(name: str, question: Generate | TextChoices, num_logprobs: int) -> str:
    if name == "top_logprobs_num":
        return f"it names {num_logprobs} at the most"
    if name == "return_logprob" and num_logprobs and isinstance(question, Generate) and question.constraint is not None:
        return "leave return_logprob out, or ask for free text: an endpoint's tokens are not those of a form's value"
    if name == "temperature":
        return "give --temperature 1, or take temperature out of the template: this model samples at 1 only"
    return f"leave {name} out"
