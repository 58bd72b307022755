"""The engine on a CUDA GPU with the real model, held to transformers on the same GPU."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from sglbatch.engine.attention.torch import AttentionKind
from sglbatch.engine.batch import FlatBatch, single_sequence
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.loader import load_engine
from sglbatch.models import resolve_model
from sglbatch.planner import make_plan
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, Request, Result, Text

if TYPE_CHECKING:
    from sglbatch.engine.attention.triton import TritonAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "samples"

LARGE_STEP = 32_768
LEFT_BYTES = 256 << 20
"""Of the device's memory, much less than so large a step of the model needs in fp32 (800 MB), much more than one of 128
rows with their logits (75 MB)."""


def texts() -> list[str]:
    """Shipped sample texts, each after the same introduction so that something is shared."""
    rows = [json.loads(line) for line in (SAMPLES / "essays.jsonl").open()]
    long = [max((v for v in row.values() if isinstance(v, str)), key=len) for row in rows]
    introduction = "Read the text and continue it in the same style, without repeating what was said before.\n\n"
    return [introduction * 3 + text for text in long]


@cache
def load(
    dtype: Literal["float32", "bfloat16"], max_batch_tokens: int | None = None
) -> tuple[LocalEngine, Tokenizer, Any]:
    """An engine that has nothing of earlier tests, its tokenizer, and transformers' model of the same type."""
    model = resolve_model("smollm2-135m")
    tokenizer = Tokenizer.load(model.path)
    engine = load_engine(
        model,
        tokenizer,
        device="cuda",
        dtype=dtype,
        kv_tokens=60_000,
        max_batch_tokens=max_batch_tokens,
        reserve="full",
    )
    return engine, tokenizer, reference_model(getattr(torch, dtype))


def run(engine: LocalEngine, prompts: list[np.ndarray], operation: Generate) -> dict[int, Result]:
    requests = [
        Request(request_id=i, program_id=i, prompt_ids=p, operation=operation, seed=i) for i, p in enumerate(prompts)
    ]
    engine.submit(requests)
    results: dict[int, Result] = {}
    while engine.has_unfinished:
        results |= {r.request_id: r for r in engine.step()}
        engine.scheduler.check_integrity()
    return results


def greedy(engine: LocalEngine, prompts: list[np.ndarray], max_tokens: int) -> list[tuple[int, ...]]:
    results = run(engine, prompts, Generate(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
    return [results[i].output_ids for i in range(len(prompts))]


def differs(reference: Any, prompt: np.ndarray, tokens: tuple[int, ...]) -> bool:
    """Whether tokens are not the reference's greedy ones; then its logits have to be as good as equal."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None].cuda()
    for token in tokens:
        logits = reference(ids).logits[0, -1].float()
        best = logits.topk(2)
        if token != int(best.indices[0]):
            gap = float(best.values[0] - best.values[1])
            assert gap < 5e-4, f"differs where the reference is sure ({gap})"
            return True
        ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
    return False


@torch.inference_mode()
def test_fp32_greedy_equals_transformers() -> None:
    engine, tokenizer, reference = load("float32")
    prompts = tokenizer.encode_prompts([(Text(t[: 400 + 90 * i]),) for i, t in enumerate(texts())])
    prompts = [*prompts, *(p[:-7] for p in prompts), prompts[0]]
    answers = greedy(engine, prompts, 24)
    assert sum(differs(reference, p, tokens) for p, tokens in zip(prompts, answers, strict=True)) <= 1


@torch.inference_mode()
def test_long_prompts_enter_in_steps_that_are_replayed() -> None:
    """Parts of a prompt have no states that anybody asks for."""
    engine, tokenizer, reference = load("float32", 1024)
    (prompt,) = tokenizer.encode_prompts([(Text("".join(documents()[-8:])),)])
    prompts = [prompt[:3000], prompt[:3300], prompt[500:1900]]
    answers = greedy(engine, prompts, 6)
    assert engine.stats().steps >= 4700 // 1024 + 5, "the prompts, then the answers"
    assert sum(differs(reference, p, tokens) for p, tokens in zip(prompts, answers, strict=True)) <= 1


def documents() -> list[str]:
    """Real text of many kinds that hardly repeats: what the repository holds, in pieces of 2,000 characters."""
    files = [*sorted(SAMPLES.glob("*.jsonl")), *(ROOT / name for name in ("README.md", "LICENSE", "docs/language.md"))]
    whole = [file.read_text() for file in files]
    return [text[begin : begin + 2000] for text in whole for begin in range(0, len(text), 2000)]


def reference_model(dtype: torch.dtype, attention: str = "sdpa") -> Any:
    path = resolve_model("smollm2-135m").path
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).cuda().eval()


@torch.inference_mode()
def test_bf16_is_as_close_to_transformers_as_its_two_attentions_are_to_each_other() -> None:
    """Teacher-forced next tokens.

    In bf16 4% of the reference's largest logits are shared by two tokens, and other roundings of attention's sums flip
    1% of the others: transformers' "eager" agrees with its "sdpa" on 97.6% of these tokens.
    """
    engine, tokenizer, bf16 = load("bfloat16")
    fp32, eager = reference_model(torch.float32), reference_model(torch.bfloat16, "eager")
    same: Counter[str] = Counter()
    total = 0
    for prompt in tokenizer.encode_prompts([(Text(t),) for t in documents()]):
        ids = torch.from_numpy(prompt.astype(np.int64))[None].cuda()
        logits_TV = bf16(ids).logits[0]
        theirs, exact, others = (m.argmax(dim=-1) for m in (logits_TV, fp32(ids).logits[0], eager(ids).logits[0]))
        ours = torch.tensor([a[0] for a in greedy(engine, [prompt[: n + 1] for n in range(len(prompt))], 1)]).cuda()
        at_ours = logits_TV.gather(1, ours[:, None])[:, 0]
        for name, equal in (
            ("ours/bf16", ours == theirs),
            ("ours/bf16 or tied", at_ours == logits_TV.amax(dim=-1)),
            ("ours/fp32", ours == exact),
            ("eager/bf16", others == theirs),
            ("bf16/fp32", theirs == exact),
        ):
            same[name] += int(equal.sum())
        total += len(prompt)
    shares = {name: count / total for name, count in same.items()}
    print("agreement", total, {name: round(share, 4) for name, share in shares.items()})
    assert shares["ours/bf16"] >= shares["eager/bf16"] - 0.005
    assert shares["ours/bf16 or tied"] >= 0.98
    assert shares["ours/fp32"] >= shares["bf16/fp32"] - 0.005


class SdpaAttention:
    """torch's own attention of one sequence, in the place of the kernels'."""

    def __init__(self, attention: TritonAttention) -> None:
        self.write_slots_T = attention.write_slots_T

    def __call__(self, q_TQD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, kind: AttentionKind) -> Any:
        T, Q, _ = q_TQD.shape
        repeats = Q // k_NKD.shape[1]
        q, k, v = (
            x.transpose(0, 1)[None]
            for x in (q_TQD, k_NKD[:T].repeat_interleave(repeats, 1), v_NKD[:T].repeat_interleave(repeats, 1))
        )
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=kind.scaling)
        return out[0].transpose(0, 1).contiguous()


@torch.inference_mode()
def test_all_but_attention_and_norms_equals_transformers_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's attention and the model's own norms, which sum in another order, no logit of bf16 differs."""
    engine, tokenizer, bf16 = load("bfloat16")
    runner: Any = engine._runner

    def own_norm(x_TH: torch.Tensor, residual_TH: torch.Tensor | None, norm: Any) -> tuple[Any, Any]:
        total_TH = x_TH if residual_TH is None else residual_TH + x_TH
        return norm(total_TH), total_TH

    monkeypatch.setattr("sglbatch.engine.fused.body.add_rms_norm", own_norm)
    for prompt in tokenizer.encode_prompts([(Text(t),) for t in documents()[:8]]):
        batch = single_sequence(prompt.astype(np.int64))
        attention = runner._triton_attention(batch, range(len(prompt)))
        states_TH = runner._fused(attention.input_ids_T, attention.positions_T, SdpaAttention(attention), None)
        ids = torch.from_numpy(prompt.astype(np.int64))[None].cuda()
        assert torch.equal(runner._logits(states_TH), bf16(ids).logits[0])


@torch.inference_mode()
def test_forced_runs_equal_tokens_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with runs of tokens are replayed from graphs too."""
    engine, tokenizer, _ = load("float32")
    pattern = r'\{"name": "[a-z]{1,12}", "kind": "(essay|review|letter)", "number_of_words": [0-9]{1,4}\}'
    operation = Generate(max_tokens=60, temperature=0.0, constraint=Constraint(kind="regex", source=pattern))
    prompts = tokenizer.encode_prompts([(Text(f"{t[: 200 + 10 * i]}\nAs JSON: "),) for t in texts() for i in range(20)])
    found = []
    for jump_forward in (True, False):
        monkeypatch.setattr(engine, "jump_forward", jump_forward)
        results = run(engine, prompts, operation)
        assert all(re.fullmatch(pattern, r.text) for r in results.values())
        found.append([results[i].text for i in range(len(prompts))])
    assert engine.num_jumped_tokens > 0
    assert sum(a == b for a, b in zip(*found, strict=True)) >= 0.97 * len(prompts), "other sums, the same texts"


def test_a_step_that_does_not_fit_the_device_is_run_in_smaller_ones() -> None:
    engine, tokenizer, _ = load("float32", LARGE_STEP)
    prompts = tokenizer.encode_prompts([(Text(f"{i} {t}"),) for t in texts() for i in range(50)])
    before = greedy(engine, prompts, 3)
    assert engine.stats().out_of_memory == 0
    torch.cuda.empty_cache()
    taken = [torch.empty(torch.cuda.mem_get_info()[0] - LEFT_BYTES, dtype=torch.uint8, device="cuda")]
    try:
        after = greedy(engine, prompts, 3)
    finally:
        taken.clear()
    assert engine.stats().out_of_memory > 0
    assert sum(a == b for a, b in zip(after, before, strict=True)) >= 0.95 * len(prompts), "other sums, the same texts"


def counted(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each batch from now on puts into the model."""
    runner: Any = engine._runner
    forward, entered = runner._forward, []

    def count(batch: FlatBatch, *args: Any) -> torch.Tensor:
        entered.append(len(batch.input_ids))
        states: torch.Tensor = forward(batch, *args)
        return states

    monkeypatch.setattr(runner, "_forward", count)
    return entered


def test_planned_tokens_enter_once_also_in_a_small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model("smollm2-135m")
    tokenizer = Tokenizer.load(model.path)
    prompts = tokenizer.encode_prompts([(Text(f"{t}\nQuestion {i}: why?"),) for t in texts() for i in range(20)])
    rng = np.random.default_rng(0)
    prompts = [prompts[i] for i in rng.permutation(len(prompts))]
    operation = Generate(max_tokens=4, temperature=0.0, ignore_eos=True)
    plan = make_plan(prompts, [operation] * len(prompts))
    for kv_tokens in (plan.kv_tokens_minimum, 100_000):
        engine = load_engine(model, tokenizer, device="cuda", kv_tokens=kv_tokens, reserve="full")
        entered = counted(engine, monkeypatch)
        greedy(engine, prompts, 4)
        stats = engine.stats()
        assert stats.computed_prompt_tokens == plan.unique_tokens and stats.recomputed_tokens == 0
        assert plan.unique_tokens <= sum(entered) <= plan.unique_tokens + 4 * len(prompts), "prompts once, answers"
