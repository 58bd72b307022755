"""What gens and selects mean on a real model, held to transformers' own logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import sglbatch as sgl
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.loader import load_engine
from sglbatch.lang.state import ProgramState
from sglbatch.models import LocalModel, resolve_model
from sglbatch.tokenizer import Tokenizer

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def reference(model: LocalModel) -> Iterator[Any]:
    yield AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(model: LocalModel, smollm2_tokenizer: Tokenizer) -> LocalEngine:
    return load_engine(model, smollm2_tokenizer, kv_tokens=4096)


@torch.inference_mode()
def logprobs_after(reference: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [len(ids), vocabulary] of what follows each token."""
    logits = reference(torch.tensor([ids])).logits[0].float()
    return torch.log_softmax(logits, dim=-1)


def token_logprobs(reference: Any, before: list[int], tokens: list[int]) -> list[float]:
    rows = logprobs_after(reference, [*before, *tokens])[len(before) - 1 :]
    return [float(rows[i, token]) for i, token in enumerate(tokens)]


def answer(engine: LocalEngine, prompt: str, **options: Any) -> ProgramState:
    @sgl.function
    def program(s: Any) -> None:
        s += prompt + sgl.gen("x", **({"temperature": 0} | options))

    state = program.run(backend=engine)
    assert state.error() is None, state.error()
    engine.scheduler.check_integrity()
    return state


# --- log-probabilities -------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_output_logprobs(engine: LocalEngine, reference: Any, smollm2_tokenizer: Tokenizer, temperature: float) -> None:
    prompt = "The capital of France is"
    state = answer(
        engine,
        prompt,
        max_tokens=6,
        temperature=temperature,
        return_logprob=True,
        top_logprobs_num=3,
        return_text_in_logprobs=True,
    )
    meta = state.get_meta_info("x")
    entries = meta["output_token_logprobs"]
    ids = [token_id for _, token_id, _ in entries]
    assert len(ids) == meta["completion_tokens"] and "".join(text for _, _, text in entries).startswith(state["x"])
    before = smollm2_tokenizer.encode(prompt)
    expected = token_logprobs(reference, before, ids)
    assert [logprob for logprob, _, _ in entries] == pytest.approx(expected, abs=TOLERANCE)
    rows = logprobs_after(reference, [*before, *ids])[len(before) - 1 : -1]
    for top, row in zip(meta["output_top_logprobs"], rows, strict=True):
        best = row.topk(3)
        assert [logprob for logprob, _, _ in top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        assert [token_id for _, token_id, _ in top] == best.indices.tolist()


@pytest.mark.parametrize("start", [0, 1, 3])
def test_input_logprobs(engine: LocalEngine, reference: Any, smollm2_tokenizer: Tokenizer, start: int) -> None:
    prompt = "Water boils at one hundred degrees"
    before = engine.stats()
    options: dict[str, Any] = {"max_tokens": 4, "return_logprob": True, "logprob_start_len": start}
    meta = answer(engine, prompt, **options).get_meta_info("x")
    after = engine.stats()
    ids = smollm2_tokenizer.encode(prompt)
    entries = meta["input_token_logprobs"]
    assert [token_id for _, token_id, _ in entries] == ids[start:]
    first = max(start, 1)
    expected = token_logprobs(reference, ids[:first], ids[first:])
    assert [logprob for logprob, _, _ in entries if logprob is not None] == pytest.approx(expected, abs=TOLERANCE)
    assert (entries[0][0] is None) == (start == 0)
    assert meta["normalized_prompt_logprobs"] == pytest.approx(np.mean(expected), abs=TOLERANCE)
    assert after.prompt_tokens - before.prompt_tokens == len(ids)
    assert after.computed_prompt_tokens - before.computed_prompt_tokens == len(ids)
    assert answer(engine, prompt, max_tokens=4)["x"] == answer(engine, prompt, **options)["x"]


# --- choices -----------------------------------------------------------------------------------

CHOICES = [" Paris", " New York", " New Jersey", " the city of London"]


def chosen(engine: LocalEngine, before: str, choices: list[str], method: object) -> tuple[str, dict[str, Any]]:
    @sgl.function
    def program(s: Any) -> None:
        s += before + sgl.select("x", choices, choices_method=method) + "."

    state = program.run(backend=engine)
    assert state.error() is None, state.error()
    engine.scheduler.check_integrity()
    assert state.text() == before + state["x"] + "."
    return state["x"], state.get_meta_info("x")


def choice_logprobs(reference: Any, tokenizer: Tokenizer, before: str, choices: list[str]) -> list[list[float]]:
    prompt = tokenizer.encode(before)
    return [token_logprobs(reference, prompt, tokenizer.encode(before + choice)[len(prompt) :]) for choice in choices]


@pytest.mark.parametrize("before", ["The largest city is", "The capital of France is"])
def test_choices_methods(engine: LocalEngine, reference: Any, smollm2_tokenizer: Tokenizer, before: str) -> None:
    scored = choice_logprobs(reference, smollm2_tokenizer, before, CHOICES)
    means = [sum(values) / len(values) for values in scored]
    by_mean, meta = chosen(engine, before, CHOICES, sgl.token_length_normalized)
    assert by_mean == CHOICES[int(np.argmax(means))]
    assert meta["normalized_prompt_logprobs"] == pytest.approx(means, abs=TOLERANCE)
    for entries, values in zip(meta["input_token_logprobs"], scored, strict=True):
        assert [logprob for logprob, _ in entries] == pytest.approx(values, abs=TOLERANCE)

    longest = max(map(len, scored))
    matrix = [values + [mean] * (longest - len(values)) for values, mean in zip(scored, means, strict=True)]
    left = list(range(len(CHOICES)))
    for column in range(longest):
        best = max(matrix[i][column] for i in left)
        left = [i for i in left if matrix[i][column] > best - TOLERANCE]
    greedy, meta = chosen(engine, before, CHOICES, sgl.greedy_token_selection)
    assert greedy == CHOICES[left[0]]
    assert np.allclose(meta["greedy_logprob_matrix"], matrix, atol=TOLERANCE)

    alone = []
    for choice in CHOICES:
        ids = smollm2_tokenizer.encode(before + choice)[len(smollm2_tokenizer.encode(before)) :]
        alone.append([0.0, *(token_logprobs(reference, ids[:1], ids[1:]) if len(ids) > 1 else [])])
    gains = [float(np.mean(np.subtract(a, b))) for a, b in zip(scored, alone, strict=True)]
    unconditional, meta = chosen(engine, before, CHOICES, "unconditional_likelihood_normalized")
    assert unconditional == CHOICES[int(np.argmax(gains))]
    assert meta["normalized_unconditional_prompt_logprobs"] == pytest.approx(gains, abs=TOLERANCE)


def test_exact_choices(engine: LocalEngine, reference: Any, smollm2_tokenizer: Tokenizer) -> None:
    before = "The largest city is"
    whole = [sum(values) for values in choice_logprobs(reference, smollm2_tokenizer, before, CHOICES)]
    probabilities = np.exp(whole) / np.exp(whole).sum()
    exact, meta = chosen(engine, before, CHOICES, None)
    assert exact == CHOICES[int(np.argmax(probabilities))]
    assert np.exp(meta["normalized_prompt_logprobs"]) == pytest.approx(probabilities, abs=TOLERANCE)
    assert chosen(engine, before, CHOICES, sgl.exact) == (exact, {**meta, "cached_tokens": 0})


def test_a_choice_that_changes_the_prompts_last_token(engine: LocalEngine, smollm2_tokenizer: Tokenizer) -> None:
    """ "Answer: " ends in a space that belongs to the token of "A"; then that token is the choice's."""
    encode = smollm2_tokenizer.encode
    _, meta = chosen(engine, "Answer: ", ["A", "B", " C"], sgl.token_length_normalized)
    ids = [[token_id for _, token_id in entries] for entries in meta["input_token_logprobs"]]
    assert ids == [encode(" A"), encode(" B"), encode(" C")]


# --- sampling options --------------------------------------------------------------------------


@torch.inference_mode()
def penalised(reference: Any, ids: list[int], num: int, frequency: float, presence: float) -> list[int]:
    """Greedy tokens with penalties, one forward pass each."""
    new: list[int] = []
    for _ in range(num):
        logits = reference(torch.tensor([[*ids, *new]])).logits[0, -1].float()
        for token in set(new):
            logits[token] -= frequency * new.count(token) + presence
        new.append(int(logits.argmax()))
    return new


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.5), (-0.5, 0.3)])
def test_penalties(
    engine: LocalEngine, reference: Any, smollm2_tokenizer: Tokenizer, frequency: float, presence: float
) -> None:
    prompt = "one two one two one two"
    state = answer(
        engine, prompt, max_tokens=10, frequency_penalty=frequency, presence_penalty=presence, ignore_eos=True
    )
    expected = penalised(reference, smollm2_tokenizer.encode(prompt), 10, frequency, presence)
    assert state["x"] == smollm2_tokenizer.decode(expected)
    assert state["x"] != answer(engine, prompt, max_tokens=10, ignore_eos=True)["x"]


def test_min_tokens_and_ignore_eos(engine: LocalEngine) -> None:
    def run(**options: Any) -> tuple[str, int, str]:
        @sgl.function
        def ask(s: Any) -> None:
            s += sgl.user("Say hello.") + sgl.assistant(sgl.gen("x", max_tokens=40, temperature=0, **options))

        state = ask.run(backend=engine)
        meta = state.get_meta_info("x")
        return state["x"], meta["completion_tokens"], meta["finish_reason"]["type"]

    text, count, reason = run()
    assert reason == "stop" and count < 40
    longer, more, _ = run(min_tokens=count + 5)
    assert more > count + 5 - 1 and longer.startswith(text)
    ignored, all_of_them, reason = run(ignore_eos=True)
    assert (all_of_them, reason) == (40, "length") and ignored.startswith(text)


def test_stops(engine: LocalEngine, smollm2_tokenizer: Tokenizer) -> None:
    prompt = "one, two, three, four,"
    whole = answer(engine, prompt, max_tokens=12)["x"]
    first = smollm2_tokenizer.encode(whole)[2]
    by_token = answer(engine, prompt, max_tokens=12, stop_token_ids=[first])
    assert by_token["x"] == smollm2_tokenizer.decode(smollm2_tokenizer.encode(whole)[:2])
    assert by_token.get_meta_info("x")["finish_reason"] == {"type": "stop"}
    by_pattern = answer(engine, prompt, max_tokens=12, stop_regex=r"[a-z]{4},|zzz")
    assert len(by_pattern["x"]) < len(whole) and whole.startswith(by_pattern["x"])
    assert by_pattern["x"].endswith(" ")
    late = answer(engine, prompt, max_tokens=12, stop=",", min_tokens=3)["x"]
    assert answer(engine, prompt, max_tokens=12, stop=",")["x"] == whole.partition(",")[0] != late
    assert whole.startswith(late)


def test_several_answers(engine: LocalEngine) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "My favourite animal is" + sgl.gen("x", n=4, max_tokens=5, temperature=1.0) + "!" + sgl.gen("y", n=2)

    state = program.run(backend=engine, max_new_tokens=3)
    assert len(state["x"]) == 4 and len(set(state["x"])) > 1 and len(state["y"]) == 2
    assert state.text() == f"My favourite animal is{state['x'][0]}!{state['y'][0]}"
    again = program.run(backend=engine, max_new_tokens=3)
    assert again["x"] == state["x"]

    @sgl.function
    def alone(s: Any) -> None:
        s += "My favourite animal is" + sgl.gen("x", max_tokens=5)

    assert alone.run(backend=engine)["x"] == state["x"][0], "the first answer is the one that n=1 gives"
    assert [meta["prompt_tokens"] for meta in state.get_meta_info("x")] == [4] * 4


# --- reading while it runs, and what stays in memory -------------------------------------------


def test_streaming(engine: LocalEngine) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Once upon a time" + sgl.gen("x", max_tokens=8, stop="zz") + " The end." + sgl.gen("y", max_tokens=4)

    whole = program.run(backend=engine, temperature=0)
    state = program.run(backend=engine, temperature=0, stream=True)
    pieces = list(state.text_iter("x"))
    assert "".join(pieces) == whole["x"] and len(pieces) > 4
    state = program.run(backend=engine, temperature=0, stream=True)
    assert "".join(state.text_iter()) == whole.text()


def test_cache_and_flush(model: LocalModel, smollm2_tokenizer: Tokenizer) -> None:
    backend = sgl.Runtime(model_path="smollm2-135m", kv_tokens=1024)

    @sgl.function
    def program(s: Any, word: str) -> None:
        s += "A beginning that all rows share, and that is known before any of them. " + word
        s += sgl.gen("x", max_tokens=2)

    program.cache(backend)
    shared = len(smollm2_tokenizer.encode("A beginning that all rows share, and that is known before any of them."))
    cached = program.run("Cats", backend=backend).get_meta_info("x")["cached_tokens"]
    assert shared <= cached <= shared + 1
    assert sgl.flush_cache(backend)
    assert program.run("Dogs", backend=backend).get_meta_info("x")["cached_tokens"] == 0
    backend.scheduler.check_integrity()
    info = sgl.get_server_info(backend)
    assert info["context_len"] == model.context_len and info["requests"] == 3
    backend.shutdown()  # as programs for SGLang's runtime end
