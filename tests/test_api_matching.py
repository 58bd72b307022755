"""The matcher of speculated text: it never takes a value that a call of its own would not have given."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglbatch.api_spec.constraints import longest
from sglbatch.api_spec.matching import Matcher, Taken
from sglbatch.types import Constraint, Following, Generate, NextAsk, TextChoices

LINE = Generate(max_tokens=50, stop=("\n",))


def by_chars(text: str, max_tokens: int) -> str:
    return text[:max_tokens]


def matcher() -> Matcher:
    return Matcher(first_tokens=by_chars, longest=longest)


def ask(question: Generate | TextChoices) -> NextAsk:
    return NextAsk(name="x", question=question)


def values(text: str, first: Generate | TextChoices, *following: str | NextAsk, ended: bool = True) -> list[str]:
    taken = matcher().match(text, ended=ended, stopped=ended, first=first, following=following)
    return [found.text for found in taken]


def test_the_template_followed_to_its_end() -> None:
    assert values(" Ada\nBorn: 1815\nField: math\n\nText:", LINE, "\nBorn:", ask(LINE), "\nField:", ask(LINE)) == [
        " Ada",
        " 1815",
        " math",
    ]


def test_the_first_other_text_ends_it() -> None:
    assert values(" Ada\nYear: 1815", LINE, "\nBorn:", ask(LINE)) == [" Ada"]
    assert values(" Ada", LINE, "\nBorn:", ask(LINE)) == [" Ada"]


def test_a_value_that_may_go_on_is_not_taken() -> None:
    assert values(" Ada\nBorn: 18", LINE, "\nBorn:", ask(LINE), ended=False) == [" Ada"]
    assert values(" Ad", LINE, "\nBorn:", ask(LINE), ended=False) == []
    assert values(" Ada\nBorn: 18", LINE, "\nBorn:", ask(LINE), ended=True) == [" Ada", " 18"]


def test_an_empty_value_is_asked_for_again_but_not_the_first() -> None:
    assert values("\nBorn: 1815", LINE, "\nBorn:", ask(LINE)) == ["", " 1815"]
    assert values(" Ada\nBorn:\n", LINE, "\nBorn:", ask(LINE)) == [" Ada"]


def test_max_tokens_cuts_and_ends_it() -> None:
    short = Generate(max_tokens=3, stop=("\n",))
    taken = matcher().match("abcdef\nB:x", ended=True, stopped=True, first=short, following=("def\nB:", ask(LINE)))
    assert taken == [Taken(text="abc", finish="length", end=3)]
    unknown = Matcher(first_tokens=lambda text, n: None, longest=longest)
    assert unknown.match("a\nB:x\n", ended=True, stopped=True, first=LINE, following=("\nB:", ask(LINE))) == []


def test_choices_are_taken_whole_and_longest() -> None:
    kinds = TextChoices(choices=("art", "artist", "music"))
    assert values(" Ada\nField: artist\n", LINE, "\nField: ", ask(kinds)) == [" Ada", "artist"]
    assert values(" Ada\nField: artful", LINE, "\nField: ", ask(kinds)) == [" Ada"]
    assert values(" Ada\nField: art", LINE, "\nField: ", ask(kinds), ended=False) == [" Ada"]
    assert values("music.", kinds) == ["music"]


def test_constraints_cut_where_they_are_met() -> None:
    year = Generate(max_tokens=8, constraint=Constraint(kind="regex", source="1[0-9]{3}"))
    assert values("1815\nField: x\n", year, "\nField: ", ask(LINE)) == ["1815", "x"]
    assert values("about 1815", year) == []
    assert values("181", year) == []


def test_a_stop_pattern_ends_a_value() -> None:
    assert values("one two 3 four", Generate(max_tokens=50, stop_regex=(r"\d",))) == ["one two "]


# Whatever a model writes, the values taken are those of one call after the other on the same text.

texts = st.text(alphabet="ab\n:", max_size=30)
gens = st.builds(
    lambda stop, n: Generate(max_tokens=n, stop=stop),
    st.sampled_from([("\n",), ("a",), (), ("b:", "\n")]),
    st.integers(1, 8),
)
templates = st.lists(st.one_of(st.text(alphabet="ab\n:", min_size=1, max_size=3), gens.map(ask)), max_size=5).map(tuple)


def naive(text: str, ended: bool, first: Generate, following: Following) -> list[str]:
    """Call after call on a model that goes on with ``text`` whenever the prompt is a beginning of it."""
    found: list[str] = []
    at = 0
    for part in (ask(first), *following):
        if isinstance(part, str):
            if text[at : at + len(part)] != part:
                return found
            at += len(part)
            continue
        assert isinstance(part.question, Generate)
        rest = text[at:]
        stops = [m.start() for stop in part.question.stop for m in [re.search(re.escape(stop), rest)] if m]
        end = min(stops, default=len(rest))
        long = end > part.question.max_tokens
        if not (stops or long or ended) or (found and not rest[:end]):
            return found
        found.append(rest[: min(end, part.question.max_tokens)])
        at += len(found[-1])
        if long:
            return found
    return found


@given(texts, st.booleans(), gens, templates)
def test_it_agrees_with_one_call_after_the_other(text: str, ended: bool, first: Generate, following: Following) -> None:
    taken = matcher().match(text, ended=ended, stopped=ended, first=first, following=following)
    assert [found.text for found in taken] == naive(text, ended, first, following)


@given(texts, gens, templates)
def test_an_endpoint_stop_only_counts_for_the_last_value(text: str, first: Generate, following: Following) -> None:
    """A stop string that was sent for the last value must not be taken for the end of an earlier one."""
    some = matcher().match(text, ended=False, stopped=True, first=first, following=following)
    none = matcher().match(text, ended=False, stopped=False, first=first, following=following)
    questions = 1 + sum(isinstance(part, NextAsk) for part in following)
    assert some[: questions - 1] == none[: questions - 1]


@pytest.mark.parametrize("ended", [True, False])
def test_nothing_is_taken_from_nothing(ended: bool) -> None:
    assert values("", TextChoices(choices=("a",)), ended=ended) == []
