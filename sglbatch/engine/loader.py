"""Loads a model into an engine: weights, checks that attention is really ours, and the size of the pool."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.model_runner import ATTENTION_NAME, ModelRunner
from sglbatch.engine.scheduler import SchedulerConfig
from sglbatch.errors import ModelError
from sglbatch.models import LocalModel
from sglbatch.tokenizer import Tokenizer

KV_MEMORY_SHARE = 0.3
"""Share of the free memory that the KV pool may take by default."""
MAX_DEFAULT_SLOTS = 262_144
SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def load_engine(
    model: LocalModel,
    tokenizer: Tokenizer,
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    kv_tokens: int | None = None,
    max_batch_tokens: int = 1024,
    max_rows: int = 128,
    reserve: Literal["soft", "full"] = "soft",
    retain: bool = False,
) -> LocalEngine:
    """A ready engine on this machine's CPU.

    Args:
        dtype: of weights and KV; "auto" is float32 on a CPU.
        kv_tokens: slots of the KV pool; by default what 30% of the free memory holds.
        max_batch_tokens, max_rows, reserve, retain: see SchedulerConfig.

    Raises:
        ModelError: for an architecture whose layers are not all attention that we compute, or too little memory.
    """
    check_architecture(model)
    runner = load_runner(model, tokenizer, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    num_slots = kv_tokens or default_num_slots(runner.bytes_per_slot)
    try:
        runner.allocate(num_slots)
    except RuntimeError as error:
        raise ModelError(
            "out-of-memory",
            f"{num_slots} KV tokens need {num_slots * runner.bytes_per_slot / 2**30:.1f} GiB of memory",
            hint="give a smaller --kv-tokens",
        ) from error
    config = SchedulerConfig(
        num_slots=num_slots,
        max_batch_tokens=max_batch_tokens,
        max_rows=max_rows,
        reserve=reserve,
        retain=retain,
    )
    return LocalEngine(
        runner, tokenizer, identity=model.identity, context_len=model.context_len, scheduler_config=config
    )


def check_architecture(model: LocalModel) -> None:
    """Refuses what would be computed wrongly, by the config alone.

    Raises:
        ModelError: linear, convolutional or hybrid layers; position embeddings that depend on the batch.
    """
    config = model.config
    kinds = set(config.get("layer_types") or ())
    if not kinds <= SUPPORTED_LAYERS:
        raise ModelError(
            "unsupported-architecture",
            f"{model.name} has layers of kind {', '.join(sorted(kinds - SUPPORTED_LAYERS))}",
            hint="only models whose every layer is full or sliding-window attention are supported",
        )
    rope = _rope_type(config)
    if rope in BATCH_DEPENDENT_ROPE:
        raise ModelError(
            "unsupported-architecture",
            f"{model.name} uses {rope} position embeddings, which depend on what else is in the batch",
            hint="use a model with fixed position embeddings",
        )


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(rope.get("rope_type", rope.get("type", "default")))


def load_runner(model: LocalModel, tokenizer: Tokenizer, dtype: torch.dtype) -> ModelRunner:
    """The model with our attention in every layer; no pool yet."""
    transformers_logging.disable_progress_bar()
    try:
        module: nn.Module = AutoModelForCausalLM.from_pretrained(
            model.path, dtype=dtype, attn_implementation=ATTENTION_NAME, use_safetensors=True, trust_remote_code=False
        )
    except ValueError as error:
        raise ModelError(
            "unsupported-architecture",
            f"{model.name} cannot be loaded: {error}",
            hint="it needs a causal language model that transformers knows and whose attention can be replaced",
        ) from error
    finally:
        transformers_logging.enable_progress_bar()
    module.eval()
    runner = ModelRunner(module, vocab_size=min(tokenizer.vocab_size, _vocab_size(model)))
    num_layers = int(_text_config(model).get("num_hidden_layers") or _text_config(model).get("n_layer") or 0)
    silent = sorted(set(range(num_layers)) - set(runner.probe()))
    if silent or not num_layers:
        raise ModelError(
            "unsupported-architecture",
            f"layers {silent} of {model.name} do not use the attention interface",
            hint="such layers would be computed without our KV pool; use another model",
        )
    return runner


def _text_config(model: LocalModel) -> Mapping[str, Any]:
    text: Mapping[str, Any] = model.config.get("text_config") or model.config
    return text


def _vocab_size(model: LocalModel) -> int:
    return int(_text_config(model)["vocab_size"])


def default_num_slots(bytes_per_slot: int) -> int:
    """What 30% of the memory that is free now holds."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_slots = min(int(available * KV_MEMORY_SHARE) // bytes_per_slot, MAX_DEFAULT_SLOTS)
    if num_slots < 1024:
        raise ModelError(
            "out-of-memory",
            f"only {available / 2**30:.1f} GiB of memory are free, too little for a useful KV pool",
            hint="free some memory, use a smaller model, or set --kv-tokens",
        )
    return num_slots
