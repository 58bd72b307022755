"""What drawing a step's tokens takes: milliseconds by rows, vocabulary and filters, on the GPU or the CPU.

    python benchmarks/drawing.py [--baseline]

On a GPU the kernel's draws are first compared with the oracle's, and with the softmax (chi-square). ``--baseline``
times the inverse of the cumulative distribution beside it, sorted where there are filters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglbatch.engine.draw.race import race_keys, random_bits
from sglbatch.engine.draw.torch import draw_tokens
from sglbatch.engine.sampler import Sampling, _ways, sample_tokens

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 40},
    "both": {"top_k": 40, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
}


def logits_of(num_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(num_rows)
    return torch.randn(num_rows, vocab_size, generator=generator, device=device) * 2.5


def samplings_of(num_rows: int, **options: Any) -> list[Sampling]:
    return [Sampling(temperature=1.0, seed=i, position=3, **options) for i in range(num_rows)]


def inverse(logits_RV: torch.Tensor, *, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> torch.Tensor:
    """The baseline: one uniform number against the cumulative distribution."""
    probs_RV = torch.softmax(logits_RV, dim=-1).double()
    order_RV = None
    if top_p < 1 or top_k > 0 or min_p > 0:
        probs_RV, order_RV = probs_RV.sort(dim=-1, descending=True)
        if top_k > 0:
            probs_RV[:, top_k:] = 0
        drop_RV = probs_RV.cumsum(dim=-1) - probs_RV >= top_p * probs_RV.sum(dim=-1, keepdim=True)
        probs_RV = probs_RV.masked_fill(drop_RV | (probs_RV < min_p * probs_RV[:, :1]), 0)
    cumulative_RV = probs_RV.cumsum(dim=-1)
    uniform_R1 = torch.rand(len(probs_RV), 1, device=probs_RV.device, dtype=torch.float64) * cumulative_RV[:, -1:]
    index_R1 = torch.searchsorted(cumulative_RV, uniform_R1, right=True)
    return index_R1 if order_RV is None else order_RV.gather(1, index_R1)


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of single runs, the host's part included."""
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1000)
    return sorted(times[2:])[repeats // 2]


def check(device: torch.device) -> None:
    keys_R2 = torch.from_numpy(race_keys(range(64), range(64)))
    assert random_bits(keys_R2, 131_072).equal(random_bits(keys_R2.to(device), 131_072).cpu()), "bits differ"
    for name, options in FILTERS.items():
        logits_RV = logits_of(512, 49_152, device)
        samplings = samplings_of(512, **options)
        ours = sample_tokens(logits_RV.clone(), samplings).cpu()
        host_RV = logits_RV.cpu()
        oracle = draw_tokens(host_RV, _ways(list(range(512)), samplings, host_RV))
        print(f"{name:8} kernel and oracle draw the same token in {int((ours == oracle).sum())} of 512 rows")
    size, num = 200, 100_000
    logits_RV = (torch.randn(1, size, generator=torch.Generator().manual_seed(0)) * 1.5).to(device)
    tokens = sample_tokens(logits_RV.repeat(num, 1), samplings_of(num)).cpu()
    expected = torch.softmax(logits_RV[0].double(), dim=-1).cpu() * num
    chi_square = float(((torch.bincount(tokens, minlength=size) - expected) ** 2 / expected).sum())
    print(
        f"chi-square of {num:,} draws over {size} tokens: {chi_square:.0f}, to be {size - 1} +- {(2 * size) ** 0.5:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        check(device)
    repeats = 20 if device.type == "cuda" else 5
    print(
        f"{'vocabulary':>10} {'rows':>6} {'filters':8} {'ms':>9}" + (f" {'baseline':>9}" if arguments.baseline else "")
    )
    for vocab_size in (49_152, 128_256):
        for num_rows in arguments.rows or ((1, 64, 1024, 2048) if device.type == "cuda" else (1, 16, 64)):
            logits_RV = logits_of(num_rows, vocab_size, device)
            for name, options in FILTERS.items():
                samplings = samplings_of(num_rows, **options)
                took = milliseconds(lambda: sample_tokens(logits_RV, samplings), device, repeats)  # noqa: B023
                line = f"{vocab_size:>10,} {num_rows:>6,} {name:8} {took:>9.2f}"
                if arguments.baseline:
                    line += f" {milliseconds(lambda: inverse(logits_RV, **options), device, repeats):>9.2f}"  # noqa: B023
                print(line, flush=True)


if __name__ == "__main__":
    main()
