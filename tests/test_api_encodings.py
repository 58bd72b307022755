"""OpenAI's own tokenizers: what is sent is counted as they count it, without network."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglbatch.api_spec import encodings
from sglbatch.api_spec.encodings import Encoding, load_encoding
from sglbatch.api_spec.families import family_of
from sglbatch.api_spec.tokens import ByteCounter, counter_for


@pytest.fixture(scope="module")
def o200k() -> Encoding:
    found = load_encoding("o200k")
    assert found is not None
    return found


def test_known_ids(o200k: Encoding) -> None:
    """Ids that tiktoken's documentation and its users name."""
    assert o200k.ids("hello world") == [24912, 2375]
    cl100k = load_encoding("cl100k")
    assert cl100k is not None and cl100k.ids("tiktoken is great!") == [83, 1609, 5963, 374, 2294, 0]


@settings(deadline=None)
@given(st.text(max_size=200))
def test_text_comes_back(o200k: Encoding, text: str) -> None:
    assert o200k.decode(o200k.ids(text)) == text.encode("utf-8", "replace").decode()


def test_special_tokens_in_data_are_text(o200k: Encoding) -> None:
    assert o200k.decode(o200k.ids("<|endoftext|>")) == "<|endoftext|>"
    assert len(o200k.ids("<|endoftext|>")) > 1
    assert o200k.ids("\ud800") == o200k.ids("?")


def test_messages_are_framed_as_documented(o200k: Encoding) -> None:
    """OpenAI's cookbook: 3 and the role for each message, 3 for the answer's beginning."""
    messages = [("system", "You are helpful."), ("user", "hello")]
    texts = sum(len(o200k.ids(text)) for _, text in messages)
    assert len(o200k.chat_ids(messages)) == texts + 2 * 4 + 3
    assert len(o200k.chat_ids([("user", "hello")])) == 8


def test_long_texts_are_cut_where_no_token_changes(o200k: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The quick  brown fox, jumps\n over 12345 lazy dogs. " * 40
    whole = o200k.ids(text)
    monkeypatch.setattr(encodings, "PIECE_CHARS", 50)
    assert o200k.ids(text) == whole
    assert o200k.decode(o200k.ids("x" * 501)) == "x" * 501


def test_a_counter_says_what_it_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    known = counter_for(None, family_of("gpt-4.1-mini", own_endpoint=False))
    assert known.exact and known.guess is None
    assert known.first("one two three four", 2) == "one two"
    reasoning = counter_for(None, family_of("gpt-5-mini", own_endpoint=False))
    assert reasoning.exact and reasoning.guess is not None and "messages" in reasoning.guess
    assert isinstance(counter_for(None, family_of("any", own_endpoint=True)), ByteCounter)
    load_encoding.cache_clear()
    monkeypatch.setitem(sys.modules, "bpe_openai", None)
    missing = counter_for(None, family_of("gpt-4.1-mini", own_endpoint=False))
    load_encoding.cache_clear()
    assert not missing.exact and missing.guess is not None and "sglbatch[openai]" in missing.guess
