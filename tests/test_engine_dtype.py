"""fp32 and bf16 against transformers, token by token: what each dtype's next token is after the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglbatch.engine.loader import load_engine
from sglbatch.models import resolve_model
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Generate, Request, Text, TokenIds
from tests.engine_workloads import mixed_prompts

NEAR_TIE = 5e-4
"""fp32 may differ where the reference's two best logits are closer than this."""
MAX_BF16_GAP = 0.5
"""bf16 steps are 0.06 to 0.12 wide at the size of these logits."""
MAX_BF16_SHARE = 0.05

Dtype = Literal["float32", "bfloat16"]


def next_tokens(tokenizer: Tokenizer, texts: list[TokenIds], dtype: Dtype) -> np.ndarray:
    """The greedy token after every prefix of every text. All prefixes are requests: each token is computed once."""
    engine = load_engine(resolve_model("smollm2-135m"), tokenizer, dtype=dtype, device="cpu", kv_tokens=4096)
    operation = Generate(max_tokens=1, temperature=0.0, ignore_eos=True)
    prefixes = [ids[:end] for ids in texts for end in range(1, len(ids) + 1)]
    engine.submit(
        [Request(request_id=i, program_id=i, prompt_ids=p, operation=operation, seed=i) for i, p in enumerate(prefixes)]
    )
    found: dict[int, int] = {}
    while engine.has_unfinished:
        found |= {r.request_id: r.output_ids[0] for r in engine.step()}
    return np.array([found[i] for i in range(len(prefixes))])


@torch.inference_mode()
def reference_logits(path: Path, texts: list[TokenIds], dtype: Dtype) -> torch.Tensor:
    """[tokens of all texts, vocabulary], fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    return torch.cat([model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].float() for ids in texts])


@pytest.mark.parametrize("num_each", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_next_tokens_of_fp32_and_bf16(smollm2_dir: Path, smollm2_tokenizer: Tokenizer, num_each: int) -> None:
    """fp32 equals the reference; bf16 strays from fp32 no further, and no more often, than transformers' bf16 may."""
    texts = smollm2_tokenizer.encode_prompts([(Text(t),) for t in mixed_prompts(num_each=num_each, shots=1)])
    reference = reference_logits(smollm2_dir, texts, "float32")
    expected = reference.argmax(dim=-1).numpy()
    best = reference.topk(2).values
    gap = (best[:, 0] - best[:, 1]).numpy()
    theirs = reference_logits(smollm2_dir, texts, "bfloat16").argmax(dim=-1).numpy()
    fp32 = next_tokens(smollm2_tokenizer, texts, "float32") != expected
    bf16 = next_tokens(smollm2_tokenizer, texts, "bfloat16")
    strayed = bf16 != expected
    print(
        f"{len(expected)} tokens; differ from fp32 transformers: ours fp32 {fp32.sum()}, bf16 {strayed.sum()}, "
        f"transformers bf16 {(theirs != expected).sum()}; the two bf16 differ in {(bf16 != theirs).sum()}"
    )
    assert gap[fp32].max(initial=0.0) < NEAR_TIE
    assert gap[strayed].max(initial=0.0) < MAX_BF16_GAP
    assert strayed.mean() < MAX_BF16_SHARE
    assert (bf16 != theirs).mean() < MAX_BF16_SHARE
