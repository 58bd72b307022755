"""What calls that went ahead have brought, told to speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglbatch.api_spec.answers import Answer
from sglbatch.api_spec.matching import Taken
from sglbatch.api_spec.speculation import Speculation, place_of
from sglbatch.api_spec.tokens import Counter
from sglbatch.types import TextCall


@dataclass(frozen=True, kw_only=True, slots=True)
class Gains:
    """Tokens are the endpoint's, as far as it names them."""

    speculation: Speculation
    counter: Counter

    def of_text(self, call: TextCall, text: str, answer: Answer, taken: Sequence[Taken]) -> None:
        """A generation's; ``text`` is what it has from where the call's text stops."""
        place = place_of(call)
        prompt, generated = self._used(call, answer)
        if not taken:
            self.speculation.record(place, saved_prompt_tokens=-prompt, used_tokens=0, reach=0, wasted_tokens=generated)
            return
        first_len = self.counter.count(taken[0].text)
        values = sum(self.counter.count(found.text) for found in taken[1:])
        saved = sum(prompt + self.counter.count(text[: found.end]) for found in taken[:-1])
        reach = self.counter.count(text[: taken[-1].end]) - first_len if len(taken) > 1 else 0
        self.speculation.record(
            place,
            saved_prompt_tokens=saved,
            used_tokens=values,
            reach=reach,
            wasted_tokens=max(0, generated - first_len - values),
        )

    def of_fields(self, call: TextCall, answer: Answer, taken: Sequence[Taken]) -> None:
        """A structured call's."""
        prompt, generated = self._used(call, answer)
        values = [self.counter.count(found.text) for found in taken]
        self.speculation.record(
            place_of(call),
            saved_prompt_tokens=prompt * (len(taken) - 1),
            used_tokens=sum(values[1:]),
            reach=0,
            wasted_tokens=max(0, generated - sum(values)),
        )

    def _used(self, call: TextCall, answer: Answer) -> tuple[int, int]:
        """(prompt tokens, generated tokens)"""
        if answer.tokens is not None:
            return answer.tokens.prompt, answer.tokens.generated
        return self.counter.count(call.prefix), self.counter.count(answer.text)
