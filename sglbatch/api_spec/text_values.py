"""The values of a generation: what the endpoint wrote, read as the template expects it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglbatch.api_spec import bodies
from sglbatch.api_spec.answers import Answer
from sglbatch.api_spec.constraints import longest
from sglbatch.api_spec.matching import FirstTokens, Matcher, Taken, first_stop, first_stop_span
from sglbatch.api_spec.model import ApiModel
from sglbatch.api_spec.token_logprobs import between
from sglbatch.api_spec.tokens import Counter
from sglbatch.errors import CallError
from sglbatch.types import FinishReason, Generate, TextCall, TextChoices


@dataclass(frozen=True, kw_only=True, slots=True)
class TextReader:
    """Reads answers of one model."""

    model: ApiModel
    counter: Counter

    def text(self, call: TextCall, answer: Answer) -> str:
        """What goes on from where the call's text stops."""
        return _aligned(self._without_prefix(answer.text, call), call)

    def values(self, call: TextCall, text: str, answer: Answer, *, stops_sent: bool) -> list[Taken]:
        """The values in ``text``, the call's own first; [] where it cannot be told or does not fit.

        Args:
            stops_sent: the endpoint ends the text at stop strings of the last question.
        """
        question = call.question
        own_end = answer.finish == "stop"
        if not call.following and isinstance(question, Generate) and question.constraint is None:
            value = self._only_value(text, question, answer)
            return [value if question.num_top_logprobs is None else _with_told(value, text, question, answer)]
        matcher = Matcher(first_tokens=self._cutter(answer), longest=longest)
        return matcher.match(
            text, ended=own_end and not stops_sent, stopped=own_end, first=question, following=call.following
        )

    def _only_value(self, text: str, question: Generate, answer: Answer) -> Taken:
        """The value of a generation that was asked for nothing else: the endpoint itself has held ``max_tokens``."""
        cut = first_stop(text, question)
        value = text if cut is None else text[:cut]
        finish: FinishReason = "stop" if cut is not None or answer.finish != "length" else "length"
        within = self._cutter(answer)(value, question.max_tokens) if self.model.family.hidden_tokens else value
        if within is not None and within != value:
            value, finish = within, "length"
        if not value and answer.finish == "length":
            raise CallError("truncated", "the model used up its tokens before its answer began")
        return Taken(text=value, finish=finish, end=len(value))

    def _cutter(self, answer: Answer) -> FirstTokens:
        """Cuts a value to its tokens; an answer that as a whole has no more than that needs no cutting."""
        shown = None if answer.tokens is None else answer.tokens.generated - answer.tokens.hidden

        def first(text: str, max_tokens: int) -> str | None:
            if shown is not None and shown <= max_tokens and not self.counter.exact:
                return text
            return self.counter.first(text, max_tokens)

        return first

    def _without_prefix(self, text: str, call: TextCall) -> str:
        """A chat model may repeat the beginning that it was given."""
        prefix = call.prefix
        if not bodies.by_chat(call, self.model) or not prefix.strip():
            return text
        for begin in (prefix, prefix.lstrip(), prefix.strip()):
            if text.startswith(begin):
                return text[len(begin) :]
        return text


def _aligned(text: str, call: TextCall) -> str:
    """Spaces before a form are the prompt's or the endpoint's way of tokenising, unless the form has them itself."""
    question = call.question
    if isinstance(question, TextChoices):
        return text if any(choice[0].isspace() for choice in question.choices) else text.lstrip(" ")
    if question.constraint is None:
        return text
    if question.constraint.kind == "json_schema":
        return text.lstrip()
    return text if longest(question, text) is not None and not call.prefix.endswith(" ") else text.lstrip(" ")


def _with_told(found: Taken, text: str, question: Generate, answer: Answer) -> Taken:
    """With the log-probabilities of the value's tokens, a stop string that ends it included.

    Args:
        text: the answer without a beginning that it has repeated; all of it but a stop string is the value.
    """
    if answer.text and not answer.told:
        raise CallError(
            "no-logprobs", "the endpoint names no log-probabilities for this answer; return_logprob asks for them"
        )
    repeated, stop = len(answer.text) - len(text), first_stop_span(text, question)
    if not repeated and stop is None:
        return replace(found, told=answer.told)
    told = between(answer.told, answer.text, repeated, None if stop is None else repeated + stop[1])
    if told is None:
        raise CallError("no-logprobs", "the tokens whose log-probabilities the endpoint names are not its answer's")
    return replace(found, told=told)
