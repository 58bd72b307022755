"""What a job would cost, from dry runs: a range, since nobody knows the answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.dry import DryCall, Guess
from sglbatch.api_spec.prices import Prices, dollars

GUESSES: Final = tuple(
    guess
    for ahead in (False, True)
    for guess in (
        Guess(length="short", choice="first", ahead=ahead),
        Guess(length="short", choice="last", ahead=ahead),
        Guess(length="typical", choice="any", ahead=ahead),
        Guess(length="long", choice="first", ahead=ahead),
        Guess(length="long", choice="last", ahead=ahead),
    )
)


GUESSED_COUNTS: Final = (0.75, 1.35)
"""What low and high are multiplied by where tokens are guessed from bytes."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Of one quantity over the guesses: the least, a typical one, the most."""

    low: float
    expected: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {"low": self.low, "expected": self.expected, "high": self.high}


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """A job's cost before it is spent.

    Args:
        first_prompt_tokens: of the first call of every row; ``exact`` where the model's own tokenizer counted them.
        calls, prompt_tokens, generated_tokens: of the whole job, speculating where that is possible.
        dollars: by way of running: "speculating", "one call a gen", and the same cached or as a batch; None: unknown.
        most_per_row: dollars of the dearest row.
        sampled_rows: rows that the dry runs were made for, of ``rows`` that have calls to make.
    """

    rows: int
    sampled_rows: int
    exact: bool
    first_prompt_tokens: int
    calls: Range
    prompt_tokens: Range
    generated_tokens: Range
    dollars: Mapping[str, Range | None]
    most_per_row: float | None
    prices: str

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "sampled_rows": self.sampled_rows,
            "first_prompt_tokens": {"tokens": self.first_prompt_tokens, "exact": self.exact},
            "calls": self.calls.to_json(),
            "prompt_tokens": self.prompt_tokens.to_json(),
            "generated_tokens": self.generated_tokens.to_json(),
            "dollars": {way: found and found.to_json() for way, found in self.dollars.items()},
            "most_dollars_per_row": self.most_per_row,
            "prices": self.prices,
        }

    def render(self) -> str:
        """The estimate for people."""
        marked = "" if self.exact else " (estimated: the tokenizer is not known, --tokenizer names it)"
        sampled = "" if self.sampled_rows == self.rows else f" (from {self.sampled_rows:,} rows)"
        lines = [
            f"{'first calls':<17}{self.first_prompt_tokens:,} prompt tokens{marked}",
            f"{'calls':<17}{_counts(self.calls)}{sampled}",
            f"{'prompt tokens':<17}{_counts(self.prompt_tokens)}",
            f"{'generated tokens':<17}{_counts(self.generated_tokens)}",
            "",
            f"{'dollars':<28}{'low':>12}{'expected':>12}{'high':>12}   (prices: {self.prices})",
        ]
        for way, found in self.dollars.items():
            amounts = (
                ("unknown",) * 3 if found is None else tuple(map(_dollars, (found.low, found.expected, found.high)))
            )
            lines.append(f"{way:<28}" + "".join(f"{amount:>12}" for amount in amounts))
        row = "unknown" if self.most_per_row is None else _dollars(self.most_per_row)
        return "\n".join([*lines, f"{'the dearest row':<28}{'':>24}{row:>12}"])


def estimate(
    runs: Mapping[Guess, Sequence[DryCall]],
    prices: Prices,
    *,
    rows: int,
    sampled_rows: int,
    first_prompt_tokens: int,
    exact: bool,
) -> CostEstimate:
    """The estimate from one dry run for each of ``GUESSES`` over the sampled rows."""
    scale = rows / sampled_rows if sampled_rows else 0.0
    spread = (1.0, 1.0) if exact else GUESSED_COUNTS
    calls = {guess: len(found) * scale for guess, found in runs.items()}
    prompt = {guess: sum(call.tokens.prompt for call in found) * scale for guess, found in runs.items()}
    generated = {guess: sum(call.tokens.generated for call in found) * scale for guess, found in runs.items()}
    ways: dict[str, Range | None] = {}
    for way, ahead, cached, batch in (
        ("speculating", True, False, False),
        ("one call a gen", False, False, False),
        ("speculating, cached", True, True, False),
        ("one call a gen, cached", False, True, False),
        ("one call a gen, batch", False, False, True),
    ):
        ways[way] = _spread(_dollar_range(runs, prices, ahead=ahead, cached=cached, batch=batch, scale=scale), spread)
    return CostEstimate(
        rows=rows,
        sampled_rows=sampled_rows,
        exact=exact,
        first_prompt_tokens=first_prompt_tokens,
        calls=_range(calls),
        prompt_tokens=_range(prompt),
        generated_tokens=_range(generated),
        dollars={"this job": _whole(ways), **ways},
        most_per_row=_most_per_row(runs, prices),
        prices=prices.source,
    )


def _spread(found: Range | None, spread: tuple[float, float]) -> Range | None:
    if found is None:
        return None
    return Range(low=found.low * spread[0], expected=found.expected, high=found.high * spread[1])


def _range(values: Mapping[Guess, float]) -> Range:
    typical = [value for guess, value in values.items() if guess.length == "typical" and guess.ahead]
    return Range(low=min(values.values()), expected=typical[0], high=max(values.values()))


def _whole(ways: Mapping[str, Range | None]) -> Range | None:
    """From every value taken ahead to none, without counting on the provider's cache."""
    ahead, single = ways["speculating"], ways["one call a gen"]
    cached = ways["speculating, cached"]
    if ahead is None or single is None or cached is None:
        return None
    return Range(low=min(ahead.low, single.low, cached.low), expected=ahead.expected, high=max(ahead.high, single.high))


def _dollar_range(
    runs: Mapping[Guess, Sequence[DryCall]], prices: Prices, *, ahead: bool, cached: bool, batch: bool, scale: float
) -> Range | None:
    amounts: dict[Guess, float] = {}
    for guess, calls in runs.items():
        if guess.ahead != ahead:
            continue
        total = Decimal(0)
        for call in calls:
            cost = _cost(call, prices, cached=cached, batch=batch)
            if cost is None:
                return None
            total += cost
        amounts[guess] = float(total) * scale
    typical = next(amount for guess, amount in amounts.items() if guess.length == "typical")
    return Range(low=min(amounts.values()), expected=typical, high=max(amounts.values()))


def _cost(call: DryCall, prices: Prices, *, cached: bool, batch: bool) -> Decimal | None:
    tokens = call.tokens
    if not cached:
        tokens = Tokens(prompt=tokens.prompt, generated=tokens.generated)
    return prices.cost(tokens, batch=batch)


def _most_per_row(runs: Mapping[Guess, Sequence[DryCall]], prices: Prices) -> float | None:
    most = 0.0
    for calls in runs.values():
        rows: dict[int, Decimal] = defaultdict(Decimal)
        for call in calls:
            cost = _cost(call, prices, cached=False, batch=False)
            if cost is None:
                return None
            rows[call.program_id] += cost
        most = max([most, *map(float, rows.values())])
    return most


def _counts(found: Range) -> str:
    low, high = f"{found.low:,.0f}", f"{found.high:,.0f}"
    return low if low == high else f"{low} to {high}, expected {found.expected:,.0f}"


def _dollars(amount: float) -> str:
    return dollars(Decimal(str(round(amount, 10))))
