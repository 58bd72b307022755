"""Text from tokens: stop strings, and what lies wholly inside the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglbatch.engine.text import TextBuffer

TOKENS = [b"", b"a", b"b", b"ab", b"\n", b".\n", "é".encode()[:1], "é".encode()[1:], b"END"]


def run(tokens: list[int], *stop: str) -> tuple[str, tuple[int, ...], str, bool]:
    ids: list[int] = []
    buffer = TextBuffer(TOKENS, ids, stop)
    stopped = False
    for token in tokens:
        ids.append(token)
        stopped = buffer.stops()
        if stopped:
            break
    return (*buffer.result(), stopped)


def test_stop_inside_a_token() -> None:
    assert run([1, 5], "\n") == ("a.", (1,), ".", True)


def test_stop_over_tokens() -> None:
    assert run([2, 1, 2], "ab") == ("b", (2,), "", True)


def test_earliest_stop_wins() -> None:
    assert run([3, 8], "END", "b") == ("a", (), "a", True)


def test_split_character() -> None:
    assert run([6, 7]) == ("é", (6, 7), "", False)
    assert run([1, 6]) == ("a\ufffd", (1, 6), "", False)


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=12), st.lists(st.sampled_from(["a", "ba", "\n", "ND"])))
def test_against_str_find(tokens: list[int], stop: list[str]) -> None:
    text, ids, tail, stopped = run(tokens, *stop)
    whole = b"".join(TOKENS[t] for t in tokens).decode("utf-8", "replace")
    ends = [whole.find(s) for s in stop if s in whole]
    if not ends:
        assert not stopped and text == whole and list(ids) == tokens
    else:
        assert stopped and text in whole and not any(s in text for s in stop)
        assert b"".join(TOKENS[t] for t in ids).decode("utf-8", "replace") + tail == text
