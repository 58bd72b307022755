"""The engine on a real model, held to transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.loader import check_architecture, load_engine
from sglbatch.engine.sampler import Sampling, sample
from sglbatch.errors import ModelError
from sglbatch.models import LocalModel, resolve_model
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Choose, Constraint, Generate, Request, Result, Text
from tests.engine_workloads import mixed_prompts

MAX_GAP = 5e-4
"""A first divergence is excused only where the reference's two best logits are closer than this."""


@pytest.fixture(scope="module")
def model(smollm2_dir: Path) -> LocalModel:
    assert smollm2_dir.is_dir()
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(model: LocalModel) -> Tokenizer:
    return Tokenizer.load(model.path)


@pytest.fixture(scope="module")
def reference(model: LocalModel) -> Iterator[Any]:
    yield AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(model: LocalModel, tokenizer: Tokenizer) -> LocalEngine:
    return load_engine(model, tokenizer, kv_tokens=8192)


def run(engine: LocalEngine, requests: list[Request]) -> dict[int, Result]:
    engine.submit(requests)
    results: dict[int, Result] = {}
    while engine.has_unfinished:
        results |= {r.request_id: r for r in engine.step()}
        engine.scheduler.check_integrity()
    return results


def generate_requests(prompts: list[np.ndarray], max_tokens: int) -> list[Request]:
    operation = Generate(max_tokens=max_tokens, temperature=0.0)
    return [
        Request(request_id=i, program_id=i, prompt_ids=p, operation=operation, seed=i) for i, p in enumerate(prompts)
    ]


@torch.inference_mode()
def first_divergence_gap(reference: Any, prompt: np.ndarray, ours: tuple[int, ...], theirs: list[int]) -> float | None:
    """None when equal; else the reference's gap between its two best tokens where the texts part."""
    if list(ours) == theirs:
        return None
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    ids = torch.tensor([*prompt.tolist(), *theirs[:same]])[None]
    best = reference(ids).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


@torch.inference_mode()
def reference_ids(reference: Any, tokenizer: Tokenizer, prompt: np.ndarray, max_tokens: int) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    output = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    new: list[int] = output[0, len(prompt) :].tolist()
    return new[: next((i for i, t in enumerate(new) if t in tokenizer.eos_token_ids), len(new))]


def check_against_reference(
    engine: LocalEngine, reference: Any, tokenizer: Tokenizer, prompts: list[np.ndarray], max_tokens: int
) -> int:
    """Returns how many rows part from the reference at a near-tie; any other difference fails."""
    expected = [reference_ids(reference, tokenizer, p, max_tokens) for p in prompts]
    num_ties = 0
    for order in (list(range(len(prompts))), np.random.default_rng(0).permutation(len(prompts)).tolist()):
        results = run(engine, generate_requests([prompts[i] for i in order], max_tokens))
        for place, i in enumerate(order):
            gap = first_divergence_gap(reference, prompts[i], results[place].output_ids, expected[i])
            assert gap is None or gap < MAX_GAP, f"row {i} differs where the reference is sure ({gap})"
            num_ties += gap is not None
    return num_ties


def test_greedy_equals_transformers(engine: LocalEngine, reference: Any, tokenizer: Tokenizer) -> None:
    prompts = tokenizer.encode_prompts([(Text(t),) for t in mixed_prompts(num_each=4, shots=1)])
    assert check_against_reference(engine, reference, tokenizer, prompts, 12) <= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_64_prompts_equal_transformers(engine: LocalEngine, reference: Any, tokenizer: Tokenizer) -> None:
    prompts = tokenizer.encode_prompts([(Text(t),) for t in mixed_prompts(num_each=32, shots=3)])
    assert check_against_reference(engine, reference, tokenizer, prompts, 32) <= 2, "at most 1 in 64 for each order"


@pytest.mark.parametrize("settings", [{"kv_tokens": 700}, {"kv_tokens": 900, "max_batch_tokens": 64}])
def test_small_pools_give_the_same_text(
    model: LocalModel, tokenizer: Tokenizer, engine: LocalEngine, settings: dict[str, int]
) -> None:
    prompts = tokenizer.encode_prompts([(Text(t),) for t in mixed_prompts(num_each=3, shots=1)])
    expected = run(engine, generate_requests(prompts, 10))
    for reserve in ("soft", "full"):
        small = load_engine(model, tokenizer, reserve=reserve, **settings)  # type: ignore[arg-type]
        results = run(small, generate_requests(prompts, 10))
        assert [results[i].text for i in results] == [expected[i].text for i in results]


@torch.inference_mode()
def test_choices_score_as_transformers(engine: LocalEngine, reference: Any, tokenizer: Tokenizer) -> None:
    """The probability of each whole alternative within 1e-4 of the reference's, one and several tokens long."""
    (prompt,) = tokenizer.encode_prompts([(Text("Q: What colour is the sky?\nA: The sky is"),)])
    texts = [" blue", " dark blue", " dark", " green", " dark grey"]
    alternatives = tuple(tuple(tokenizer.encode(t)) for t in texts)
    request = Request(
        request_id=0, program_id=0, prompt_ids=prompt, operation=Choose(alternatives=alternatives), seed=0
    )
    (result,) = run(engine, [request]).values()
    whole = []
    for a in alternatives:
        logits = reference(torch.tensor([*prompt.tolist(), *a])[None]).logits[0]
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        whole.append(float(sum(logprobs[len(prompt) - 1 + j, t] for j, t in enumerate(a))))
    mass = np.exp(whole)
    mass[2] -= mass[1] + mass[4]
    assert result.choice_logprobs == pytest.approx(np.log(mass / mass.sum()).tolist(), abs=1e-4)
    assert result.choice == int(np.argmax(mass))


def test_regex_and_stop(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    prompt, free = tokenizer.encode_prompts(
        [(Text("The year the first human walked on the moon was "),), (Text("List: one, two, three,"),)]
    )
    year = Generate(max_tokens=8, temperature=0.0, constraint=Constraint(kind="regex", source=r"(18|19|20)[0-9]{2}"))
    stop = Generate(max_tokens=30, temperature=0.0, stop=(",",))
    short = Generate(max_tokens=2, temperature=0.9, constraint=Constraint(kind="regex", source=r"[a-z]{40}"))
    requests = [
        Request(request_id=0, program_id=0, prompt_ids=prompt, operation=year, seed=0),
        Request(request_id=1, program_id=1, prompt_ids=free, operation=stop, seed=0),
        Request(request_id=2, program_id=2, prompt_ids=free, operation=short, seed=3),
    ]
    results = run(engine, requests)
    assert len(results[0].text) == 4 and results[0].finish_reason == "constraint"
    assert results[1].text.strip() == "four" and results[1].finish_reason == "stop"
    assert results[2].finish_reason == "length" and results[2].text.isalpha()


def test_stop_at_a_special_token(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    """Special tokens have no text in the output, so a stop string that is one must be met as a token."""
    (prompt,) = tokenizer.encode_prompts([(Text("<|im_start|>", frozenset({"<|im_start|>"})),)])
    base = {"max_tokens": 6, "temperature": 0.0}
    operations = [Generate(**base), Generate(**base, stop=(tokenizer.bos_token,))]  # type: ignore[arg-type]
    free, stopped = (
        run(engine, [Request(request_id=0, program_id=0, prompt_ids=prompt, operation=o, seed=0)])[0]
        for o in operations
    )
    special = tokenizer.specials[tokenizer.bos_token]
    expected = free.output_ids[: free.output_ids.index(special)] if special in free.output_ids else free.output_ids
    assert stopped.output_ids == expected


def test_unusable_constraints_are_errors(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    (prompt,) = tokenizer.encode_prompts([(Text("x"),)])
    bad = Generate(max_tokens=3, constraint=Constraint(kind="regex", source="a(?=b)"))
    result = run(engine, [Request(request_id=0, program_id=0, prompt_ids=prompt, operation=bad, seed=0)])[0]
    assert result.error is not None and result.error.code == "unsupported-regex"


def test_sampling_depends_on_the_seed_only(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    """The same seeds give the same texts whatever else runs and in which order."""
    prompts = tokenizer.encode_prompts([(Text(t),) for t in ["Once upon a time", "The best thing about", "Dear"]])
    operation = Generate(max_tokens=8, temperature=1.0)

    def texts(order: list[int]) -> dict[int, str]:
        requests = [
            Request(request_id=i, program_id=i, prompt_ids=prompts[i % 3], operation=operation, seed=i) for i in order
        ]
        return {i: r.text for i, r in run(engine, requests).items()}

    together = texts([0, 1, 2, 3, 4, 5])
    assert texts([4, 0]) == {i: together[i] for i in (4, 0)}
    assert together[0] != together[3], "another seed, another text"


@torch.inference_mode()
def test_the_last_bits_of_real_logits_hardly_ever_flip_a_sampled_token(reference: Any, tokenizer: Tokenizer) -> None:
    """As when a job goes on after a kill, with other batches: 6,000 draws from logits computed in two ways."""
    text = "Resuming a job must not change what it has said. " * 20
    ids = torch.tensor([list(tokenizer.encode(text))[:120]])
    whole = reference(ids).logits[0]
    cache, parts = None, []
    for part in ids.split(7, dim=1):
        output = reference(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits[0])
    pieced = torch.cat(parts)
    assert 1e-6 < float((whole - pieced).abs().max()) < 1e-3
    num_seeds, flips = 50, 0
    for seed in range(num_seeds):
        samplings = [Sampling(temperature=1.0, seed=seed, position=i) for i in range(len(whole))]
        tokens = zip(sample(whole.clone(), samplings), sample(pieced.clone(), samplings), strict=True)
        flips += sum(a != b for a, b in tokens)
    assert flips * 5000 < num_seeds * len(whole), f"{flips} of {num_seeds * len(whole)} flipped"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
    ],
)
def test_architectures_that_would_be_wrong_are_refused(model: LocalModel, change: dict[str, Any], message: str) -> None:
    odd = LocalModel(name="odd", path=model.path, identity="odd", context_len=10, config={**model.config, **change})
    with pytest.raises(ModelError, match=message):
        check_architecture(odd)
