"""The values that pass between layers: what is asked of a backend and what comes back.

Everything here is frozen and knows nothing of files, devices or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = npt.NDArray[np.int32]

Priority: TypeAlias = tuple[int, ...]
"""(plan position, *call path): smaller runs earlier; the least unfinished one is the head."""

CallPath: TypeAlias = tuple[int, ...]
"""Where a call stands in its program: (stream path..., index of the call in its stream)."""

FinishReason: TypeAlias = Literal["stop", "length", "choice", "constraint"]
"""stop: end-of-sequence or a stop string; length: max_tokens; constraint: the automaton ended."""


# --- prompts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Constant text of a prompt, not yet tokenised.

    ``specials`` are the special-token strings that count as special tokens inside ``text``; any
    other special-token text in it is tokenised as plain characters.
    """

    text: str
    specials: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids that are fixed, such as a generated answer's: never tokenised again from text."""

    ids: tuple[int, ...]


Segment: TypeAlias = Text | Ids
Prompt: TypeAlias = tuple[Segment, ...]
"""Adjacent ``Text`` segments tokenise together; an ``Ids`` segment is a token boundary."""


# --- variables ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class VarType:
    """What a program declares about one variable, from its constraint; the output column's type follows.

    ``choices`` belongs to ``enum``. ``is_list`` says that the value is a list of such values (``n > 1``).
    ``schema`` belongs to ``json``: the JSON Schema of the value as JSON text, "" for any value.
    ``quoted`` belongs to ``text``: the program's text is a string in quotes, which its row's result leaves out.
    """

    kind: Literal["text", "int", "float", "bool", "enum", "json"]
    choices: tuple[str, ...] = ()
    is_list: bool = False
    schema: str = ""
    quoted: bool = False


# --- what a call asks for ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What the generated text must match: hashable, compiled once per distinct value.

    Args:
        source: a regex, or a JSON Schema as JSON text; the order of its properties is the order they are written in.
        lax: keywords of the schema that cannot be enforced are left to validation.
    """

    kind: Literal["regex", "json_schema"]
    source: str
    lax: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """Sample up to ``max_tokens`` tokens. ``temperature == 0`` is greedy; ``top_k <= 0`` is off.

    Args:
        min_tokens: nothing but a constraint's end or ``max_tokens`` ends the text before so many tokens.
        stop_token_ids: tokens that end the text and are not part of it, beside the end of the sequence.
        stop_regex: patterns of Python's ``re``; the text ends before the first match.
        frequency_penalty, presence_penalty: taken off the logit of a token that was generated, for each time and once.
        ignore_eos: the end of the sequence is a token like others.
        num_top_logprobs: None asks for no log-probabilities; else those of the generated tokens and of so many of the
            likeliest beside each.
        input_logprobs_from: position of the first prompt token whose log-probability is asked for; None is none.
        complete: a constrained text for which ``max_tokens`` gets scarce ends in the shortest way that its constraint
            has, instead of being cut.
        exact_choices: where a constraint leaves a choice among few texts (an enum, a boolean), decide by the
            probabilities of whole texts instead of token by token.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    constraint: Constraint | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    num_top_logprobs: int | None = None
    input_logprobs_from: int | None = None
    complete: bool = False
    exact_choices: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


ChoicesMethod: TypeAlias = Literal[
    "exact", "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]
"""How a select decides. All but ``exact`` are SGLang's, which compare log-probabilities token by token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choose:
    """Score alternatives. Each alternative is a non-empty run of token ids after the prompt.

    ``exact``: an alternative's probability is the model's for its whole run; where it is a proper prefix of
    others, theirs is taken off (it stands for "this and not one of the longer ones").

    Args:
        healed_lens: for the other methods, how many tokens at each alternative's beginning are the prompt's own, which
            others re-tokenise together with their text; () where none are. They are not scored.
    """

    alternatives: tuple[tuple[int, ...], ...]
    temperature: float = 0.0
    method: ChoicesMethod = "exact"
    healed_lens: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def scored(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each alternative that count, at least one each."""
        lens = self.healed_lens or (0,) * len(self.alternatives)
        return tuple(ids[start:] for ids, start in zip(self.alternatives, lens, strict=True))


Operation: TypeAlias = Generate | Choose


@dataclass(frozen=True, kw_only=True, slots=True)
class TextChoices:
    """A select among texts, for a backend that takes text."""

    choices: tuple[str, ...]
    temperature: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NextAsk:
    """A gen or select that follows the asked one in the template. ``name`` is "" where it sets no variable."""

    name: str
    question: Generate | TextChoices


Following: TypeAlias = tuple[str | NextAsk, ...]
"""What the template has behind a call: constant texts and further calls, up to the end of the turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCall:
    """A call as text: what a backend that takes messages or plain text is asked.

    Args:
        chat: the program uses roles; else the whole prompt is ``prefix`` and there are no messages.
        messages: (role, content) of every closed message.
        prefix: what the open assistant message, or the plain text, holds so far.
        following: not part of the call's identity, since it changes no answer.
        ahead_tokens: how many tokens beyond this call's own may be generated for what follows; None leaves it to
            the backend, 0 is off.
    """

    chat: bool
    messages: tuple[tuple[str, str], ...]
    prefix: str
    name: str
    question: Generate | TextChoices
    following: Following = ()
    ahead_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """One call, tokenised, ready for a backend.

    Args:
        request_id: unique within the process.
        program_id: which program asked; see ``Backend.finish_program``.
        prompt_ids: int32 [prompt_len], at least one token.
        seed: 64-bit seed of this call's random numbers (already mixes job seed, row key, call path).
        priority: place in the order; None lets the backend order the submitted batch depth-first.
        keep: a follow-up call may extend this prompt plus its answer, so its KV is worth keeping.
        follow_up: this call came out of an earlier call's answer, so it was not in the plan's order.
        text: the call as text, for a backend that takes no token ids; ``prompt_ids`` then only order and count.
    """

    request_id: int
    program_id: int
    prompt_ids: TokenIds
    operation: Operation
    seed: int
    priority: Priority | None = None
    keep: bool = False
    follow_up: bool = False
    text: TextCall | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of one call: what was in the prompt and what was generated."""

    prompt_tokens: int
    generated_tokens: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            generated_tokens=self.generated_tokens + other.generated_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorInfo:
    """Why a call or a row failed; becomes the ``_error`` column."""

    code: str
    message: str
    call: str | None = None


TokenLogprob: TypeAlias = tuple[float | None, int | str]
"""Log-probability under the model's own distribution (no temperature, penalty or constraint), and the token id.

None for a sequence's first token, which nothing comes before. An endpoint's token whose id is not known here stands as
its text.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished call.

    Args:
        text: the generated text, cut before a stop string; the chosen text is filled in by lang.
        output_ids: tokens wholly inside ``text``; they are what the program's state keeps.
        tail: the end of ``text`` that lies inside a token cut by a stop string ("" when none).
        choice: index of the chosen alternative (Choose only).
        choice_logprobs: normalised log-probability of each alternative (an exact Choose only).
        choice_token_logprobs: of each alternative's scored tokens (the other methods of Choose).
        unconditional_logprobs: of the same tokens with nothing before them (unconditional_likelihood_normalized).
        output_logprobs: of every generated token, those cut off with a stop and an ending token included.
        output_top_logprobs: for each of them, the likeliest tokens in its place, likeliest first.
        input_logprobs: of the prompt's tokens that were asked for.
        means: how an endpoint was brought to choose (Choose only); None where the alternatives were scored here.
        cached_tokens: prompt tokens that were in memory already. It depends on what else runs, so it is not journaled.
        error: set when the call failed; then the other values are empty.
        ahead: answers to the calls of ``TextCall.following``, as far as the same generation gave them. They are
            calls of their own in the journal, so they are not part of this one's JSON.
    """

    request_id: int
    text: str = ""
    output_ids: tuple[int, ...] = ()
    tail: str = ""
    finish_reason: FinishReason = "stop"
    usage: Usage = field(default_factory=lambda: Usage(prompt_tokens=0, generated_tokens=0))
    choice: int | None = None
    choice_logprobs: tuple[float, ...] | None = None
    choice_token_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    unconditional_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    output_logprobs: tuple[TokenLogprob, ...] = ()
    output_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    input_logprobs: tuple[TokenLogprob, ...] = ()
    means: str | None = None
    cached_tokens: int = 0
    error: ErrorInfo | None = None
    ahead: tuple[Result, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The journal's form; ``from_json`` restores it. The request id is the process's, so it stays out."""
        value = asdict(self)
        del value["request_id"], value["ahead"], value["cached_tokens"]
        return {k: v for k, v in value.items() if v not in ("", None, ())}

    @staticmethod
    def from_json(value: dict[str, Any], *, request_id: int) -> Result:
        return Result(
            request_id=request_id,
            text=value.get("text", ""),
            output_ids=tuple(value.get("output_ids", ())),
            tail=value.get("tail", ""),
            finish_reason=value["finish_reason"],
            usage=Usage(**value["usage"]),
            choice=value.get("choice"),
            choice_logprobs=tuple(value["choice_logprobs"]) if "choice_logprobs" in value else None,
            output_logprobs=_token_logprobs(value.get("output_logprobs", ())),
            input_logprobs=_token_logprobs(value.get("input_logprobs", ())),
            means=value.get("means"),
            output_top_logprobs=tuple(map(_token_logprobs, value.get("output_top_logprobs", ()))),
            choice_token_logprobs=tuple(map(_token_logprobs, value.get("choice_token_logprobs", ()))),
            unconditional_logprobs=tuple(map(_token_logprobs, value.get("unconditional_logprobs", ()))),
        )


def _token_logprobs(value: Sequence[Sequence[Any]]) -> tuple[TokenLogprob, ...]:
    return tuple((logprob, token_id) for logprob, token_id in value)


def prefill_runs(prompt_ids: TokenIds, operation: Operation) -> list[TokenIds]:
    """The token runs that a call puts through the model before anything is sampled, in depth-first order.

    A Generate is its prompt; a Choose is, for each alternative, the prompt and all but the alternative's last
    token (the last one is only scored). The plan's unique tokens are those of the radix tree of all runs.
    """
    if isinstance(operation, Generate):
        return [prompt_ids]
    heads = sorted({alternative[:-1] for alternative in operation.alternatives})
    return [np.concatenate([prompt_ids, np.array(head, dtype=np.int32)]) if head else prompt_ids for head in heads]


def unconditional_runs(operation: Operation) -> list[TokenIds]:
    """The runs that a call puts through the model by themselves, with no prompt before them, in depth-first order.

    ``unconditional_likelihood_normalized`` scores its alternatives that way too; others have none.
    """
    if isinstance(operation, Generate) or operation.method != "unconditional_likelihood_normalized":
        return []
    return [np.array(head, dtype=np.int32) for head in sorted({ids[:-1] for ids in operation.scored}) if head]


# --- backends ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendStats:
    """Counters since the backend was made. Tokens are prompt tokens that entered the model.

    computed_prompt_tokens counts every prompt token that was put through the model, recomputed ones
    (after a pause or an eviction) included; recomputed_tokens counts those apart (and recomputed
    generated tokens). out_of_memory counts how often a step did not fit the device's memory and was run in parts.
    """

    requests: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    out_of_memory: int = 0


class Backend(Protocol):
    """Something that answers calls: the local engine, or an API.

    ``submit`` accepts requests at any time; ``step`` does one unit of work and returns what finished.
    A request that can never run (too long for the context or the memory) comes back from ``step``
    as a Result with an error; it never raises.
    """

    @property
    def identity(self) -> str: ...

    @property
    def context_len(self) -> int: ...

    def submit(self, requests: Sequence[Request]) -> None: ...

    def step(self) -> list[Result]: ...

    @property
    def has_unfinished(self) -> bool: ...

    def finish_program(self, program_id: int) -> None:
        """No more calls will come from this program: what was kept for it may go."""

    def stats(self) -> BackendStats: ...

    def close(self) -> None: ...
