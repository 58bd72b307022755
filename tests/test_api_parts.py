"""The parts of API models that need no server: limits, failures, keys, addresses, the table of families."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglbatch.api_spec.failures import Failure, backoff_s, of_status, redact
from sglbatch.api_spec.families import check_question, family_of
from sglbatch.api_spec.limits import Limits, duration_s, retry_after_s
from sglbatch.api_spec.model import resolve_api_model
from sglbatch.api_spec.speculation import PROBES, Speculation
from sglbatch.errors import SglbatchError
from sglbatch.types import Generate


@given(st.floats(30, 6000), st.lists(st.tuples(st.floats(0, 3), st.integers(1, 400)), min_size=1, max_size=200))
def test_no_minute_holds_more_than_its_limit(per_min: float, calls: list[tuple[float, int]]) -> None:
    """Calls start as soon as they may; in no window of 60 s are there more than 1/60 above the limit (and one)."""
    limits = Limits(requests_per_min=per_min)
    now, starts = 0.0, []
    for pause, tokens in calls:
        now += pause
        while (wait := limits.wait_s(now, tokens)) > 0:
            now += wait + 1e-6
        limits.start(now, tokens)
        starts.append(now)
    most = max(sum(at <= start < at + 60 for start in starts) for at in starts)
    assert most <= per_min * 61 / 60 + 1


def test_limits_are_learned_and_the_lower_one_counts() -> None:
    limits = Limits(requests_per_min=600)
    limits.learn(0.0, {"x-ratelimit-limit-requests": "60", "x-ratelimit-limit-tokens": "6000"})
    limits.start(0.0, 100)
    assert limits.wait_s(0.0, 0) > 0.5
    limits.learn(1.0, {"x-ratelimit-limit-requests": "100000"})
    assert limits.wait_s(100.0, 1) == 0
    limits.learn(100.0, {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1m30s"})
    assert limits.wait_s(100.0, 1) == 60.0
    limits.learn(300.0, {"x-ratelimit-limit-requests": "nonsense", "x-ratelimit-reset-requests": "soon"})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("6m0s", 360), ("1.5s", 1.5), ("20ms", 0.02), ("1h2m", 3720), ("7", 7), ("", None), ("5x", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration_s(text) == seconds


def test_waiting_as_asked() -> None:
    assert retry_after_s({"retry-after": "3"}) == 3 and retry_after_s({"retry-after-ms": "20"}) == 0.02
    assert retry_after_s({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}) is None
    again = Failure(what="again", code="x", message="x")
    rng = random.Random(0)
    assert all(0.25 * 2**i <= backoff_s(i + 1, again, rng) <= min(60, 0.5 * 2**i) for i in range(7))
    asked = Failure(what="limit", code="x", message="x", retry_after_s=5)
    assert 5 <= backoff_s(1, asked, rng) <= 5.5


@pytest.mark.parametrize(
    ("status", "body", "what", "code"),
    [
        (401, '{"error": {"message": "no"}}', "job", "bad-api-key"),
        (429, '{"error": {"message": "slow", "code": "rate_limit_exceeded"}}', "limit", "rate-limit"),
        (429, '{"error": {"message": "pay", "code": "insufficient_quota"}}', "job", "no-quota"),
        (404, '{"error": {"message": "no model"}}', "job", "unknown-api-model"),
        (500, "<html>oops</html>", "again", "server-error"),
        (529, "", "again", "server-error"),
        (400, '{"error": {"message": "x", "code": "content_filter"}}', "row", "content-filter"),
        (400, '{"error": {"message": "x", "code": "context_length_exceeded"}}', "row", "prompt-too-long"),
        (400, '{"error": "a text"}', "row", "refused-request"),
        (400, "[]", "row", "refused-request"),
    ],
)
def test_what_a_status_means(status: int, body: str, what: str, code: str) -> None:
    failure = of_status(status, body, retry_after_s=None, key=None)
    assert (failure.what, failure.code) == (what, code)


def test_keys_never_show() -> None:
    text = redact("Incorrect key sk-abc***xyz1 in Bearer tok3n; yours is my-odd-key", "my-odd-key")
    assert text == "Incorrect key [key] in [key] yours is [key]"
    assert len(redact("x" * 5000, None)) == 300


def test_a_key_travels_only_where_it_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert resolve_api_model("openai/gpt-5-mini").key() == "sk-1"
    assert resolve_api_model("openai/x", base_url="https://example.com/v1").key() is None
    assert resolve_api_model("openai/x", base_url="http://127.0.0.1:1/v1", key_env="OPENAI_API_KEY").key() == "sk-1"
    with pytest.raises(SglbatchError) as error:
        resolve_api_model("openai/x", base_url="http://example.com/v1", key_env="OPENAI_API_KEY")
    assert error.value.code == "key-over-http"
    model = resolve_api_model("openai/x", base_url="https://me:secret@example.com:8443/v1/?a=b")
    assert model.base_url == "https://example.com:8443/v1" and "secret" not in model.identity
    for url in ("ftp://x/v1", "127.0.0.1:80", "http://", "http://[bad"):
        with pytest.raises(SglbatchError, match="--base-url"):
            resolve_api_model("openai/x", base_url=url)


def test_families() -> None:
    assert family_of("gpt-5-mini", own_endpoint=False).name == "reasoning"
    assert family_of("o4-mini", own_endpoint=False).max_tokens_field == "max_completion_tokens"
    assert family_of("gpt-4o-mini", own_endpoint=False).schema
    assert not family_of("gpt-4-turbo", own_endpoint=False).schema
    assert not family_of("gpt-3.5-turbo-instruct", own_endpoint=False).chat
    assert family_of("anything", own_endpoint=True).completions
    with pytest.raises(SglbatchError, match="not called like"):
        family_of("llama-3", own_endpoint=False)
    reasoning = family_of("gpt-5", own_endpoint=False)
    check_question(Generate(max_tokens=5, temperature=1.0, stop=("x",)), reasoning, "gpt-5")
    for question in (Generate(max_tokens=5, temperature=0), Generate(max_tokens=5, top_k=5)):
        with pytest.raises(SglbatchError, match="cannot honour"):
            check_question(question, reasoning, "gpt-5")


def test_speculation_stops_where_it_does_not_pay() -> None:
    speculation = Speculation()
    assert [speculation.begin("a") for _ in range(PROBES + 2)] == [True] * PROBES + [False] * 2
    for _ in range(PROBES):
        speculation.record("a", saved_prompt_tokens=10, used_tokens=0, reach=0, wasted_tokens=20)
    assert not speculation.begin("a") and speculation.begin("b") and speculation.num_off == 1
    for _ in range(PROBES):
        speculation.record("b", saved_prompt_tokens=300, used_tokens=8, reach=16, wasted_tokens=20)
    assert all(speculation.begin("b") for _ in range(100))
    assert speculation.budget("b", 100) == 24 and speculation.budget("b", 10) == 10
