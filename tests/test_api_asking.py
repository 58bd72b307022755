"""Many calls at a time: a few try what may not work, the others wait for what they have seen, and nobody for ever."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sglbatch.api_spec.answers import Answer, Tokens
from sglbatch.api_spec.asking import Asking, Used
from sglbatch.api_spec.bodies import COMPLETIONS, Outgoing
from sglbatch.api_spec.model import resolve_api_model
from sglbatch.api_spec.probing import Trials
from sglbatch.api_spec.speculation import PROBES, Speculation
from sglbatch.api_spec.tokens import counter_for
from sglbatch.api_spec.ways import FIT_PROBES
from sglbatch.errors import CallError
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, NextAsk, Result, TextCall

CALLS = 30
YEAR = Generate(max_tokens=8, constraint=Constraint(kind="regex", source="1[0-9]{3}"))
LINE = Generate(max_tokens=8, stop=("\n",))


class Endpoint:
    """A ``Poster`` that answers after a moment, as ``text`` says; calls under a schema are answered with a year."""

    def __init__(self, text: Callable[[int], str]) -> None:
        self._text = text
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []

    async def post(self, outgoing: Outgoing, *, prompt_tokens: int, most_prompt_tokens: int) -> Answer:
        number = self.asked[outgoing.path]
        self.asked[outgoing.path] += 1
        self.bodies.append(outgoing.body)
        await asyncio.sleep(0.001)
        text = self._text(number) if outgoing.path == COMPLETIONS else json.dumps({"x": "1815"})
        if text == "fail":
            raise CallError("server-error", "it does not work")
        return Answer(text=text, finish="stop", refusal=None, tokens=Tokens(prompt=10, generated=4))


def ask(tokenizer: Tokenizer, endpoint: Endpoint, call: TextCall) -> list[Result | BaseException]:
    model = resolve_api_model("openai/any", base_url="http://127.0.0.1:1/v1")
    asking = Asking(model=model, counter=counter_for(tokenizer), speculation=Speculation(), poster=endpoint)

    async def every() -> list[Result | BaseException]:
        calls = (asking.answer(call, request_id=i, seed=i, used=Used()) for i in range(CALLS))
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)

    return asyncio.run(every())


def year() -> TextCall:
    return TextCall(chat=False, messages=(), prefix="Born: ", name="x", question=YEAR)


def texts(results: list[Result | BaseException]) -> list[str]:
    return [result.text for result in results if isinstance(result, Result)]


def test_a_form_that_text_never_has_is_tried_by_a_few(smollm2_tokenizer: Tokenizer) -> None:
    endpoint = Endpoint(lambda number: "in a small town")
    assert texts(ask(smollm2_tokenizer, endpoint, year())) == ["1815"] * CALLS
    assert endpoint.asked[COMPLETIONS] == FIT_PROBES


def test_a_form_that_text_has_is_never_asked_for_otherwise(smollm2_tokenizer: Tokenizer) -> None:
    endpoint = Endpoint(lambda number: " 1777\n")
    assert texts(ask(smollm2_tokenizer, endpoint, year())) == ["1777"] * CALLS
    assert endpoint.asked == {COMPLETIONS: CALLS}
    assert {body["max_tokens"] for body in endpoint.bodies} == {5}, "a year has four bytes, and one more shows its end"
    assert {body["prompt"] for body in endpoint.bodies} == {"Born:"}


@pytest.mark.parametrize("failing", [1, FIT_PROBES, CALLS])
def test_trials_that_fail_say_nothing(smollm2_tokenizer: Tokenizer, failing: int) -> None:
    endpoint = Endpoint(lambda number: "fail" if number < failing else "1777\n")
    results = ask(smollm2_tokenizer, endpoint, year())
    assert sum(isinstance(result, CallError) for result in results) == failing
    assert texts(results) == ["1777"] * (CALLS - failing)


def run_of_two() -> TextCall:
    following = ("\nBorn:", NextAsk(name="born", question=LINE))
    return TextCall(chat=False, messages=(), prefix="Name:", name="name", question=LINE, following=following)


def test_a_template_that_is_ignored_goes_ahead_a_few_times(smollm2_tokenizer: Tokenizer) -> None:
    endpoint = Endpoint(lambda number: " Ada\nand so on and on")
    results = ask(smollm2_tokenizer, endpoint, run_of_two())
    assert texts(results) == [" Ada"] * CALLS
    assert sum(body["max_tokens"] > LINE.max_tokens for body in endpoint.bodies) == PROBES


def test_a_template_that_is_followed_goes_ahead_always(smollm2_tokenizer: Tokenizer) -> None:
    endpoint = Endpoint(lambda number: " Ada\nBorn: 1815\n")
    results = ask(smollm2_tokenizer, endpoint, run_of_two())
    assert all(isinstance(result, Result) and result.ahead[0].text == " 1815" for result in results)
    assert endpoint.asked == {COMPLETIONS: CALLS}


@pytest.mark.parametrize("failing", [1, PROBES, CALLS])
def test_probes_that_fail_hold_nobody_up(smollm2_tokenizer: Tokenizer, failing: int) -> None:
    endpoint = Endpoint(lambda number: "fail" if number < failing else " Ada\nBorn: 1815\n")
    results = ask(smollm2_tokenizer, endpoint, run_of_two())
    assert sum(isinstance(result, CallError) for result in results) == failing
    assert texts(results) == [" Ada"] * (CALLS - failing)


def test_waiting_ends_with_whatever_is_tried() -> None:
    async def race() -> list[str]:
        trials, order = Trials(), []

        async def attempt() -> None:
            with trials.trying():
                await asyncio.sleep(0.01)
                order.append("tried")

        async def wait() -> None:
            await trials.settled(lambda: True)
            order.append("went on")

        await asyncio.wait_for(asyncio.gather(attempt(), attempt(), wait(), wait()), 5)
        return order

    assert asyncio.run(race()) == ["tried", "tried", "went on", "went on"]
