"""What all programs of a run share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sglbatch.lang.chat import ChatTemplate, Frames
from sglbatch.types import Backend, Prompt, Result, TokenIds


class LanguageTokenizer(Protocol):
    """The part of a tokenizer that programs need; ``sglbatch.tokenizer.Tokenizer`` has it."""

    @property
    def specials(self) -> Mapping[str, int]: ...

    @property
    def eos_token_ids(self) -> Collection[int]: ...

    @property
    def token_bytes(self) -> Any:
        """Per id, the bytes it stands for in running text; b"" for special tokens."""

    @property
    def bos_ids(self) -> tuple[int, ...]: ...

    @property
    def bos_token(self) -> str: ...

    @property
    def eos_token(self) -> str: ...

    @property
    def chat_template(self) -> str | None: ...

    def encode_prompts(self, prompts: list[Prompt]) -> list[TokenIds]: ...


@runtime_checkable
class TellsPartialTexts(Protocol):
    """A backend whose answers can be read while they grow."""

    def partial_texts(self) -> Mapping[int, str]:
        """By request id."""


@runtime_checkable
class RunsSlabs(Protocol):
    """A backend that can run the beginning of a plan while it does not know the rest."""

    @property
    def num_waiting(self) -> int:
        """Requests that have been submitted and not begun."""

    def expect_more(self, more: bool) -> None:
        """Whether more requests of the plan will come: what they may share with the last one is kept."""


@runtime_checkable
class KeepsAnswers(Protocol):
    """A backend that may have answers which it has not handed on when a run ends early."""

    def drain(self, seconds: float) -> list[Result]:
        """These answers, and those of calls that are paid for as far as they come within so many seconds."""


class LanguageBackend(Backend, Protocol):
    """A backend that programs can run on by themselves: it brings its tokenizer."""

    @property
    def tokenizer(self) -> LanguageTokenizer: ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Args:
    seed: of the job; every call's random numbers derive from it.
    specials: special-token text -> id.
    parse_special: row values may make special tokens (no guard).
    max_calls: calls that one row may make.
    token_text: the text of a token id.
    takes_media: the backend takes images and videos.
    reorder: names of ``any_order`` texts that come first, in this order.
    """

    seed: int
    chat: Frames
    specials: Mapping[str, int]
    eos_token_ids: frozenset[int]
    parse_special: bool = False
    max_calls: int = 1000
    token_text: Callable[[int], str] = str
    takes_media: bool = False
    reorder: tuple[str, ...] = ()

    @staticmethod
    def of(tokenizer: LanguageTokenizer, *, seed: int, parse_special: bool, max_calls: int) -> Environment:
        return Environment(
            seed=seed,
            chat=ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token),
            specials=tokenizer.specials,
            eos_token_ids=frozenset(tokenizer.eos_token_ids),
            parse_special=parse_special,
            max_calls=max_calls,
            token_text=_token_texts(tokenizer),
        )


def _token_texts(tokenizer: LanguageTokenizer) -> Callable[[int], str]:
    specials = {token_id: text for text, token_id in tokenizer.specials.items()}
    return lambda token_id: specials.get(token_id) or tokenizer.token_bytes[token_id].decode("utf-8", "replace")
