"""What a job would cost, from dry runs: a range, since nobody knows the answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.calibration import Ratio, real_over_expected
from sglbatch.api_spec.dry import Choice, DryCall, Fails, Guess, Template
from sglbatch.api_spec.prices import Prices, dollars
from sglbatch.api_spec.request_tokens import Length

_LENGTHS: Final[tuple[tuple[Length, Fails], ...]] = (("short", "never"), ("long", "sometimes"), ("long", "always"))
_CHOICES: Final[tuple[Choice, ...]] = ("first", "last")
_TEMPLATES: Final[tuple[Template, ...]] = ("followed", "ignored", "single")
_EXTREMES: Final[tuple[Guess, ...]] = tuple(
    Guess(length=length, choice=choice, template=template, fails=fails)
    for template in _TEMPLATES
    for length, fails in _LENGTHS
    for choice in _CHOICES
)
EXPECTED: Final = Guess(length="typical", choice="any", template="likely")
SINGLE: Final = Guess(length="typical", choice="any", template="single")
GUESSES: Final = (*_EXTREMES, EXPECTED, SINGLE)


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
        first_prompt_tokens: of the first call of every row; ``guess`` says why they may be off, None: they are exact.
        calls, prompt_tokens, generated_tokens: of the whole job, speculating where that is possible.
        dollars: by way of running: "speculating", "one call a gen", and the same cached or as a batch; None: unknown.
            As a batch calls are also asked for in another way, not only at another price.
        most_per_row: dollars of the dearest row.
        sampled_rows: rows that the dry runs were made for, of ``rows`` that have calls to make.
        answered_rows: rows with known usage that "this job" was held against; 0: nothing but guesses.
    """

    rows: int
    sampled_rows: int
    guess: str | None
    first_prompt_tokens: int
    calls: Range
    prompt_tokens: Range
    generated_tokens: Range
    dollars: Mapping[str, Range | None]
    most_per_row: float | None
    prices: str
    answered_rows: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "sampled_rows": self.sampled_rows,
            "first_prompt_tokens": {
                "tokens": self.first_prompt_tokens,
                "exact": self.guess is None,
                "guess": self.guess,
            },
            "calls": self.calls.to_json(),
            "prompt_tokens": self.prompt_tokens.to_json(),
            "generated_tokens": self.generated_tokens.to_json(),
            "dollars": {way: found and found.to_json() for way, found in self.dollars.items()},
            "most_dollars_per_row": self.most_per_row,
            "prices": self.prices,
            "answered_rows": self.answered_rows,
        }

    def render(self) -> str:
        """The estimate for people."""
        marked = "" if self.guess is None else f" (estimated: {self.guess})"
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
        if self.answered_rows:
            lines.append(f"{'':<28}this job: held against what {self.answered_rows:,} answered rows have cost")
        row = "unknown" if self.most_per_row is None else _dollars(self.most_per_row)
        return "\n".join([*lines, f"{'the dearest row':<28}{'':>24}{row:>12}"])


def estimate(
    runs: Mapping[Guess, Sequence[DryCall]],
    batch_runs: Mapping[Guess, Sequence[DryCall]],
    prices: Prices,
    *,
    rows: int,
    sampled_rows: int,
    first_prompt_tokens: int,
    guess: str | None,
    exact: bool,
    batch: bool,
    answered: Mapping[int, Tokens],
    expected: Sequence[DryCall],
) -> CostEstimate:
    """The estimate from one dry run for each of ``GUESSES`` over the sampled rows.

    Args:
        runs, batch_runs: with calls that go one by one, and in batches.
        guess: see ``CostEstimate``.
        exact: text is counted by the model's own tokenizer.
        batch: this job goes in batches.
        answered: what rows have really used; ``expected``: the calls that their dry run expects.
    """
    scale = rows / sampled_rows if sampled_rows else 0.0
    one_by_one, batched = _Sums(runs, prices, scale=scale), _Sums(batch_runs, prices, scale=scale, batch=True)
    sums = batched if batch else one_by_one
    spread = (1.0, 1.0) if exact else GUESSED_COUNTS
    ways = {
        name: _spread((batched if in_batch else one_by_one).dollars(single=single, cached=cached), spread)
        for name, single, cached, in_batch in (
            ("speculating", False, False, False),
            ("one call a gen", True, False, False),
            ("speculating, cached", False, True, False),
            ("one call a gen, cached", True, True, False),
            ("speculating, batch", False, False, True),
            ("one call a gen, batch", True, False, True),
        )
    }
    this_job = ways["speculating, batch"] if batch else _whole(ways)
    ratio = None if this_job is None else _ratio(answered, expected, prices)
    if this_job is not None and ratio is not None:
        ahead = ways["speculating, batch"] if batch else ways["speculating"]
        this_job = _held_against(this_job, ratio, discount=this_job.low / ahead.low if ahead and ahead.low else 1.0)
    return CostEstimate(
        rows=rows,
        sampled_rows=sampled_rows,
        guess=guess,
        first_prompt_tokens=first_prompt_tokens,
        calls=sums.counts(lambda call: int(call.is_request)),
        prompt_tokens=sums.counts(lambda call: call.tokens.prompt),
        generated_tokens=sums.counts(lambda call: call.tokens.generated),
        dollars={"this job": this_job, **ways},
        most_per_row=sums.most_per_row(),
        prices=prices.source,
        answered_rows=0 if ratio is None else len(answered),
    )


def _ratio(answered: Mapping[int, Tokens], expected: Sequence[DryCall], prices: Prices) -> Ratio | None:
    """Real over expected cost of answered rows; without the cache's discount, which the journal does not keep."""
    costs: dict[int, float] = dict.fromkeys(answered, 0.0)
    for call in expected:
        costs[call.program_id] += float(_cost(call, prices, cached=False, batch=False) or 0)
    real = [float(prices.cost(tokens) or 0) for tokens in answered.values()]
    return real_over_expected(real, list(costs.values()))


def _held_against(found: Range, ratio: Ratio, *, discount: float) -> Range:
    """What answered rows make likely, and no more than was possible before unless they have shown that to be wrong.

    Args:
        discount: what the provider's cache may leave of the low end.
    """
    low, middle, high = (found.expected * factor for factor in (ratio.low * discount, ratio.middle, ratio.high))
    if found.low <= middle <= found.high:
        low, high = max(low, found.low), min(high, found.high)
    return Range(low=low, expected=middle, high=high)


@dataclass(frozen=True)
class _Sums:
    """Sums over the dry runs.

    Args:
        scale: rows for each sampled one.
        batch: at a batch's prices.
    """

    runs: Mapping[Guess, Sequence[DryCall]]
    prices: Prices
    scale: float
    batch: bool = False

    def counts(self, value: Callable[[DryCall], int]) -> Range:
        """Of a number that every call has, in this job."""
        totals = {
            guess: sum(value(call) * (1 if call.once else self.scale) for call in calls)
            for guess, calls in self.runs.items()
        }
        return _range(totals, single=False)

    def dollars(self, *, single: bool, cached: bool) -> Range | None:
        amounts: dict[Guess, float] = {}
        for guess, calls in self.runs.items():
            total = 0.0
            for call in calls:
                cost = _cost(call, self.prices, cached=cached, batch=self.batch)
                if cost is None:
                    return None
                total += float(cost) * (1 if call.once else self.scale)
            amounts[guess] = total
        return _range(amounts, single=single)

    def most_per_row(self) -> float | None:
        """Dollars of the dearest row; None where prices are unknown."""
        most = 0.0
        for guess, calls in self.runs.items():
            if guess.template == "single":
                continue
            rows: dict[int, Decimal] = defaultdict(Decimal)
            for call in calls:
                cost = _cost(call, self.prices, cached=False, batch=self.batch)
                if cost is None:
                    return None
                rows[call.program_id] += cost
            most = max([most, *map(float, rows.values())])
        return most


def _spread(found: Range | None, spread: tuple[float, float]) -> Range | None:
    if found is None:
        return None
    return Range(low=found.low * spread[0], expected=found.expected, high=found.high * spread[1])


def _range(values: Mapping[Guess, float], *, single: bool) -> Range:
    """The least, the expected and the most of one way of asking: one call a gen, or ahead."""
    found = [value for guess, value in values.items() if (guess.template == "single") == single]
    return Range(low=min(found), expected=values[SINGLE if single else EXPECTED], high=max(found))


def _whole(ways: Mapping[str, Range | None]) -> Range | None:
    """Asking ahead; the provider's cache may make it cheaper, which nobody can count on."""
    ahead, cached = ways["speculating"], ways["speculating, cached"]
    if ahead is None or cached is None:
        return None
    return Range(low=min(ahead.low, cached.low), expected=ahead.expected, high=ahead.high)


def _cost(call: DryCall, prices: Prices, *, cached: bool, batch: bool) -> Decimal | None:
    tokens = call.tokens
    if not cached:
        tokens = Tokens(prompt=tokens.prompt, generated=tokens.generated)
    return prices.cost(tokens, batch=batch)


def _counts(found: Range) -> str:
    low, high = f"{found.low:,.0f}", f"{found.high:,.0f}"
    return low if low == high else f"{low} to {high}, expected {found.expected:,.0f}"


def _dollars(amount: float) -> str:
    return dollars(Decimal(str(round(amount, 10))))
