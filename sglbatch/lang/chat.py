"""A model's chat template as constant text around messages whose content is not known yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn, Protocol

from jinja2 import TemplateError as JinjaError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglbatch.errors import SglbatchError
from sglbatch.lang.expressions import TemplateError

_PLACEHOLDER: Final = "\ue0f1{}\ue0f2"
"""Stands for a message's content; private-use characters that no template looks for."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The text before and after one message's content."""

    prefix: str
    suffix: str


class ChatTemplate:
    """Renders the frames of messages from the model's own jinja template.

    The template is rendered with placeholders as contents and cut at them, so the text between two contents is
    exactly what the model was trained with. Source: the Hugging Face chat template conventions (``messages``,
    ``add_generation_prompt``, ``bos_token``, ``eos_token``, ``raise_exception``, ``strftime_now``).
    """

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.frame = lru_cache(maxsize=1024)(self._frame)

    def _frame(self, roles: tuple[str, ...]) -> Frame:
        """The frame of the last of ``roles``, after messages of the others.

        The prefix of the first message holds everything before it, a default system prompt included.

        Raises:
            TemplateError: ``no-chat-template``; ``chat-template`` where the template cannot be used turn by turn.
            SglbatchError: ``chat-roles`` where the template refuses this order of roles.
        """
        whole = self._render(roles)
        before = self._render(roles[:-1]) if len(roles) > 1 else ""
        start, end = _span(whole, len(roles) - 1)
        if not whole.startswith(before) or start < len(before):
            raise TemplateError(
                "chat-template",
                f"the model's chat template changes earlier messages when {_listed(roles)} follow one another",
                hint="write this model's turns as plain text, or put everything into one user message",
            )
        prefix = whole[len(before) : start]
        if roles[-1] == "assistant" and len(roles) > 1:
            prefix = self._generation_prefix(roles[:-1], before, prefix)
        return Frame(prefix, whole[end:])

    def _generation_prefix(self, roles: tuple[str, ...], before: str, prefix: str) -> str:
        """What the template puts before an answer that is to be generated, where its history has the same."""
        asked = self._render(roles, add_generation_prompt=True)
        generation = asked[len(before) :] if asked.startswith(before) else ""
        return generation if generation and prefix.startswith(generation) else prefix

    def _render(self, roles: tuple[str, ...], *, add_generation_prompt: bool = False) -> str:
        messages = [{"role": role, "content": _PLACEHOLDER.format(i)} for i, role in enumerate(roles)]
        try:
            rendered = self._template().render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._tokens
            )
            return str(rendered)
        except JinjaError as error:
            raise SglbatchError(
                "chat-roles", f"the model's chat template refuses the roles {_listed(roles)}: {error}"
            ) from error

    def _template(self) -> Any:
        if self._source is None:
            raise TemplateError(
                "no-chat-template",
                "the template uses roles, but the model has no chat template",
                hint="choose an instruction-tuned model, or write the turns as plain text",
            )
        return _compiled(self._source)


class Frames(Protocol):
    """What stands around messages."""

    @property
    def frame(self) -> Callable[[tuple[str, ...]], Frame]:
        """The frame of the last of these roles, after messages of the others."""


class PlainFrames:
    """For backends that take messages as such: nothing but a line break after each, for people who read the text."""

    def frame(self, roles: tuple[str, ...]) -> Frame:
        return Frame("", "\n")


def turn_end(suffix: str, specials: Mapping[str, int]) -> str | None:
    """The special token with which a message's suffix begins, or None."""
    found = [token for token in specials if suffix.startswith(token)]
    return max(found, key=len, default=None)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _span(rendered: str, index: int) -> tuple[int, int]:
    placeholder = _PLACEHOLDER.format(index)
    start = rendered.find(placeholder)
    if start < 0 or rendered.count(placeholder) > 1:
        raise TemplateError(
            "chat-template",
            "the model's chat template does not show every message's content exactly once",
            hint="write this model's turns as plain text",
        )
    return start, start + len(placeholder)


def _listed(roles: tuple[str, ...]) -> str:
    return ", ".join(roles)
