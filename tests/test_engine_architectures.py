"""Models of many shapes with random weights: greedy text through the engine equals transformers' own, token for token.

They cover what one real model does not: sliding windows, attention sinks, soft caps, norms of queries and keys, partial
rotary and learned positions, biases, experts, one or all key/value heads.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sglbatch.engine.loader import check_architecture, make_engine
from sglbatch.engine.model_runner import ATTENTION_NAME
from sglbatch.models import LocalModel
from sglbatch.types import Generate, Request
from tests.engine_stub import VOCAB, StubTokenizer

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
WINDOW = 12
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3},
    "phi3": {"sliding_window": None},
    "cohere": {"num_key_value_heads": 4, "logit_scale": 1.0},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
NUM_TOKENS = 10
NEAR_TIE = 1e-4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_model(name: str) -> tuple[Any, Any]:
    """The same random weights twice: with our attention, and with transformers'."""
    config = AutoConfig.for_model(name, **(COMMON | ARCHITECTURES[name]))
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in reference.parameters():
        parameter.data.normal_(0, 0.25)  # weights as they are initialised give every token the same logit
    ours = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=ATTENTION_NAME).eval()
    ours.load_state_dict(reference.state_dict())
    return ours, reference


def prompts() -> list[np.ndarray]:
    """Shared prefixes of two levels, some longer than the window."""
    rng = np.random.default_rng(0)
    first, second = rng.integers(1, VOCAB, size=40), rng.integers(1, VOCAB, size=9)
    prefixes = [first, np.concatenate([first, second]), second]
    ends = [rng.integers(1, VOCAB, size=n) for n in (1, 3, 17, 5, 2, 8)]
    return [np.concatenate([prefixes[i % 3], end]).astype(np.int32) for i, end in enumerate(ends)]


@torch.inference_mode()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_transformers(name: str, device: str) -> None:
    ours, reference = random_model(name)
    if device == "cuda":
        ours, reference = ours.cuda(), reference.cuda()
    model = LocalModel(name=name, path=Path(name), identity=name, context_len=512, config=reference.config.to_dict())
    check_architecture(model)
    engine = make_engine(
        ours,
        model,
        StubTokenizer(),  # type: ignore[arg-type]
        kv_tokens=300,
        max_batch_tokens=50,
        max_rows=4,
        reserve="soft",
        retain=False,
    )
    operation = Generate(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    engine.submit(
        [
            Request(request_id=i, program_id=i, prompt_ids=ids, operation=operation, seed=i)
            for i, ids in enumerate(prompts())
        ]
    )
    answers: dict[int, tuple[int, ...]] = {}
    while engine.has_unfinished:
        answers |= {r.request_id: r.output_ids for r in engine.step()}
        engine.scheduler.check_integrity()
    for i, prompt in enumerate(prompts()):
        ids = torch.from_numpy(np.concatenate([prompt, np.array(answers[i])]).astype(np.int64)).to(device)[None]
        logits = reference(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        assert logits.std() > 0.1, "a model that gives every token the same logit shows nothing"
        behind = logits.max(dim=-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert float(behind.max()) < NEAR_TIE, (name, i, behind.tolist())
