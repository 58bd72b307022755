"""Programs that run by themselves on a server: ``OpenAI`` and ``RuntimeEndpoint`` under the names of the language."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import sglbatch as sgl
from sglbatch.api_spec.backend import ApiBackend
from tests.fault_proxy import FaultProxy


@pytest.fixture(scope="module")
def endpoint(api_url: str) -> Iterator[ApiBackend]:
    backend = sgl.RuntimeEndpoint(api_url.removesuffix("/v1"))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def chat_model(api_url: str) -> Iterator[ApiBackend]:
    backend = sgl.OpenAI("smollm2", base_url=api_url)
    yield backend
    backend.close()


@sgl.function
def capital(s: Any, country: str) -> str:
    s += "France: Paris\nSpain: Madrid\nItaly: Rome\n" + country + ":"
    s += sgl.gen("city", max_tokens=8, stop="\n")
    return str(s["city"]).strip()


@sgl.function
def interview(s: Any, question: str) -> None:
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, stop="."))
    s += sgl.user("Is that in Europe? Answer with yes or no.")
    with s.assistant():
        s += sgl.select("europe", choices=["yes", "no"])


def test_the_server_is_asked_for_its_model(endpoint: ApiBackend, api_url: str) -> None:
    assert endpoint.identity == f"api:{api_url}#smollm2"
    info = sgl.get_server_info(endpoint)
    assert info["model_identity"] == endpoint.identity and sgl.flush_cache(endpoint) is False


def test_a_state_has_its_text_variables_and_meta_info(endpoint: ApiBackend) -> None:
    state = capital.run(country="Germany", backend=endpoint, temperature=0)
    assert state.error() is None
    assert state["city"].strip() == "Berlin" == state.ret_value
    assert state.text() == f"France: Paris\nSpain: Madrid\nItaly: Rome\nGermany:{state['city']}"
    assert "city" in state and state.get_var("city") == state["city"]
    meta = state.get_meta_info("city")
    assert meta["finish_reason"] == {"type": "stop"} and meta["prompt_tokens"] > 10 and meta["completion_tokens"] > 0
    assert capital.run(country="Germany", backend=endpoint, temperature=0).text() == state.text()


def test_a_batch_comes_back_in_its_order_and_one_row_fails_alone(endpoint: ApiBackend) -> None:
    @sgl.function
    def ask(s: Any, country: str) -> None:
        if country == "Nowhere":
            raise ValueError("there is no such country")
        s += "France: Paris\nSpain: Madrid\nItaly: Rome\n" + country + ":" + sgl.gen("city", max_tokens=8, stop="\n")

    rows = [{"country": name} for name in ("Germany", "Nowhere", "Japan", "Germany")]
    states = ask.run_batch(rows, backend=endpoint, temperature=0, num_threads=4)
    assert [state.error() is not None for state in states] == [False, True, False, False]
    assert [states[i]["city"].strip() for i in (0, 2, 3)] == ["Berlin", "Tokyo", "Berlin"]
    with pytest.raises(sgl.SglbatchError, match="no such country"):
        _ = states[1]["city"]
    lazily = ask.run_batch([("Japan",), ("Germany",)], backend=endpoint, temperature=0, generator_style=True)
    assert [state["city"].strip() for state in lazily] == ["Tokyo", "Berlin"]


def test_roles_are_messages(chat_model: ApiBackend) -> None:
    state = interview.run(question="What is the capital of France?", backend=chat_model, temperature=0)
    assert state.error() is None and "Paris" in state["answer"] and state["europe"] in ("yes", "no")
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert state.messages()[-1]["content"] == state["europe"]
    assert state.messages()[2]["content"] == state["answer"]


def test_values_can_be_read_while_the_program_runs(endpoint: ApiBackend) -> None:
    @sgl.function
    def two(s: Any) -> None:
        s += "One, two, three," + sgl.gen("first", max_tokens=4)
        s += " and then" + sgl.gen("second", max_tokens=4)

    state = two.run(backend=endpoint, temperature=0, stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text() and state["second"] in state.text()
    assert "".join(two.run(backend=endpoint, temperature=0, stream=True).text_iter("first")) == state["first"]

    async def read() -> str:
        streamed = two.run(backend=endpoint, temperature=0, stream=True)
        return "".join([piece async for piece in streamed.text_async_iter("second")])

    assert asyncio.run(read()) == state["second"]


def test_branches_constraints_and_several_answers(endpoint: ApiBackend) -> None:
    @sgl.function
    def forked(s: Any) -> None:
        s += "Facts. "
        branches = s.fork(2)
        branches += [f"{name} was born in the year " + sgl.gen("year", regex="1[0-9]{3}") for name in ("Ada", "Carl")]
        branches.join()
        s += "Three words: " + sgl.gen("words", max_tokens=4, n=2, temperature=1.0)
        s += "\nA number: " + sgl.gen("number", dtype=int, max_tokens=8)

    state = forked.run(backend=endpoint, temperature=0, seed=1)
    assert state.error() is None, state.error()
    assert all(len(year) == 4 and year[0] == "1" for year in state["year"])
    assert len(state["words"]) == 2 and int(state["number"]) is not None


def test_the_default_backend_serves_every_program(endpoint: ApiBackend) -> None:
    sgl.set_default_backend(endpoint)
    try:
        assert capital.run(country="Japan", temperature=0)["city"].strip() == "Tokyo"
    finally:
        sgl.set_default_backend(None)


def test_speculation_is_each_programs_own(api_url: str) -> None:
    """Programs of two places at a time: what one has been given ahead is not the other's."""

    def card(s: Any, name: str, year: str) -> None:
        s += "Name: Ada\nBorn: 1815\n\nName: Carl\nBorn: 1777\n\nName: Emmy\nBorn: 1882\n\n"
        s += f"{name} was born in {year}.\nName:" + sgl.gen("name", max_tokens=8, stop="\n")
        s += "\nBorn:" + sgl.gen("born", max_tokens=8, stop="\n")

    rows = [{"name": name, "year": str(1900 + i)} for i, name in enumerate(("Lise", "Otto", "Rosa", "Hugo"))]
    with FaultProxy(upstream=api_url.removesuffix("/v1")).running() as proxy:
        backend = sgl.OpenAI("smollm2", base_url=proxy.base_url, concurrency=4)
        states = sgl.function(card, num_api_spec_tokens=64).run_batch(rows, backend=backend, temperature=0)
        assert len(proxy.seen) < 2 * len(rows), "some were filled ahead"
        single = sgl.function(card, num_api_spec_tokens=0).run_batch(rows, backend=backend, temperature=0)
        backend.close()
    assert [state.text() for state in states] == [state.text() for state in single]
    assert [state["born"] for state in states] == [state["born"] for state in single]


def test_a_failing_call_is_the_states_error(api_url: str) -> None:
    with FaultProxy(upstream=api_url.removesuffix("/v1"), fault=lambda number: "filtered").running() as proxy:
        backend = sgl.OpenAI("smollm2", base_url=proxy.base_url)
        state = capital.run(country="Japan", backend=backend, temperature=0)
        backend.close()
    error = state.error()
    assert error is not None and error.code == "content-filter"
    with pytest.raises(sgl.SglbatchError):
        _ = state["city"]


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sgl.ModelError) as error:
        sgl.RuntimeEndpoint("http://127.0.0.1:9")
    assert error.value.code == "no-endpoint" and "127.0.0.1:9" in error.value.message
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(sgl.ModelError) as missing:
        sgl.OpenAI("gpt-4.1-mini")
    assert missing.value.code == "no-api-key"
