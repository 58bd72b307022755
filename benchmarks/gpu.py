#!/usr/bin/env python3
"""Runs the workload files on a GPU with a random-weight model and writes the times.

    python benchmarks/gpu.py TOKENIZER_DIR WORKLOAD.jsonl ... [--shape llama-8b] [--out results.json]
    python benchmarks/gpu.py TOKENIZER_DIR json.jsonl [--no-jump-forward | --rebuild-masks]

TOKENIZER_DIR holds a tokenizer.json (SmolLM2's for the published numbers). Each workload goes from prompts in memory to
texts out: tokenising, planning, running. Rows, token counts and the hit rate are checked; a wrong count fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.loader import make_engine
from sglbatch.engine.model_runner import ATTENTION_NAME
from sglbatch.models import LocalModel
from sglbatch.planner import make_plan
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, Request, Text

SHAPES: dict[str, dict[str, int]] = {
    "llama-8b": {"intermediate_size": 14336, "num_key_value_heads": 8},
    "llama-7b": {"intermediate_size": 11008, "num_key_value_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "num_attention_heads": 4,
             "num_hidden_layers": 2},
}  # fmt: skip
COMMON = {
    "vocab_size": 49152,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
}
TFLOPS = 788e12
"""Dense bf16 rate measured on the H200, for the floor."""


def random_model(shape: str, device: str) -> LlamaForCausalLM:
    config = LlamaConfig(**(COMMON | SHAPES[shape]), attn_implementation=ATTENTION_NAME, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def operation(row: dict[str, Any]) -> Generate:
    """The row's call. Constraints are shared by all rows that have the same regex."""
    regex = row.get("regex")
    return Generate(
        max_tokens=row["max_tokens"],
        temperature=0.0,
        ignore_eos=bool(row["ignore_eos"]),
        constraint=Constraint(kind="regex", source=regex) if regex else None,
    )


def with_own_constraints(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows, each regex one that no other row has: a comment says which row's it is.

    So every row compiles its automaton, makes its masks and looks for its forced runs, as an engine does that keeps
    nothing of a constraint from one request to the next.
    """
    return [row | ({"regex": f"{row['regex']}(?#row {i})"} if row.get("regex") else {}) for i, row in enumerate(rows)]


def floor_s(engine: LocalEngine, config: Any, plan: Any, rows: list[dict[str, Any]], out_tokens: int) -> float:
    """The arithmetic of every unique prompt token and every output token, as the workloads' floor.py counts it."""
    head = config.hidden_size // config.num_attention_heads
    layer = config.hidden_size * head * 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    lengths, lcp = plan.lengths.astype(float), plan.lcp.astype(float)
    context = float((lengths * (lengths + 1) / 2 - lcp * (lcp + 1) / 2).sum())
    tokens_out = [r["max_tokens"] for r in rows]
    context += sum(n * float(lengths.mean()) + n * n / 2 for n in tokens_out) * out_tokens / max(1, sum(tokens_out))
    flop = 2 * layer * config.num_hidden_layers * (plan.unique_tokens + out_tokens)
    flop += 2 * config.vocab_size * config.hidden_size * (len(rows) + out_tokens)
    flop += 4 * config.num_hidden_layers * config.num_attention_heads * head * context
    return float(flop / TFLOPS)


def run_workload(engine: LocalEngine, tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prompts in memory to texts out."""
    gc.collect()
    before, jumped = engine.stats(), engine.num_jumped_tokens
    start = time.perf_counter()
    prompts = tokenizer.encode_prompts([(Text(row["prompt"]),) for row in rows])
    operations = [operation(row) for row in rows]
    plan = make_plan(prompts, operations)
    planned = time.perf_counter()
    positions = plan.positions().tolist()
    requests = [
        Request(request_id=i, program_id=i, prompt_ids=p, operation=o, seed=i, priority=(position,))
        for i, (p, o, position) in enumerate(zip(prompts, operations, positions, strict=True))
    ]
    engine.submit(requests)
    gc.freeze()
    gc.disable()
    results, step_s = {}, []
    while engine.has_unfinished:
        begin = time.perf_counter()
        for result in engine.step():
            results[result.request_id] = result
        launched = engine._in_flight[0] if engine._in_flight else None
        size = (launched.num_tokens, len(launched.pieces)) if launched else (0, 0)
        step_s.append((round(time.perf_counter() - begin, 4), *size))
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    end = time.perf_counter()
    gc.enable()
    after = engine.stats()
    assert len(results) == len(rows) and all(r.error is None for r in results.values())
    out_tokens = after.generated_tokens - before.generated_tokens
    if all(row["ignore_eos"] for row in rows):
        assert out_tokens == sum(row["max_tokens"] for row in rows), "wrong number of output tokens"
    computed = after.computed_prompt_tokens - before.computed_prompt_tokens
    recomputed = after.recomputed_tokens - before.recomputed_tokens
    assert computed - recomputed == plan.unique_tokens, (computed, recomputed, plan.unique_tokens)
    return {
        "seconds": round(end - start, 3),
        "plan_s": round(planned - start, 3),
        "rows": len(rows),
        "prompt_tokens": plan.num_tokens,
        "unique_tokens": plan.unique_tokens,
        "computed_tokens": computed,
        "recomputed_tokens": recomputed,
        "hit_rate": round(1 - computed / plan.num_tokens, 4),
        "best_hit_rate": round(plan.best_hit_rate, 4),
        "out_tokens": out_tokens,
        "steps": after.steps - before.steps,
        "jumped_tokens": engine.num_jumped_tokens - jumped,
        "plan": plan,
        "step_log": step_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--kv-tokens", type=int)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--max-rows", type=int, default=4096)
    parser.add_argument("--reserve", default="soft", choices=["soft", "full"])
    parser.add_argument("--no-jump-forward", action="store_true", help="forced tokens take a step each")
    parser.add_argument("--rebuild-masks", action="store_true", help="every row's constraint is built anew")
    parser.add_argument("--profile", action="store_true", help="print where the device's time goes, first 60 steps")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    module = random_model(args.shape, device)
    tokenizer = Tokenizer.load(args.tokenizer)
    config = module.config
    model = LocalModel(
        name=args.shape,
        path=args.tokenizer,
        identity=args.shape,
        context_len=8192,
        config=config.to_dict(),
    )
    engine = make_engine(
        module,
        model,
        tokenizer,
        kv_tokens=args.kv_tokens,
        max_batch_tokens=args.max_batch_tokens,
        max_rows=args.max_rows,
        reserve=args.reserve,
        retain=False,
    )
    engine.jump_forward = not args.no_jump_forward
    load_s = time.perf_counter() - start
    print(f"load and warm-up {load_s:.1f} s, {engine.scheduler.config.num_slots} KV tokens", flush=True)
    table = []
    for file in args.files:
        rows = [json.loads(line) for line in file.open()][: args.limit]
        if args.rebuild_masks:
            rows = with_own_constraints(rows)
        if args.profile:
            profile(engine, tokenizer, rows, file.stem)
            continue
        result = run_workload(engine, tokenizer, rows)
        log = result.pop("step_log")
        if args.out:
            args.out.with_name(f"steps-{file.stem}.json").write_text(json.dumps(log))
        floor = floor_s(engine, config, result.pop("plan"), rows, result["out_tokens"])
        line = {"workload": file.stem, "model": args.shape, "kv_tokens": engine.scheduler.config.num_slots}
        line |= {"jump_forward": engine.jump_forward, "rebuild_masks": args.rebuild_masks}
        line |= {"floor_s": round(floor, 2), "load_s": round(load_s, 1), **result}
        table.append(line)
        shown = ("workload", "seconds", "floor_s", "plan_s", "hit_rate", "best_hit_rate", "recomputed_tokens")
        print({name: line[name] for name in (*shown, "out_tokens", "jumped_tokens", "steps")}, flush=True)
    if args.out and table:
        args.out.write_text(json.dumps({"machine": machine(), "results": table}, indent=1))


def profile(engine: LocalEngine, tokenizer: Tokenizer, rows: list[dict[str, Any]], name: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    prompts = tokenizer.encode_prompts([(Text(row["prompt"]),) for row in rows])
    engine.submit(
        [
            Request(request_id=i, program_id=i, prompt_ids=p, operation=operation(rows[i]), seed=i)
            for i, p in enumerate(prompts)
        ]
    )
    for _ in range(40):
        engine.step()
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        begin = time.perf_counter()
        for _ in range(10):
            engine.step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    print(f"--- {name}: 10 steps in {wall * 1000:.0f} ms")
    print(prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=18, max_name_column_width=48))
    while engine.has_unfinished:
        engine.step()


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    import transformers
    import triton

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
