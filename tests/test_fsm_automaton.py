"""UTF-8 splitting, minimisation and the trie of choices, each against a naive version."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.engine.fsm import automaton_for_choices, compile_regex
from sglbatch.engine.fsm.budget import Budget
from sglbatch.engine.fsm.minimise import minimise
from sglbatch.engine.fsm.nfa import NfaBuilder
from sglbatch.engine.fsm.utf8 import complement, normalise, utf8_sequences
from sglbatch.errors import ConstraintError

EDGES = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x10FFFF]


def _code_points() -> st.SearchStrategy[int]:
    near_edge = st.tuples(st.sampled_from(EDGES), st.integers(-2, 2)).map(lambda pair: min(max(sum(pair), 0), 0x10FFFF))
    return near_edge | st.integers(0, 0x10FFFF)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(_code_points(), _code_points()).map(sorted).map(tuple), max_size=4))
def test_utf8_sequences_hold_exactly_the_ranges(pairs: list[tuple[int, int]]) -> None:
    ranges = normalise(pairs)
    sequences = utf8_sequences(ranges)
    probes = {code + delta for pair in [*pairs, *((e, e) for e in EDGES)] for code in pair for delta in (-1, 0, 1)}
    for code in probes:
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            continue
        data = chr(code).encode()
        num_matches = sum(
            len(sequence) == len(data) and all(lo <= byte <= hi for byte, (lo, hi) in zip(data, sequence, strict=True))
            for sequence in sequences
        )
        assert num_matches == any(lo <= code <= hi for lo, hi in pairs), hex(code)
    assert complement(complement(ranges)) == ranges


@st.composite
def _tables(draw: st.DrawFn) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """A random automaton whose states are all reachable from state 0."""
    num_states, num_classes = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    targets = st.integers(-1, num_states - 1)
    rows = draw(
        st.lists(
            st.lists(targets, min_size=num_classes, max_size=num_classes), min_size=num_states, max_size=num_states
        )
    )
    accepting = draw(st.lists(st.booleans(), min_size=num_states, max_size=num_states))
    table = np.asarray(rows, dtype=np.int32)
    reached = [0]
    for state in reached:
        reached += [int(t) for t in dict.fromkeys(table[state].tolist()) if t >= 0 and t not in reached]
    number = np.full(num_states + 1, -1, dtype=np.int32)
    number[reached] = np.arange(len(reached))
    return number[table[reached]], np.asarray(accepting)[reached]


def _num_classes_of_states(table: npt.NDArray[np.int32], accepting: npt.NDArray[np.bool_]) -> int:
    """Moore's algorithm on the complete automaton; the number of distinct states that are not dead."""
    rows = [*table.tolist(), [-1] * table.shape[1]]  # the last row is "no way on", index -1
    block = [*accepting.astype(int).tolist(), 0]
    while True:
        signature = [(block[state], *(block[target] for target in row)) for state, row in enumerate(rows)]
        numbers = {value: i for i, value in enumerate(dict.fromkeys(signature))}
        refined = [numbers[value] for value in signature]
        if len(numbers) == len(set(block)):
            return len(set(refined) - {refined[-1]})
        block = refined


def _accepts(table: npt.NDArray[np.int32], accepting: npt.NDArray[np.bool_], word: list[int]) -> bool:
    state = 0
    for symbol in word:
        state = int(table[state, symbol])
        if state < 0:
            return False
    return bool(accepting[state])


@settings(max_examples=300, deadline=None)
@given(automaton=_tables(), data=st.data())
def test_minimise(automaton: tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]], data: st.DataObject) -> None:
    table, accepting = automaton
    small = minimise(table, accepting, Budget())
    if small is None:
        assert not accepting.any()
        return
    small_table, small_accepting = small
    assert len(small_table) == _num_classes_of_states(table, accepting)
    for word in data.draw(st.lists(st.lists(st.integers(0, table.shape[1] - 1), max_size=12), max_size=20)):
        assert _accepts(small_table, small_accepting, word) == _accepts(table, accepting, word)


def test_minimise_long_chains() -> None:
    assert compile_regex("(a{0,3000}b)*").num_states == 3001
    assert compile_regex("a{20000}").num_states == 20_001


@given(choices=st.lists(st.text("abcé😀", max_size=5), min_size=1, max_size=12), other=st.text("abcé😀", max_size=5))
def test_choices(choices: list[str], other: str) -> None:
    if not any(choices):
        with pytest.raises(ConstraintError, match="nothing to choose from"):
            automaton_for_choices(choices)
        return
    automaton = automaton_for_choices(choices)
    assert all(automaton.accepts(choice.encode()) for choice in choices)
    for text in [other, *(choice[:-1] for choice in choices), *(choice + "a" for choice in choices)]:
        assert automaton.accepts(text.encode()) == (text in choices)


def test_choices_that_cannot_be() -> None:
    for choices, code in [([], "empty-choices"), (["a", "\ud800"], "invalid-choices")]:
        with pytest.raises(ConstraintError) as caught:
            automaton_for_choices(choices)
        assert caught.value.code == code
        assert caught.value.hint
    with pytest.raises(ConstraintError) as caught:
        automaton_for_choices(["a" * 100], Budget(max_states=100))
    assert caught.value.code == "constraint-too-large"


def test_an_automaton_is_frozen_and_has_its_own_identity() -> None:
    first, second = compile_regex("a|b"), compile_regex("[ab]")
    assert first != second
    assert np.array_equal(first.table, second.table)
    with pytest.raises(ValueError, match="read-only"):
        first.table[0, 0] = 0
    assert first.table.dtype == np.int32
    assert first.step(first.step(first.start, ord("c")), ord("a")) == -1


def test_builder_parts() -> None:
    builder = NfaBuilder(Budget())
    pair = builder.concat([builder.text(b"k="), builder.characters(((0xE0, 0xFF),))])
    rest = builder.repeat(lambda: builder.union([builder.text(b","), builder.empty()]), 1, 2)
    automaton = builder.build(builder.concat([pair, rest]))
    assert automaton is not None
    for text, accepted in [("k=é", True), ("k=é,,", True), ("k=é,,,", False), ("k=e", False)]:
        assert automaton.accepts(text.encode()) == accepted
