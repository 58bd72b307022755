#!/usr/bin/env python3
"""Times the tokenising of a file of prompts that share text, and holds the ids to the library's.

    python benchmarks/tokenise.py TOKENIZER_DIR WORKLOAD.jsonl [--repeats 3] [--out results.json]

TOKENIZER_DIR holds a tokenizer.json; WORKLOAD.jsonl has one {"prompt": ...} a line. Three things are timed, from
prompts in memory to ids: the prompts with the library's own ``encode_batch`` (in slices, its encodings let go at once),
the prompts with ``encode_prompts``, and four alternatives after each of them, as a select asks for. The figure is the
best of the repeats; a new tokenizer each time, so that nothing is left in a cache and the first call's check of the
tokenizer counts. CPU seconds beside it: on a machine with other work they say more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Prompt, Text, TokenIds

ALTERNATIVES = (" A", " B", " C", " D")
_SLICE = 2000


def library_ids(library: Any, texts: Sequence[str]) -> list[TokenIds]:
    ids: list[TokenIds] = []
    for begin in range(0, len(texts), _SLICE):
        encodings = library.encode_batch(texts[begin : begin + _SLICE], add_special_tokens=False)
        ids += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
    return ids


def best_of(repeats: int, make: Callable[[], Callable[[], list[TokenIds]]]) -> tuple[dict[str, float], list[TokenIds]]:
    """The fastest of some runs, each freshly made, and the ids of the last."""
    runs = []
    for _ in range(repeats):
        run = make()
        wall, cpu = time.perf_counter(), time.process_time()
        ids = run()
        runs.append({"seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu})
    return min(runs, key=lambda figures: figures["seconds"]), ids


def sharing_run(folder: Path, prompts: Sequence[Prompt]) -> Callable[[], Callable[[], list[TokenIds]]]:
    def make() -> Callable[[], list[TokenIds]]:
        tokenizer = Tokenizer.load(folder)
        return lambda: tokenizer.encode_prompts(prompts)

    return make


def library_run(folder: Path, texts: Sequence[str]) -> Callable[[], Callable[[], list[TokenIds]]]:
    import tokenizers

    def make() -> Callable[[], list[TokenIds]]:
        library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda: library_ids(library, texts)

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="folder with a tokenizer.json")
    parser.add_argument("workload", type=Path, help='one {"prompt": ...} a line')
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with args.workload.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["prompt"] for line in lines]
    prompts: list[Prompt] = [(Text(text),) for text in texts]
    chosen: list[Prompt] = [(Text(text), Text(end)) for text in texts for end in ALTERNATIVES]
    results: dict[str, Any] = {}
    cases = {
        "encode_batch": library_run(args.tokenizer, texts),
        "encode_prompts": sharing_run(args.tokenizer, prompts),
        "encode_prompts, 4 alternatives": sharing_run(args.tokenizer, chosen),
    }
    expected: list[TokenIds] = []
    for name, make in cases.items():
        figures, ids = best_of(args.repeats, make)
        num_tokens = sum(len(x) for x in ids)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        results[name] = figures | {"num_prompts": len(ids), "num_tokens": num_tokens, "peak_mb": peak_mb}
        if name == "encode_batch":
            expected = ids
        elif name == "encode_prompts":
            bos_len = len(Tokenizer.load(args.tokenizer).bos_ids)
            assert all(np.array_equal(a, b[bos_len:]) for a, b in zip(expected, ids, strict=True)), "other ids"
            expected = []
        print(
            f"{name:32} {len(ids):7,} prompts {num_tokens:12,} tokens  {figures['seconds']:6.2f} s "
            f"({figures['cpu_s']:6.2f} s CPU), peak {peak_mb:,.0f} MB",
            flush=True,
        )
    if args.out:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        about = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "commit": commit}
        about |= {
            "load": os.getloadavg(),
            "date": time.strftime("%Y-%m-%d"),
            "tokenizers": version("tokenizers"),
            "numpy": version("numpy"),
        }
        args.out.write_text(json.dumps({"workload": args.workload.stem, **about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
