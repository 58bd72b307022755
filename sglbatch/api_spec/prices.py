"""What calls cost. A price that is not known is None, never 0."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Final, Protocol

from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.model import OPENAI_URL, ApiModel
from sglbatch.errors import SglbatchError

MILLION: Final = Decimal(1_000_000)
BATCH_SHARE: Final = Decimal("0.5")
"""What a batch costs of the price that a user names; the price list knows its own."""

_NAMES: Final = ("input", "output", "cached")


class Prices(Protocol):
    """US dollars for one call."""

    @property
    def source(self) -> str: ...

    def cost(self, tokens: Tokens, *, batch: bool = False) -> Decimal | None: ...


@dataclass(frozen=True, kw_only=True)
class FixedPrices:
    """The user's: dollars for a million tokens. ``cached``: prompt tokens from the provider's cache."""

    input: Decimal
    output: Decimal
    cached: Decimal

    @property
    def source(self) -> str:
        return "--price"

    def cost(self, tokens: Tokens, *, batch: bool = False) -> Decimal | None:
        whole = (
            (tokens.prompt - tokens.cached) * self.input + tokens.cached * self.cached + tokens.generated * self.output
        ) / MILLION
        return whole * BATCH_SHARE if batch else whole


class ListedPrices:
    """The prices that the package ``genai-prices`` lists for OpenAI's models; each call is priced by itself, since long
    prompts may cost more."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._known = True
        self._found = lru_cache(maxsize=1 << 16)(self._look_up)  # a dry run asks for the same ones many times

    @property
    def source(self) -> str:
        from importlib.metadata import version

        return f"genai-prices {version('genai-prices')}"

    def cost(self, tokens: Tokens, *, batch: bool = False) -> Decimal | None:
        return self._found(tokens.prompt, tokens.cached, tokens.generated, batch) if self._known else None

    def _look_up(self, prompt: int, cached: int, generated: int, batch: bool) -> Decimal | None:
        from genai_prices import Usage, calc_price

        usage = Usage(input_tokens=prompt, cache_read_tokens=cached, output_tokens=generated)
        context = {"processing": "batch"} if batch else None
        try:
            found = calc_price(usage, self._model, provider_id="openai", price_context=context)
        except LookupError:
            self._known = False
            return None
        return found.total_price


class UnknownPrices:
    """Of a server that nobody lists."""

    source: Final = "unknown"

    def cost(self, tokens: Tokens, *, batch: bool = False) -> Decimal | None:
        return None


def prices_for(model: ApiModel, price: str | None) -> Prices:
    """The prices of a model: the user's, else the list's for OpenAI's own endpoint, else unknown.

    Raises:
        SglbatchError: ``bad-option``.
    """
    if price is not None:
        return parse_price(price)
    return ListedPrices(model.model) if model.base_url == OPENAI_URL else UnknownPrices()


def parse_price(text: str) -> FixedPrices:
    """``input=0.25,output=2,cached=0.025``, in dollars for a million tokens; ``cached`` may be left out.

    Raises:
        SglbatchError: ``bad-option``.
    """
    values: dict[str, Decimal] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            values[name] = Decimal(number)
        except InvalidOperation:
            raise _bad_price(text) from None
        if name not in _NAMES or not values[name].is_finite() or values[name] < 0:
            raise _bad_price(text)
    if "input" not in values or "output" not in values:
        raise _bad_price(text)
    return FixedPrices(input=values["input"], output=values["output"], cached=values.get("cached", values["input"]))


def output_weight(prices: Prices) -> float | None:
    """What a generated token costs in prompt tokens, or None."""
    prompt = prices.cost(Tokens(prompt=1000, generated=0))
    generated = prices.cost(Tokens(prompt=0, generated=1000))
    return float(generated / prompt) if prompt and generated is not None else None


def dollars(amount: Decimal | None) -> str:
    """``$1.23``; small amounts keep two digits that say something; None is "unknown"."""
    if amount is None:
        return "unknown"
    if amount >= 1 or amount == 0:
        return f"${amount:,.2f}"
    return f"${amount:.{max(2, 1 - amount.adjusted())}f}"


def _bad_price(text: str) -> SglbatchError:
    return SglbatchError(
        "bad-option",
        f"--price takes dollars for a million tokens as input=..,output=..[,cached=..], not {text!r}",
        hint="for example --price input=0.25,output=2,cached=0.025",
    )
