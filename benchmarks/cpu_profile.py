#!/usr/bin/env python3
"""Where the time of a prefill on the CPU goes: processor seconds of one thread, by what it computes.

    python benchmarks/cpu_profile.py WORKLOADS_DIR/mmlu.jsonl [--rows 200] [--model smollm2-135m]

On one thread, whose processor time the machine's other work changes little. The last line compares the layers' products
with the rate that such a product reaches by itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.models.llama import modeling_llama

from sglbatch.engine import model_runner
from sglbatch.engine.loader import load_engine
from sglbatch.models import resolve_model
from sglbatch.planner import make_plan
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Generate, Request, Text

STEP_TOKENS = 1024
"""What the engine's steps have on a CPU."""


class Timer:
    """Seconds of this thread by what it was doing; what is timed inside counts there only."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = 0.0

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self._inner = self._inner, 0.0
            start = time.thread_time()
            value = function(*args, **kwargs)
            seconds = time.thread_time() - start
            self.seconds[name] += seconds - self._inner
            self._inner = before + seconds
            return value

        return timed


def instrument(timer: Timer, model: nn.Module) -> None:
    for path, module in model.named_modules():
        name = path.rsplit(".", 1)[-1]
        if isinstance(module, nn.Linear):
            kind = "products of the head" if name == "lm_head" else "products of the layers"
        elif "norm" in name:
            kind = "norms"
        elif name in {"mlp", "act_fn"}:
            kind = "activation"
        else:
            continue
        module.forward = timer.around(kind, module.forward)  # type: ignore[method-assign]
    attention: Any = model_runner.TorchAttention
    for method in ("__init__", "write", "__call__"):
        setattr(attention, method, timer.around("attention", getattr(attention, method)))
    rope: Any = modeling_llama
    rope.apply_rotary_pos_emb = timer.around("rotary embedding", rope.apply_rotary_pos_emb)


def product_rate(width: int, out: int) -> float:
    """FLOP a second of one product of a step, the best of many."""
    x, weight = torch.randn(STEP_TOKENS, width), torch.randn(out, width)
    times = []
    for _ in range(40):
        start = time.thread_time()
        linear(x, weight)
        times.append(time.thread_time() - start)
    return 2 * STEP_TOKENS * width * out / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = resolve_model(args.model)
    tokenizer = Tokenizer.load(model.path)
    engine = load_engine(
        model, tokenizer, device="cpu", dtype="float32", max_batch_tokens=STEP_TOKENS, kv_tokens=65_536
    )
    with args.workload.open() as file:
        prompts = [json.loads(line)["prompt"] for line, _ in zip(file, range(args.rows), strict=False)]
    ids = tokenizer.encode_prompts([(Text(prompt),) for prompt in prompts])
    operation = Generate(max_tokens=1, temperature=0.0, ignore_eos=True)
    runner: Any = engine._runner
    timer = Timer()
    instrument(timer, runner._model)
    start = time.thread_time()
    engine.submit(
        [Request(request_id=i, program_id=i, prompt_ids=p, operation=operation, seed=i) for i, p in enumerate(ids)]
    )
    while engine.has_unfinished:
        engine.step()
    total = time.thread_time() - start
    timer.seconds["the rest"] = total - sum(timer.seconds.values())
    unique = make_plan(ids).unique_tokens
    layers: Any = runner.body.body.layers
    flop = 2 * unique * sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    rate = product_rate(int(model.config["hidden_size"]), int(model.config["intermediate_size"]))
    print(
        f"{len(ids)} rows, {sum(map(len, ids))} tokens, {unique} unique: {total:.1f} s, "
        f"{1e3 * total / unique:.2f} ms a token"
    )
    for name, seconds in timer.seconds.most_common():
        print(f"  {name:24}{seconds:7.2f} s {seconds / total:6.1%}")
    achieved = flop / timer.seconds["products of the layers"]
    print(
        f"products: {flop / 1e12:.2f} TFLOP at {achieved / 1e9:.0f} GFLOP/s; "
        f"by itself {rate / 1e9:.0f}: {flop / rate:.1f} s"
    )


if __name__ == "__main__":
    main()
