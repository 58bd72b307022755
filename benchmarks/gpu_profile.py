#!/usr/bin/env python3
"""Where the device's time goes in a few steps in the middle of a run of a workload, with a random-weight model.

    python benchmarks/gpu_profile.py TOKENIZER_DIR WORKLOADS_DIR/mmlu.jsonl [--rows 2600] [--skip 12] [--steps 5]

Kernel times are torch's profiler's. A kind's kernels may run beside one another, and beside those of another kind:
its time is how long at least one of them runs, and "together" how long the device does anything. Gaps of 20
microseconds and more count as idle, shorter ones as gaps between kernels. "undisturbed" is the median of as many steps
without the profiler.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from gpu import SHAPES, Watched, random_engine
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from sglbatch.engine.engine import LocalEngine
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, Request, Text

Interval = tuple[float, float]
"""Begin and end, in microseconds."""

KINDS: Final = {
    "attention": r"attend_tiles",
    "merging attention's parts": r"merge_parts",
    "products": r"gated_product|gemm|nvjet|cutlass|cublas|splitK",
    "norms": r"rms_norm",
    "rotary embedding, writing keys and values": r"rope",
    "activation": r"silu",
}
"""By the names of their kernels; the first that fits."""
OTHER: Final = "the rest"
IDLE_US: Final = 20.0


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), OTHER)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times in which at least one of them runs, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def shares(kernels: Iterable[tuple[str, Interval]]) -> dict[str, float]:
    """Microseconds by kind, largest first, then together, gaps and idle."""
    by_kind: dict[str, list[Interval]] = defaultdict(list)
    for name, interval in kernels:
        by_kind[kind_of(name)].append(interval)
    busy = union(interval for intervals in by_kind.values() for interval in intervals)
    waits = [after[0] - before[1] for before, after in pairwise(busy)]
    found = {kind: length(union(intervals)) for kind, intervals in by_kind.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1])) | {
        "together": length(busy),
        "gaps between kernels": sum(wait for wait in waits if wait < IDLE_US),
        "idle": sum(wait for wait in waits if wait >= IDLE_US),
    }


def submit(engine: LocalEngine, tokenizer: Tokenizer, rows: Sequence[dict[str, Any]]) -> None:
    constraints = {row.get("regex"): Constraint(kind="regex", source=row["regex"]) for row in rows if row.get("regex")}
    prompts = tokenizer.encode_prompts([(Text(row["prompt"]),) for row in rows])
    engine.submit(
        [
            Request(
                request_id=i,
                program_id=i,
                prompt_ids=prompt,
                seed=i,
                operation=Generate(
                    max_tokens=row["max_tokens"],
                    temperature=0.0,
                    ignore_eos=bool(row["ignore_eos"]),
                    constraint=constraints.get(row.get("regex")),
                ),
            )
            for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
        ]
    )


def undisturbed_ms(engine: LocalEngine, num_steps: int) -> float:
    """Milliseconds from the end of one step's launches to the end of the next one's, on the device."""
    watched = Watched(engine)
    for _ in range(num_steps + 1):
        watched.step()
    torch.cuda.synchronize()
    return 1000 * statistics.median(wait + work for wait, work in watched.device_s()[1:])


def profile(engine: LocalEngine, num_steps: int) -> tuple[dict[str, float], list[tuple[int, int]]]:
    """The shares over ``num_steps`` steps, and tokens and pieces of each that was launched meanwhile."""
    watched = Watched(engine)
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            watched.step()
        torch.cuda.synchronize()
    events: Any = profiler.events()
    kernels = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in events
        if event.device_type == DeviceType.CUDA
    ]
    return shares(kernels), [(tokens, pieces) for _, _, tokens, pieces in watched.steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, help="default: all; fewer are tokenised sooner")
    parser.add_argument("--skip", type=int, default=12, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    engine, _, tokenizer = random_engine(args.shape, args.tokenizer)
    with args.workload.open() as file:
        rows = [json.loads(line) for line in file][: args.rows]
    submit(engine, tokenizer, rows)
    for _ in range(args.skip):
        engine.step()
    wall = undisturbed_ms(engine, args.steps)
    found, sizes = profile(engine, args.steps)
    total = sum(found[name] for name in ("together", "gaps between kernels", "idle"))
    print(f"{args.workload.stem}: tokens and pieces of the steps {sizes}; undisturbed {wall:.1f} ms a step")
    for name, us in found.items():
        print(f"  {name:44}{us / 1000 / args.steps:9.2f} ms a step{us / total:7.1%}")


if __name__ == "__main__":
    main()
