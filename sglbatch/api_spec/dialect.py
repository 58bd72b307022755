"""The form in which an API is asked: text."""

from __future__ import annotations

from collections.abc import Sequence

from sglbatch.api_spec.bodies import by_chat, messages_of
from sglbatch.api_spec.families import check_question
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.tokens import Counter
from sglbatch.errors import CallError, ConstraintError, SglbatchError
from sglbatch.lang.calls import Choices, ModelCall
from sglbatch.lang.chat import PlainFrames
from sglbatch.lang.dialect import Form
from sglbatch.lang.environment import Environment
from sglbatch.types import Choose, NextAsk, Operation, TextCall, TokenIds


class ApiDialect:
    """Calls as messages or plain text.

    An API puts the chat template around messages itself, so a program's roles add no text of their own here and there
    are no special tokens to guard against.
    """

    def __init__(self, model: ApiModel, counter: Counter) -> None:
        self._model = model
        self._counter = counter

    def environment(self, *, seed: int, parse_special: bool, max_calls: int) -> Environment:
        return Environment(
            seed=seed,
            chat=PlainFrames(),
            specials={},
            eos_token_ids=frozenset(),
            parse_special=parse_special,
            max_calls=max_calls,
            token_text=self._counter.token_text,
        )

    def forms(self, calls: Sequence[ModelCall]) -> list[Form | CallError | ConstraintError]:
        """Raises SglbatchError ``unsupported-by-model``, ``no-endpoint``: all rows would fail alike."""
        return [self._form(call) for call in calls]

    def show(self, ids: TokenIds) -> str:
        return self._counter.show(ids)

    def _form(self, call: ModelCall) -> Form | CallError:
        try:
            text = call.as_text()
        except CallError as error:
            return error
        self._check(call, text)
        prompt_ids = prompt_ids_of(text, self._model, self._counter)
        if not text.messages and not text.prefix.strip():
            return CallError("empty-prompt", "the prompt is empty: add text before the first gen")
        return Form(prompt_ids=prompt_ids, operation=self._operation(call), text=text)

    def _check(self, call: ModelCall, text: TextCall) -> None:
        model = self._model
        asked = [text.question, *(part.question for part in text.following if isinstance(part, NextAsk))]
        for question in asked:
            check_question(question, model.family, model.model, completions=not by_chat(text, model))
        if isinstance(call.question, Choices) and getattr(call.question, "method", "exact") != "exact":
            raise SglbatchError(
                "unsupported-by-model",
                f"{model.model} cannot score choices token by token",
                hint="leave choices_method out",
            )
        if text.chat and not model.family.chat:
            raise SglbatchError(
                "no-endpoint",
                f"{model.model} takes plain text only, and the template uses roles",
                hint="choose a chat model, or write the turns as plain text",
            )

    def _operation(self, call: ModelCall) -> Operation:
        if not isinstance(call.question, Choices):
            return call.question
        ids = [tuple(self._counter.text_ids(choice).tolist()) for choice in call.question.choices]
        return Choose(alternatives=tuple(ids), temperature=call.question.temperature)


def prompt_ids_of(text: TextCall, model: ApiModel, counter: Counter) -> TokenIds:
    """The ids of what is sent for a call by itself."""
    return counter.chat_ids(messages_of(text)) if by_chat(text, model) else counter.text_ids(text.prefix)
