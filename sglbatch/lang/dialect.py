"""How calls are put to a backend: what a program asks for, in the form that the backend takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sglbatch.errors import CallError, ConstraintError
from sglbatch.lang.calls import Choices, ModelCall
from sglbatch.lang.choices import choice_prompts, split_choices
from sglbatch.lang.environment import Environment, LanguageBackend, LanguageTokenizer
from sglbatch.types import Operation, Prompt, TextCall, TokenIds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Form:
    """A call in a backend's form.

    Args:
        prompt_ids: int32 [prompt_len]: what the call is ordered and counted by, and what the local engine runs.
        operation: what is done there; the ids of its alternatives are of the same vocabulary.
        text: the call as text, where the backend takes that; its identity is then the text's, not the ids'.
    """

    prompt_ids: TokenIds
    operation: Operation
    text: TextCall | None = None


class Dialect(Protocol):
    """Puts calls into a backend's form."""

    def environment(self, *, seed: int, parse_special: bool, max_calls: int) -> Environment:
        """What the programs of a run share."""

    def forms(self, calls: Sequence[ModelCall]) -> list[Form | CallError | ConstraintError]:
        """Each call's form, or why it cannot be asked."""

    def show(self, ids: TokenIds) -> str:
        """A prompt, or a part of one, as text for people."""


class TokenDialect:
    """Calls as token ids: the local engine's form.

    Args:
        context_len: tokens; a prompt that leaves no room for an answer fails.
    """

    def __init__(self, tokenizer: LanguageTokenizer, *, context_len: int) -> None:
        self._tokenizer = tokenizer
        self._context_len = context_len
        self._special_texts = {token_id: text.encode() for text, token_id in tokenizer.specials.items()}

    def environment(self, *, seed: int, parse_special: bool, max_calls: int) -> Environment:
        return Environment.of(self._tokenizer, seed=seed, parse_special=parse_special, max_calls=max_calls)

    def forms(self, calls: Sequence[ModelCall]) -> list[Form | CallError | ConstraintError]:
        prompts = [_prompts(call) for call in calls]
        encoded = self._tokenizer.encode_prompts([prompt for group in prompts for prompt in group])
        forms: list[Form | CallError | ConstraintError] = []
        start = 0
        for call, group in zip(calls, prompts, strict=True):
            ids = encoded[start : start + len(group)]
            start += len(group)
            try:
                forms.append(self._form(call, ids))
            except (CallError, ConstraintError) as error:
                forms.append(error)
        return forms

    def show(self, ids: TokenIds) -> str:
        """Token ids as text, special tokens shown."""
        pieces = (self._special_texts.get(i) or self._tokenizer.token_bytes[i] for i in ids.tolist())
        return b"".join(pieces).decode("utf-8", "replace")

    def _form(self, call: ModelCall, ids: Sequence[TokenIds]) -> Form:
        operation: Operation
        if isinstance(call.question, Choices):
            tokenizer = self._tokenizer
            prompt_ids, choose = split_choices(ids, call.question, tokenizer.token_bytes, tokenizer.specials)
            operation = choose
            needed = len(prompt_ids) + max(len(alternative) for alternative in choose.alternatives)
        else:
            prompt_ids, operation = ids[0], call.question
            needed = len(prompt_ids) + 1
        if not len(prompt_ids):
            raise CallError("empty-prompt", "the prompt is empty: add text before the first gen")
        if needed > self._context_len:
            raise CallError(
                "prompt-too-long",
                f"the prompt has {len(prompt_ids)} tokens, the model's context holds {self._context_len}",
            )
        return Form(prompt_ids=prompt_ids, operation=operation)


@runtime_checkable
class BringsDialect(Protocol):
    """A backend that is not asked in token ids."""

    @property
    def dialect(self) -> Dialect: ...


def dialect_of(backend: LanguageBackend) -> Dialect:
    """How programs that run on a backend by themselves put their calls to it."""
    if isinstance(backend, BringsDialect):
        return backend.dialect
    return TokenDialect(backend.tokenizer, context_len=backend.context_len)


def environment_of(backend: LanguageBackend) -> Environment:
    """What programs that run on a backend by themselves share."""
    return dialect_of(backend).environment(seed=0, parse_special=False, max_calls=1000)


def _prompts(call: ModelCall) -> list[Prompt]:
    if isinstance(call.question, Choices):
        return choice_prompts(call.prompt, call.question)
    return [call.prompt]
