"""The questions a program asks and the answers it gets, before and after tokenisation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Protocol, TypeAlias

from sglbatch.errors import CallError
from sglbatch.types import (
    CallPath,
    ChoicesMethod,
    ErrorInfo,
    Generate,
    Operation,
    Prompt,
    Result,
    Text,
    TextCall,
    TextChoices,
    TokenIds,
)

_KEY_VERSION: Final = 1
_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_LATER_PARAMETERS: Final = frozenset(
    {
        "min_tokens",
        "stop_token_ids",
        "stop_regex",
        "frequency_penalty",
        "presence_penalty",
        "ignore_eos",
        "num_top_logprobs",
        "input_logprobs_from",
        "method",
        "healed_lens",
        "complete",
        "exact_choices",
    }
)
"""Parameters that are part of a key only where they are set: calls that do not use them keep the keys that they had
before there were such parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """A select before tokenisation. ``following`` is the constant text right after the chosen one."""

    choices: tuple[str, ...]
    temperature: float
    specials: frozenset[str]
    following: tuple[Text, ...] = ()
    method: ChoicesMethod = "exact"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelCall:
    """A gen or select that a stream has reached.

    Args:
        name: the variable, or "" when the answer goes into the text only.
        position: plan position inherited from the stream's last call; None before the first planned one.
        as_text: the call as text; to be read before the call is answered.
        known: the answer, where an earlier call's generation went on into this one.
    """

    path: CallPath
    name: str
    prompt: Prompt
    question: Generate | Choices
    position: int | None
    as_text: Callable[[], TextCall]
    known: Result | None = None

    @property
    def order_text(self) -> str:
        """The prompt as one text, to order calls by before they are tokenised; fixed ids are spelled out."""
        return "".join([segment.text if isinstance(segment, Text) else str(segment.ids) for segment in self.prompt])


@dataclass(frozen=True, slots=True, eq=False)
class OutsideCall:
    """A ``sgl.call``: outside Python that the program waits for."""

    path: CallPath
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout_s: float


Call: TypeAlias = ModelCall | OutsideCall


@dataclass(frozen=True, slots=True)
class OutsideAnswer:
    """What an outside call returned (a JSON value), or why it failed."""

    value: Any = None
    error: ErrorInfo | None = None


Answer: TypeAlias = Result | OutsideAnswer


class ProgramError(CallError):
    """A failed call as the program meets it; ``info`` is what the row's ``_error`` would say."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.code, info.message, where=info.call)
        self.info = info


class CallMemo(Protocol):
    """Answers of earlier runs by call key; the values are JSON."""

    def get(self, key: str) -> dict[str, Any] | None: ...

    def put(self, key: str, value: dict[str, Any]) -> None: ...


@dataclass(kw_only=True, slots=True, eq=False)
class PendingCall:
    """One distinct question to the model, waiting for its answer.

    Args:
        key: content hash; equal keys have equal answers.
        path, name: of the first program that asked.
        program_ids: every program that waits for the answer.
        position: plan position, where one is known.
        follow_up: it came out of an earlier call's answer.
        decode: ids to text, special tokens shown.
        text: the call as text, where the backend takes that.
        same_following: for each waiter, whether the template goes on for it as it does for ``text``.
    """

    key: str
    prompt_ids: TokenIds
    operation: Operation
    path: CallPath
    name: str
    seed: int
    keep: bool = False
    position: int | None = None
    follow_up: bool = False
    program_ids: list[int] = field(default_factory=list)
    waiters: list[tuple[int, CallPath]] = field(default_factory=list)
    decode: Callable[[TokenIds], str]
    text: TextCall | None = None
    same_following: list[bool] = field(default_factory=list)

    def add(self, program_id: int, call: ModelCall, *, keep: bool, text: TextCall | None = None) -> None:
        """One more program that waits for the answer. ``keep``: see ``types.Request``."""
        if program_id not in self.program_ids:
            self.program_ids.append(program_id)
        self.waiters.append((program_id, call.path))
        self.same_following.append(self.text is None or text is None or text.following == self.text.following)
        self.keep = self.keep or keep
        known = [position for position in (self.position, call.position) if position is not None]
        self.position = min(known, default=None)

    @property
    def prompt_text(self) -> str:
        """The prompt as text, special tokens shown."""
        return self.decode(self.prompt_ids)


def call_key(
    *,
    model_identity: str,
    prompt_ids: TokenIds,
    operation: Operation,
    seed_material: tuple[Any, ...] | None,
    text: TextCall | None = None,
) -> str:
    """The content hash of a model call. ``seed_material`` is None for greedy calls: no chance is in their answers.

    Args:
        text: where the call is asked as text, it is the text that counts, whatever the ids are.
    """
    kind = "gen" if isinstance(operation, Generate) else "choose"
    if text is not None:
        asked = [text.chat, text.messages, text.prefix, _parameters(text.question)]
        return blake2b(
            canonical_json([_KEY_VERSION, model_identity, f"text {kind}", asked, seed_material]).encode(),
            digest_size=16,
        ).hexdigest()
    if seed_material is None:
        digest = _greedy_head(model_identity, kind, operation).copy()
    else:
        digest = _head(model_identity, kind, operation, seed_material)
    digest.update(prompt_ids.astype("<i4").tobytes())
    return digest.hexdigest()


def _head(model_identity: str, kind: str, operation: Operation, seed_material: tuple[Any, ...] | None) -> blake2b:
    head = [_KEY_VERSION, model_identity, kind, _parameters(operation), seed_material]
    return blake2b(canonical_json(head).encode(), digest_size=16)


@lru_cache(maxsize=1024)
def _greedy_head(model_identity: str, kind: str, operation: Operation) -> blake2b:
    """Remembered, to be copied: without chance it is the same for all rows that ask with equal parameters."""
    return _head(model_identity, kind, operation, None)


@lru_cache(maxsize=1024)
def _parameters(question: Operation | TextChoices) -> Mapping[str, Any]:
    """What of a question changes its answer. Remembered: rows of one template ask with equal parameters."""
    defaults = {field.name: field.default for field in fields(question)}
    given = {
        name: value
        for name, value in asdict(question).items()
        if name not in _LATER_PARAMETERS or value != defaults[name]
    }
    constraint = given.get("constraint")
    if constraint is not None and not constraint["lax"]:
        del constraint["lax"]
    return given


def outside_key(call: OutsideCall, *, row_key: str) -> str:
    """The content hash of an outside call.

    Raises:
        CallError: ``call-arguments`` where an argument has no JSON form.
    """
    try:
        head = canonical_json([_KEY_VERSION, "call", row_key, call.path, call.name, call.args])
    except (TypeError, ValueError) as error:
        raise CallError(
            "call-arguments", f"the arguments of sgl.call({call.name}) are not JSON values: {error}"
        ) from error
    return blake2b(head.encode(), digest_size=16).hexdigest()


def call_seed(seed: int, row_key: str, path: CallPath) -> int:
    """64-bit seed of one call's random numbers: independent of every other row and call."""
    material = canonical_json(["seed", seed, row_key, path])
    return int.from_bytes(blake2b(material.encode(), digest_size=8).digest(), "little")


def canonical_json(value: Any) -> str:
    """One text for equal values, whatever the order of their keys; lone surrogates are escaped.

    Raises:
        TypeError, ValueError: no JSON value, or not finite.
    """
    return _CANONICAL.encode(value)


def memo_entry(answer: Answer) -> dict[str, Any]:
    """An answer in the memo's JSON form."""
    if isinstance(answer, OutsideAnswer):
        return {"kind": "call", "value": answer.value}
    return {"kind": "gen", **answer.to_json()}


def answer_of(entry: Mapping[str, Any]) -> Answer:
    """The answer of a memo entry."""
    if entry["kind"] == "call":
        return OutsideAnswer(entry["value"])
    return Result.from_json(dict(entry), request_id=-1)
