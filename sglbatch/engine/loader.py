"""Loads a model into an engine: weights, checks that attention is really ours, and the size of the pool."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.model_runner import ATTENTION_NAME, ModelRunner
from sglbatch.engine.rehearsal import rehearse
from sglbatch.engine.scheduler import SchedulerConfig
from sglbatch.errors import ModelError
from sglbatch.models import LocalModel
from sglbatch.tokenizer import Tokenizer

KV_MEMORY_SHARE = 0.3
"""Share of the free memory that the KV pool may take by default."""
MAX_DEFAULT_SLOTS = 262_144
GPU_SPARE_BYTES = 2 << 30
"""Left free on a GPU for libraries' workspaces and fragmentation."""
CPU_BATCH_TOKENS = 1024
TOKENS_FOR_MULTIPROCESSOR = 64
"""A step's tokens for each of a GPU's multiprocessors.

Products are cut into tiles of 128 rows by 256 columns, one for each multiprocessor in a round. With half as many rows
of tiles as there are multiprocessors (8,448 tokens on an H200) every product whose width is a multiple of 512 takes
whole rounds.
"""
DEFAULT_ROWS = {"cpu": 128, "cuda": 2048}
"""Rows that decode at once: on a GPU as many as one step takes. More would be computed no faster, and all end later."""
SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def load_engine(
    model: LocalModel,
    tokenizer: Tokenizer,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    kv_tokens: int | None = None,
    max_batch_tokens: int | None = None,
    max_rows: int | None = None,
    reserve: Literal["soft", "full"] = "soft",
    retain: bool = False,
) -> LocalEngine:
    """A ready engine on this machine.

    Args:
        device: "auto" is a CUDA GPU where there is one.
        dtype: of weights and KV; "auto" is float32 on a CPU, bfloat16 on a GPU.
        kv_tokens: slots of the KV pool; by default what is free holds (on a CPU: 30% of what is free).
        max_batch_tokens, max_rows, reserve, retain: see SchedulerConfig.

    Raises:
        ModelError: no such device; an architecture whose layers are not all attention that we compute; too little
            memory.
    """
    check_architecture(model)
    chosen = choose_device(device)
    kind = chosen.type if dtype == "auto" else dtype
    module = load_module(model, chosen, torch.float32 if kind in ("cpu", "float32") else torch.bfloat16)
    return make_engine(
        module,
        model,
        tokenizer,
        kv_tokens=kv_tokens,
        max_batch_tokens=max_batch_tokens or default_batch_tokens(chosen),
        max_rows=max_rows or DEFAULT_ROWS[chosen.type],
        reserve=reserve,
        retain=retain,
    )


def make_engine(
    module: nn.Module,
    model: LocalModel,
    tokenizer: Tokenizer,
    *,
    kv_tokens: int | None,
    max_batch_tokens: int,
    max_rows: int,
    reserve: Literal["soft", "full"],
    retain: bool,
) -> LocalEngine:
    """An engine around a loaded transformers model; see ``load_engine``."""
    runner = make_runner(module, model, tokenizer)
    on_gpu = runner.device.type == "cuda"
    num_slots = kv_tokens or default_num_slots(runner, max_batch_tokens)
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
    new_engine = partial(
        LocalEngine,
        runner,
        tokenizer,
        identity=model.identity,
        context_len=model.context_len,
        scheduler_config=config,
        overlap=on_gpu,
    )
    if on_gpu:
        runner.fuse()
        runner.warm_up(max_batch_tokens)
        rehearse(new_engine())
    return new_engine()


def choose_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device asked for, or the best there is."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ModelError(
            "no-gpu",
            "there is no CUDA GPU that this torch can use",
            hint="use --device cpu, or install a CUDA build of torch and a matching driver",
        )
    return torch.device("cuda" if has_gpu and device != "cpu" else "cpu")


def default_batch_tokens(device: torch.device) -> int:
    """Tokens of a step, where the user does not say."""
    if device.type == "cpu":
        return CPU_BATCH_TOKENS
    return TOKENS_FOR_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


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


def load_module(model: LocalModel, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The transformers model with our attention in every layer."""
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
    try:
        return module.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "out-of-memory",
            f"the weights of {model.name} do not fit the GPU's memory",
            hint="use a smaller model, or free the GPU",
        ) from error


def make_runner(module: nn.Module, model: LocalModel, tokenizer: Tokenizer) -> ModelRunner:
    """The model without a pool yet.

    Raises:
        ModelError: a layer that never calls our attention; no triton for a GPU.
    """
    module.eval()
    on_gpu = next(module.parameters()).device.type == "cuda"
    vocab_size = min(tokenizer.vocab_size, _vocab_size(model))
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise ModelError("no-triton", "a GPU needs the triton package", hint="pip install 'sglbatch[cuda]'")
    runner = ModelRunner(module, vocab_size=vocab_size, kernels="triton" if on_gpu else "torch")
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


def default_num_slots(runner: ModelRunner, max_batch_tokens: int) -> int:
    """What the free memory holds, less what a step needs for itself."""
    if runner.device.type == "cuda":
        free = torch.cuda.mem_get_info(runner.device)[0]
        usable = free - runner.step_bytes(max_batch_tokens) - GPU_SPARE_BYTES
        num_slots = usable // runner.bytes_per_slot
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        num_slots = min(int(free * KV_MEMORY_SHARE) // runner.bytes_per_slot, MAX_DEFAULT_SLOTS)
    if num_slots < 1024:
        raise ModelError(
            "out-of-memory",
            f"only {free / 2**30:.1f} GiB of memory are free, too little for a useful KV pool",
            hint="free some memory, use a smaller model, or set --kv-tokens",
        )
    return num_slots
