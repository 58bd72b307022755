"""A call as messages and text, for a backend that takes no token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sglbatch.errors import CallError
from sglbatch.lang.branch_text import BranchText
from sglbatch.lang.calls import Choices
from sglbatch.lang.guard import strip_guard
from sglbatch.lang.operations import Append, Ask, Assign, Operation
from sglbatch.types import Generate, NextAsk, TextCall, TextChoices


def text_call(text: BranchText, ask: Ask, queue: Iterable[Operation], *, ahead_tokens: int | None) -> TextCall:
    """The call with what the template has behind it.

    Args:
        text: up to the call.
        queue: what follows the call on its branch.

    Raises:
        CallError: ``text-outside-messages``.
    """
    messages = _messages(text)
    chat = bool(messages)
    if chat and text.messages[-1].end is not None:
        raise CallError(
            "text-outside-messages",
            "a chat model answers inside a message: this gen or select is outside of one",
            hint='s += sgl.assistant(sgl.gen("answer"))',
        )
    return TextCall(
        chat=chat,
        messages=tuple(messages[:-1]),
        prefix=messages[-1][1] if chat else text.plain(),
        name=ask.name or "",
        question=_question(ask.question),
        following=_behind(queue) if ask.n == 1 else (),
        ahead_tokens=ahead_tokens,
    )


def _messages(text: BranchText) -> list[tuple[str, str]]:
    """(role, content) of each message."""
    messages: list[tuple[str, str]] = []
    end = 0
    for message in text.messages:
        outside = text.plain(end, message.start)
        end = len(text.pieces) if message.end is None else message.end
        if outside.strip():
            raise CallError(
                "text-outside-messages",
                f"a chat model cannot be given text outside of messages: {outside.strip()[:40]!r}",
                hint="put it into sgl.system(...), sgl.user(...) or sgl.assistant(...)",
            )
        messages.append((message.role, text.plain(message.start, end)))
    return messages


def _behind(queue: Iterable[Operation]) -> tuple[str | NextAsk, ...]:
    """What is queued behind a call, up to the end of the message, a branch or a join."""
    behind: list[str | NextAsk] = []
    for operation in queue:
        if isinstance(operation, Append):
            behind.append(strip_guard(operation.text.text))
        elif isinstance(operation, Ask) and operation.n == 1:
            behind.append(NextAsk(name=operation.name or "", question=_question(operation.question)))
        elif not isinstance(operation, Assign):
            break
    return tuple(behind)


def _question(question: Generate | Choices) -> Generate | TextChoices:
    if isinstance(question, Generate):
        return replace(question, exact_choices=False)  # an endpoint decides as it does
    return TextChoices(choices=tuple(map(str, strip_guard(question.choices))), temperature=question.temperature)
