"""Token masks against a loop over the whole vocabulary."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.engine.fsm import (
    Automaton,
    AutomatonGuide,
    Bitmask,
    Guide,
    TokenMasks,
    automaton_for_choices,
    compile_regex,
)
from sglbatch.engine.fsm import vocabulary as vocabulary_module
from sglbatch.errors import ConstraintError
from sglbatch.tokenizer import Tokenizer

PATTERNS = ["[ab]{1,3}", "(ab|ba)*", "a.b", "é+|€", "[^a]*", "(?s).{0,4}", "x"]
EOS = 3


def _allowed(mask: Bitmask) -> npt.NDArray[np.bool_]:
    """Bit by bit, as the format is described."""
    return np.asarray([bool((int(mask[v // 32]) >> (v % 32)) & 1) for v in range(len(mask) * 32)])


def _token_live(automaton: Automaton, token_bytes: list[bytes]) -> set[int]:
    """States from which some sequence of tokens reaches an accepting state."""
    live = {int(state) for state in np.flatnonzero(automaton.accepting)}
    steps = {s: {automaton.run(s, data) for data in token_bytes if data} for s in range(automaton.num_states)}
    while grown := {state for state, after in steps.items() if state not in live and after & live}:
        live |= grown
    return live


def _check_all_states(guide: Guide, token_bytes: list[bytes], vocab_size: int) -> None:
    assert isinstance(guide, AutomatonGuide)
    automaton = guide.automaton
    live = _token_live(automaton, [b"" if i == EOS else data for i, data in enumerate(token_bytes)])
    for state in range(automaton.num_states):
        expected = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
        for token_id, data in enumerate(token_bytes):
            expected[token_id] = bool(data) and automaton.run(state, data) in live
        expected[EOS] = automaton.accepting[state]
        mask = guide.mask(state)
        assert mask.dtype == np.int32
        assert np.array_equal(_allowed(mask), expected)
        assert state not in live or expected.any()


@settings(max_examples=200, deadline=None)
@given(
    pattern=st.sampled_from(PATTERNS),
    tokens=st.lists(st.text("abxé€😀\n", max_size=4).map(str.encode) | st.binary(max_size=3), min_size=4, max_size=80),
    padding=st.integers(0, 40),
    all_bytes=st.booleans(),
    max_sparse_nodes=st.sampled_from([0, 5, 10_000]),
)
def test_masks_are_those_of_a_loop(
    pattern: str, tokens: list[bytes], padding: int, all_bytes: bool, max_sparse_nodes: int
) -> None:
    if all_bytes:
        tokens = [*tokens, *(bytes([byte]) for byte in range(256))]
    vocab_size = len(tokens) + padding
    automaton = compile_regex(pattern)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_module, "_MAX_SPARSE_NODES", max_sparse_nodes)
        masks = TokenMasks(tokens, frozenset({EOS}), vocab_size)
        text_tokens = [b"" if i == EOS else data for i, data in enumerate(tokens)]
        if automaton.start not in _token_live(automaton, text_tokens):
            with pytest.raises(ConstraintError) as caught:
                masks.guide(automaton)
            assert caught.value.code == "untokenizable-constraint"
            return
        _check_all_states(masks.guide(automaton), tokens, vocab_size)


def test_a_missing_byte_is_no_trap() -> None:
    # "c" can only be written as "bc": the way over a single "b" must not be offered where "bc" has to follow.
    tokens = [b"a", b"b", b"bc", b"", b"d"]
    guide = TokenMasks(tokens, frozenset({EOS}), 5).guide(compile_regex("a(bc|d)"))
    after_a = guide.advance(guide.start, 0)
    assert np.flatnonzero(_allowed(guide.mask(after_a))).tolist() == [2, 4]
    assert guide.is_final(guide.advance(after_a, 2))


def test_advance_and_final_states() -> None:
    tokens = [b"ab", b"a", b"b", b"<end>", b""]
    guide = TokenMasks(tokens, frozenset({EOS}), 5).guide(compile_regex("ab?"))
    after_a = guide.advance(guide.start, 1)
    assert np.flatnonzero(_allowed(guide.mask(after_a))).tolist() == [2, EOS]
    assert not guide.is_final(after_a)
    end = guide.advance(after_a, 2)
    assert end == guide.advance(guide.start, 0)
    assert guide.is_final(end)
    assert np.flatnonzero(_allowed(guide.mask(end))).tolist() == [EOS]
    assert guide.advance(after_a, 1) == -1
    for no_text in (EOS, 4):
        with pytest.raises(AssertionError, match="no text"):
            guide.advance(guide.start, no_text)


def test_masks_and_guides_are_shared() -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    masks = TokenMasks(tokens, frozenset({EOS}), 256, max_guides=2)
    automata = [compile_regex("a{3}"), compile_regex("a{3}b"), compile_regex("c")]
    first = masks.guide(automata[0])
    assert masks.guide(automata[0]) is first
    assert first.mask(0) is first.mask(1)
    assert first.mask(0) is masks.guide(automata[1]).mask(2)
    assert not first.mask(0).flags.writeable


def test_a_guide_is_the_same_while_it_is_used_and_forgotten_some_time_after() -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    masks = TokenMasks(tokens, frozenset({EOS}), 256, max_guides=2)
    automata = [compile_regex(text) for text in "abcd"]
    guides = [masks.guide(automaton) for automaton in automata]
    for _ in range(3):  # rows of more constraints than are remembered, in turn
        assert all(masks.guide(automaton) is guide for automaton, guide in zip(automata, guides, strict=True))
    watched = [weakref.ref(guide) for guide in guides]
    del guides
    gc.collect()
    assert [watch() is None for watch in watched] == [True, True, False, False]


def _decode_at_random(guide: Guide, masks: TokenMasks, source: random.Random) -> bytes | None:
    """Sample allowed tokens until the end; None when that takes more than 200 tokens."""
    state, data = guide.start, b""
    for _ in range(200):
        token_id = int(source.choice(np.flatnonzero(_allowed_fast(guide.mask(state))).tolist()))
        if not masks.bytes_of(token_id):
            return data
        data += masks.bytes_of(token_id)
        state = guide.advance(state, token_id)
    return None


def _allowed_fast(mask: Bitmask) -> npt.NDArray[np.bool_]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little").astype(np.bool_)


@pytest.mark.parametrize(
    "pattern", [r'\{"name": "[A-Za-z ]{3,24}", "year": [1-9][0-9]{3}\}', ".{0,5}", r"[\x00-\x20]{2,3}", "(?s).{2}"]
)
def test_real_vocabulary(pattern: str, smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = smollm2_tokenizer
    masks = TokenMasks(tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.vocab_size)
    automaton = compile_regex(pattern)
    guide = masks.guide(automaton)
    eos = sorted(tokenizer.eos_token_ids)
    source = random.Random(0)
    for state in {automaton.start, *source.sample(range(automaton.num_states), min(4, automaton.num_states))}:
        expected = np.asarray([bool(b) and automaton.run(state, b) >= 0 for b in tokenizer.token_bytes])
        expected[eos] = automaton.accepting[state]
        assert np.array_equal(_allowed_fast(guide.mask(state))[: tokenizer.vocab_size], expected)
    for _ in range(10):
        data = _decode_at_random(guide, masks, source)
        assert data is not None
        assert automaton.accepts(data)


def test_bytes_the_real_vocabulary_lacks(smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = smollm2_tokenizer
    assert b"\x04" not in tokenizer.token_bytes
    masks = TokenMasks(tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.vocab_size)
    with pytest.raises(ConstraintError) as caught:
        masks.guide(automaton_for_choices(["a\x04"]))
    assert caught.value.code == "untokenizable-constraint"
    guide = masks.guide(compile_regex("a(\x04|b)"))
    assert _decode_at_random(guide, masks, random.Random(0)) == b"ab"
