"""Sets of numbers, closed under "and" and "not", and the automaton of the texts that stand for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from math import floor, gcd, lcm
from typing import Any, Final

import numpy as np

from sglbatch.engine.fsm.automaton import DEAD, Automaton, automaton_for_choices, make_automaton
from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.regex import compile_regex
from sglbatch.errors import ConstraintError

MAX_INT_DIGITS: Final = 20
MAX_FRACTION_DIGITS: Final = 20
"""Digits of a number that the schema leaves open, so that a repeating decimal ends. A bound's own digits count more."""

MAX_INTEGER_DIGITS: Final = 18
"""The same of what must be an integer: 64 bits hold it, so one long number does not change a column's type."""

MAX_MODULUS: Final = 10_000
"""Largest multipleOf, over its last decimal place."""

_ANY_NUMBER: Final = (
    rf"-?(0|[1-9][0-9]{{0,{MAX_INT_DIGITS - 1}}})(\.[0-9]{{1,{MAX_FRACTION_DIGITS}}})?([eE][+-]?[0-9]{{1,2}})?"
)
_INTEGER: Final = rf"-?(0|[1-9][0-9]{{0,{MAX_INTEGER_DIGITS - 1}}})"

Bound = tuple[Fraction, bool]
"""A value, and whether it is itself out."""


@dataclass(frozen=True)
class NumberSet:
    """Numbers that hold in all ways.

    Args:
        values: exactly these; the other members are then at their defaults.
        integer: True for whole numbers, False for the others, None for both.
        multiples, other_than: numbers that it is, and is not, a multiple of.
        excluded: these are out.
    """

    values: frozenset[Fraction] | None = None
    integer: bool | None = None
    low: Bound | None = None
    high: Bound | None = None
    multiples: frozenset[Fraction] = frozenset()
    other_than: frozenset[Fraction] = frozenset()
    excluded: frozenset[Fraction] = frozenset()

    def holds(self, value: Fraction) -> bool:
        if self.values is not None:
            return value in self.values
        if self.integer is not None and (value.denominator == 1) != self.integer:
            return False
        if self.low and (value < self.low[0] or (self.low[1] and value == self.low[0])):
            return False
        if self.high and (value > self.high[0] or (self.high[1] and value == self.high[0])):
            return False
        if any((value / m).denominator != 1 for m in self.multiples):
            return False
        return value not in self.excluded and all((value / m).denominator != 1 for m in self.other_than)


ALL_NUMBERS = NumberSet()


def exact(value: float | Decimal) -> Fraction:
    """The number that is written, not the binary one nearest to it."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def number_and(a: NumberSet, b: NumberSet) -> NumberSet | None:
    """The numbers of both; None when there are none."""
    if a.values is not None or b.values is not None:
        finite, other = (a, b) if a.values is not None else (b, a)
        assert finite.values is not None
        values = frozenset(v for v in finite.values if other.holds(v))
        return NumberSet(values=values) if values else None
    if a.integer is not None and b.integer is not None and a.integer != b.integer:
        return None
    joined = NumberSet(
        integer=b.integer if a.integer is None else a.integer,
        low=max((x for x in (a.low, b.low) if x), default=None),
        high=min((x for x in (a.high, b.high) if x), key=lambda x: (x[0], not x[1]), default=None),
        multiples=a.multiples | b.multiples,
        other_than=a.other_than | b.other_than,
        excluded=a.excluded | b.excluded,
    )
    return _settled(joined)


def _settled(numbers: NumberSet) -> NumberSet | None:  # noqa: PLR0911  one case of emptiness a return
    """None where nothing is left; few whole numbers become their list."""
    low, high = numbers.low, numbers.high
    if low and high:
        if low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1])):
            return None
        if low[0] == high[0]:
            return NumberSet(values=frozenset([low[0]])) if numbers.holds(low[0]) else None
    if not (numbers.integer or numbers.multiples):
        return numbers
    step = _common_multiple(numbers.multiples | ({Fraction(1)} if numbers.integer else set()))
    if any((step / other).denominator == 1 for other in numbers.other_than):
        return None
    if not (low and high):
        return numbers
    first, last = -floor(-low[0] / step), floor(high[0] / step)
    if last - first > 64:
        return numbers
    values = frozenset(step * k for k in range(first, last + 1) if numbers.holds(step * k))
    return NumberSet(values=values) if values else None


def _common_multiple(steps: Iterable[Fraction]) -> Fraction:
    """The least number that is a multiple of all."""
    top, bottom = 1, 0
    for step in steps:
        top, bottom = lcm(top, step.numerator), gcd(bottom, step.denominator)
    return Fraction(top, bottom or 1)


def number_not(a: NumberSet) -> list[NumberSet]:
    """Every other number, as a union."""
    if a.values is not None:
        return [NumberSet(excluded=a.values)]
    parts = [NumberSet(values=a.excluded)] if a.excluded else []
    if a.integer is not None:
        parts.append(NumberSet(integer=not a.integer))
    if a.low:
        parts.append(NumberSet(high=(a.low[0], not a.low[1])))
    if a.high:
        parts.append(NumberSet(low=(a.high[0], not a.high[1])))
    parts += [NumberSet(other_than=frozenset([m])) for m in a.multiples]
    parts += [NumberSet(multiples=frozenset([m])) for m in a.other_than]
    return parts


def number_text(value: Fraction) -> str:
    """The plain decimal text; the value must have one."""
    if value.denominator == 1:
        return str(value.numerator)
    places = 0
    scaled = value
    while scaled.denominator != 1:
        scaled *= 10
        places += 1
        assert places < 2000, "a decimal fraction ends"
    digits = str(abs(scaled.numerator)).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


@lru_cache(maxsize=4096)
def number_automaton(numbers: NumberSet) -> Automaton | None:
    """The texts of the numbers; None when there are none. Only a number without any condition may have an exponent.

    Whole numbers alone are written without a fraction.

    Raises ConstraintError (constraint-too-large) for a multipleOf that needs too many states.
    """
    if numbers.values is not None:
        return automaton_for_choices([number_text(v) for v in numbers.values]) if numbers.values else None
    if numbers == ALL_NUMBERS:
        return compile_regex(_ANY_NUMBER)
    if numbers == NumberSet(integer=True):
        return compile_regex(_INTEGER)
    return _Digits(numbers).automaton()


@dataclass(frozen=True)
class _Value:
    """What is known of a number after some of its digits.

    Args:
        negative: it begins with "-".
        num_int: digits before the point, capped; 0 before the first.
        zero: its integer part is 0, so the point or the end must follow.
        num_fraction: digits after the point; -1 before the point.
        order: for each watched value, how the digits so far compare to as many of its own.
        remainders: the digits as one whole number, modulo each modulus.
        whole: all digits after the point are 0.
    """

    negative: bool = False
    num_int: int = 0
    zero: bool = False
    num_fraction: int = -1
    order: tuple[int, ...] = ()
    remainders: tuple[int, ...] = ()
    whole: bool = True


class _Digits:
    """Reads a plain decimal digit by digit and decides at its end whether it is in the set."""

    def __init__(self, numbers: NumberSet) -> None:
        self._numbers = numbers
        bounds = [bound[0] for bound in (numbers.low, numbers.high) if bound]
        self._watched = sorted({abs(v) for v in (*bounds, *numbers.excluded)})
        self._texts = [number_text(v).partition(".") for v in self._watched]
        open_digits = MAX_INTEGER_DIGITS if numbers.integer else MAX_INT_DIGITS
        self._max_int = max([open_digits, *(len(head) + 1 for head, _, _ in self._texts)])
        self._steps = sorted(numbers.multiples | numbers.other_than)
        self._scale = max([len(number_text(s).partition(".")[2]) for s in self._steps], default=0)
        self._moduli = [int(s * 10**self._scale) for s in self._steps]
        if any(m > MAX_MODULUS for m in self._moduli) or np.prod(self._moduli, dtype=float) > MAX_MODULUS:
            raise ConstraintError(
                "constraint-too-large", "multipleOf needs too many states", hint="use a smaller or rounder multipleOf"
            )
        longest = max([len(tail) for _, _, tail in self._texts], default=0)
        self._max_fraction = 0 if numbers.integer else max(MAX_FRACTION_DIGITS, longest + 1, self._scale)
        if numbers.multiples and not numbers.integer:
            self._max_fraction = self._scale

    def automaton(self) -> Automaton | None:
        start = _Value(order=(0,) * len(self._watched), remainders=(0,) * len(self._moduli))
        return explore(start, self._next, self._accepts, b"-0123456789.")

    def _next(self, value: _Value, byte: int) -> _Value | None:
        character = chr(byte)
        if character == "-":
            return None if value.negative or value.num_int else replace(value, negative=True)
        if character == ".":
            if not value.num_int or value.num_fraction >= 0 or not self._max_fraction:
                return None
            return replace(self._int_ended(value), num_fraction=0)
        digit = int(character)
        remainders = tuple((r * 10 + digit) % m for r, m in zip(value.remainders, self._moduli, strict=True))
        if value.num_fraction >= 0:
            return self._fraction_digit(value, digit, remainders)
        if value.zero or value.num_int >= self._max_int:
            return None
        order = tuple(
            o or _compare(digit, head, value.num_int) for o, (head, _, _) in zip(value.order, self._texts, strict=True)
        )
        return replace(
            value,
            num_int=value.num_int + 1,
            zero=digit == 0 and value.num_int == 0,
            order=order,
            remainders=remainders,
        )

    def _fraction_digit(self, value: _Value, digit: int, remainders: tuple[int, ...]) -> _Value | None:
        if value.num_fraction >= self._max_fraction:
            return None
        order = tuple(
            o or _compare(digit, tail.ljust(value.num_fraction + 1, "0"), value.num_fraction)
            for o, (_, _, tail) in zip(value.order, self._texts, strict=True)
        )
        if value.num_fraction >= self._scale:
            # Beyond the last place of every step only zeros keep a multiple one; a digit breaks it for good.
            remainders = value.remainders if digit == 0 else tuple(-1 for _ in value.remainders)
            if -1 in value.remainders:
                remainders = value.remainders
        return replace(
            value,
            num_fraction=value.num_fraction + 1,
            order=order,
            remainders=remainders,
            whole=value.whole and digit == 0,
        )

    def _int_ended(self, value: _Value) -> _Value:
        """Comparison by the number of digits before the point, where it differs."""
        order = tuple(
            (value.num_int > len(head)) - (value.num_int < len(head)) or o
            for o, (head, _, _) in zip(value.order, self._texts, strict=True)
        )
        return replace(value, num_int=1, order=order, zero=False)

    def _accepts(self, value: _Value) -> bool:  # noqa: PLR0911  one condition a return
        if not value.num_int or value.num_fraction == 0:
            return False
        numbers = self._numbers
        places = max(value.num_fraction, 0)
        if value.num_fraction < 0:
            value = self._int_ended(value)
        if numbers.integer is False and value.whole:
            return False
        order = {
            watched: o or -int(any(c != "0" for c in tail[places:]))
            for watched, o, (_, _, tail) in zip(self._watched, value.order, self._texts, strict=True)
        }

        def compared(bound: Fraction) -> int:
            """-1, 0 or 1: the number against ``bound``."""
            sign = -1 if value.negative else 1
            if (bound < 0) != value.negative and (bound != 0):
                return sign
            return sign * order[abs(bound)]

        if numbers.low and compared(numbers.low[0]) < int(numbers.low[1]):
            return False
        if numbers.high and compared(numbers.high[0]) > -int(numbers.high[1]):
            return False
        if any(compared(v) == 0 for v in numbers.excluded):
            return False
        missing = 10 ** max(0, self._scale - places)
        for step, modulus, remainder in zip(self._steps, self._moduli, value.remainders, strict=True):
            divides = remainder != -1 and remainder * missing % modulus == 0
            if divides != (step in numbers.multiples):
                return False
        return True


def _compare(digit: int, text: str, at: int) -> int:
    if at >= len(text):
        return 0
    other = int(text[at])
    return (digit > other) - (digit < other)


def explore(
    start: Any,
    step: Callable[[Any, int], Hashable | None],
    accepts: Callable[[Any], bool],
    alphabet: bytes,
) -> Automaton | None:
    """The automaton of a deterministic machine, given by what it does; None when it accepts nothing."""
    budget = Budget()
    states = [start]
    number = {start: 0}
    rows: list[list[int]] = []
    for state in states:
        row = [DEAD] * (len(alphabet) + 1)
        for column, byte in enumerate(alphabet):
            target = step(state, byte)
            if target is None:
                continue
            if target not in number:
                number[target] = len(states)
                states.append(target)
                budget.check_states(len(states))
            row[column] = number[target]
        budget.spend(20 * len(alphabet))
        rows.append(row)
    class_of_byte = np.full(256, len(alphabet), dtype=np.intp)
    class_of_byte[list(alphabet)] = np.arange(len(alphabet))
    accepting = np.array([accepts(s) for s in states], dtype=np.bool_)
    return make_automaton(np.array(rows, dtype=np.int32), accepting, class_of_byte, budget)
