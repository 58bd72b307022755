#!/usr/bin/env python3
"""Compares engines on the CPU: the same model, the same rows, greedy, one process for each run, alternating.

    python benchmarks/cpu.py WORKLOADS_DIR --gguf MODEL.gguf [--repeats 3] [--threads 2] [--out results/cpu-DATE.json]

WORKLOADS_DIR holds mmlu.jsonl, gsm8k.jsonl and unique.jsonl: one {"prompt": ...} a line. A run goes from prompts in
memory to texts out; loading and a first small batch are left out. The first repeat tries every setting of an engine,
the later ones only the best of them; the figure is the median of the best setting's runs. Peers get their rows in the
order that suits them: transformers by length, the others depth-first as ours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

WORKLOADS: dict[str, tuple[int, int]] = {"mmlu": (200, 1), "gsm8k": (32, 64), "unique": (32, 64)}
"""Name -> (rows, tokens to generate; the end of the sequence is ignored, so that all do the same work)."""
OURS = "sglbatch"
Job = dict[str, Any]
Run = Callable[[list[str]], list[str]]
"""Prompts in, generated texts out; the same number of tokens for every row."""


# --- engines: each returns what is timed -----------------------------------------------------------


def sglbatch_run(job: Job) -> Run:
    import torch

    from sglbatch.engine.loader import load_engine
    from sglbatch.models import resolve_model
    from sglbatch.tokenizer import Tokenizer
    from sglbatch.types import Generate, Request, Text

    torch.set_num_threads(job["threads"])
    model = resolve_model(job["model"])
    tokenizer = Tokenizer.load(model.path)
    engine = load_engine(model, tokenizer, device="cpu", dtype=job["dtype"])

    def run(prompts: list[str]) -> list[str]:
        operation = Generate(max_tokens=job["max_tokens"], temperature=0.0, ignore_eos=True)
        ids = tokenizer.encode_prompts([(Text(prompt),) for prompt in prompts])
        engine.submit(
            [Request(request_id=i, program_id=i, prompt_ids=p, operation=operation, seed=i) for i, p in enumerate(ids)]
        )
        texts: dict[int, str] = {}
        while engine.has_unfinished:
            for result in engine.step():
                assert result.error is None and result.usage.generated_tokens == job["max_tokens"], result
                texts[result.request_id] = result.text
        return [texts[i] for i in range(len(prompts))]

    return run


def load_transformers(job: Job) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sglbatch.models import resolve_model

    torch.set_num_threads(job["threads"])
    path = resolve_model(job["model"]).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, job["dtype"])).eval()
    return model, AutoTokenizer.from_pretrained(path, padding_side="left")


def generate_run(job: Job) -> Run:
    import torch
    from transformers import GenerationConfig

    model, tokenizer = load_transformers(job)
    num = job["max_tokens"]
    config = GenerationConfig(max_new_tokens=num, do_sample=False, pad_token_id=tokenizer.eos_token_id)

    @torch.inference_mode()
    def run(prompts: list[str]) -> list[str]:
        texts = [""] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for begin in range(0, len(order), job["setting"]["batch_size"]):
            part = order[begin : begin + job["setting"]["batch_size"]]
            batch = tokenizer([prompts[i] for i in part], return_tensors="pt", padding=True)
            output = model.generate(**batch, generation_config=config, eos_token_id=None)
            assert output.shape[1] == batch["input_ids"].shape[1] + num
            for i, text in zip(part, tokenizer.batch_decode(output[:, -num:], skip_special_tokens=True), strict=True):
                texts[i] = text
        return texts

    return run


def generate_batch_run(job: Job) -> Run:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, tokenizer = load_transformers(job)
    num, setting = job["max_tokens"], job["setting"]
    config = GenerationConfig(max_new_tokens=num, do_sample=False, eos_token_id=-1, pad_token_id=tokenizer.eos_token_id)
    batching = ContinuousBatchingConfig(
        page_size=setting["page_size"],
        num_blocks=job["kv_tokens"] // setting["page_size"],
        max_batch_tokens=setting["max_batch_tokens"],
    )

    def run(prompts: list[str]) -> list[str]:
        ids = tokenizer(prompts)["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: ids[i])
        outputs = model.generate_batch(
            [ids[i] for i in order], generation_config=config, continuous_batching_config=batching, warmup=False
        )
        texts = [""] * len(prompts)
        for i, output in zip(order, outputs.values(), strict=True):
            assert output.prompt_ids == ids[i] and output.error is None and len(output.generated_tokens) == num
            texts[i] = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        return texts

    return run


def llama_cpp_run(job: Job) -> Run:
    import xllamacpp  # type: ignore[import-untyped]

    num_parallel = job["setting"]["parallel"]
    params = xllamacpp.CommonParams()
    params.model.path = job["gguf"]
    params.hostnames, params.port = ["127.0.0.1"], job["port"]
    params.n_ctx, params.n_parallel = 4096 * num_parallel, num_parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    server = xllamacpp.Server(params)
    local = threading.local()

    def complete(prompt: str) -> str:
        local.opener = getattr(local, "opener", None) or urllib.request.build_opener(urllib.request.ProxyHandler({}))
        body = {"prompt": prompt, "n_predict": job["max_tokens"], "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(body | {"cache_prompt": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with local.opener.open(request, timeout=3600) as response:
            answer = json.load(response)
        assert answer["tokens_predicted"] == job["max_tokens"], answer
        return str(answer["content"])

    def run(prompts: list[str]) -> list[str]:
        order = sorted(range(len(prompts)), key=lambda i: prompts[i])
        texts = [""] * len(prompts)
        with ThreadPoolExecutor(num_parallel) as pool:
            for i, text in zip(order, pool.map(complete, [prompts[i] for i in order]), strict=True):
                texts[i] = text
        return texts

    return run


ENGINES: dict[str, tuple[Callable[[Job], Run], list[dict[str, int]]]] = {
    OURS: (sglbatch_run, [{}]),
    "transformers generate": (generate_run, [{"batch_size": 8}, {"batch_size": 32}]),
    "transformers generate_batch": (
        generate_batch_run,
        [{"page_size": 32, "max_batch_tokens": 512}, {"page_size": 32, "max_batch_tokens": 128}],
    ),
    "llama.cpp": (llama_cpp_run, [{"parallel": 1}, {"parallel": 8}]),
}


# --- one run: a process of its own -----------------------------------------------------------------


def child(job_file: Path) -> None:
    job = json.loads(job_file.read_text())
    run = ENGINES[job["engine"]][0](job)
    run(["The first batch warms up."])
    start, cpu = time.perf_counter(), time.process_time()
    texts = run(job["prompts"])
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    job_file.write_text(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "texts": texts}))
    sys.stdout.flush()
    os._exit(0)  # without waiting for servers' threads


def run_once(job: Job) -> dict[str, Any]:
    """The child's figures, or {"error": its last words}."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job))
        command = [sys.executable, __file__, "--child", str(file)]
        environment = os.environ | {"OMP_WAIT_POLICY": job["omp_wait_policy"]}
        before = os.getloadavg()[0]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, timeout=job["timeout_s"]
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {job['timeout_s']} s", "load_average_before": before}
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1:], "load_average_before": before}
        return {**json.loads(file.read_text()), "load_average_before": before}


# --- all runs --------------------------------------------------------------------------------------


def compare(args: argparse.Namespace, prompts: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Runs alternate over the engines within a workload; the best setting of the first repeat is kept."""
    runs: list[dict[str, Any]] = []
    settings = {(w, e): ENGINES[e][1][: args.settings] for w in prompts for e in args.engines}
    for repeat in range(args.repeats):
        for workload, rows in prompts.items():
            for engine in args.engines:
                for setting in settings[workload, engine]:
                    runs.append(one(args, workload, engine, setting, rows) | {"repeat": repeat})
                    args.out.write_text(json.dumps(document(args, prompts, runs), indent=1) + "\n")
                done = [r for r in runs if (r["workload"], r["engine"]) == (workload, engine) and "seconds" in r]
                best = min(done, key=lambda r: float(r["seconds"]), default=None)
                settings[workload, engine] = [best["setting"]] if best else []
    return runs


def one(
    args: argparse.Namespace, workload: str, engine: str, setting: dict[str, int], prompts: list[str]
) -> dict[str, Any]:
    job = {
        "engine": engine,
        "setting": setting,
        "prompts": prompts,
        "max_tokens": WORKLOADS[workload][1],
        "kv_tokens": 65_536,
        **{name: getattr(args, name) for name in ("model", "gguf", "threads", "dtype", "port", "omp_wait_policy")},
        "timeout_s": args.timeout_s,
    }
    result = run_once(job)
    shown = f"{result['seconds']:.1f} s" if "seconds" in result else result["error"]
    print(f"{workload} {engine} {setting}: {shown} (load {result['load_average_before']:.1f})", flush=True)
    return {"workload": workload, "engine": engine, "setting": setting, **result}


def document(args: argparse.Namespace, prompts: dict[str, list[str]], runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "versions": {name: installed(name) for name in ("torch", "transformers", "xllamacpp", "numpy")},
        "model": args.model,
        "weights": f"{args.dtype}, dequantised from Q4_1; llama.cpp computes with the Q4_1 blocks themselves",
        "threads": args.threads,
        "omp_wait_policy": args.omp_wait_policy,
        "workloads": {
            w: {"rows": len(p), "max_tokens": WORKLOADS[w][1], **shared(args, p)} for w, p in prompts.items()
        },
        "summary": [summary(runs, w, e) for w in prompts for e in args.engines],
        "runs": [{k: v for k, v in run.items() if k != "texts"} for run in runs],
    }


def summary(runs: list[dict[str, Any]], workload: str, engine: str) -> dict[str, Any]:
    """The best setting's medians, their ratios to ours, and the share of rows with the same text as ours.

    On a machine with other work the processor time of the run's process says more than the time on the clock.
    """
    found = {e: [r for r in runs if (r["workload"], r["engine"]) == (workload, e)] for e in (engine, OURS)}
    done = {e: [r for r in group if "seconds" in r] for e, group in found.items()}
    line: dict[str, Any] = {"workload": workload, "engine": engine}
    if not done[engine]:
        return line | {"errors": [r["error"] for r in found[engine]]}
    setting = min(done[engine], key=lambda r: float(r["seconds"]))["setting"]
    best = [r for r in done[engine] if r["setting"] == setting]
    medians = {name: statistics.median(r[name] for r in best) for name in ("seconds", "cpu_s")}
    line |= {"setting": setting, "repeats": len(best), "median_s": round(medians["seconds"], 2)}
    line["median_cpu_s"] = round(medians["cpu_s"], 2)
    if done[OURS]:
        ours = {name: statistics.median(r[name] for r in done[OURS]) for name in medians}
        line["times_ours"] = round(medians["seconds"] / ours["seconds"], 2)
        line["cpu_times_ours"] = round(medians["cpu_s"] / ours["cpu_s"], 2)
        texts, reference = done[engine][-1]["texts"], done[OURS][-1]["texts"]
        same = sum(a == b for a, b in zip(texts, reference, strict=True)) / len(texts)
        line["same_text"] = round(same, 3)
    return line


def shared(args: argparse.Namespace, prompts: list[str]) -> dict[str, Any]:
    from sglbatch.models import resolve_model
    from sglbatch.planner import make_plan
    from sglbatch.tokenizer import Tokenizer
    from sglbatch.types import Text

    tokenizer = Tokenizer.load(resolve_model(args.model).path)
    plan = make_plan(tokenizer.encode_prompts([(Text(prompt),) for prompt in prompts]))
    return {
        "prompt_tokens": plan.num_tokens,
        "unique_tokens": plan.unique_tokens,
        "best_hit_rate": round(plan.best_hit_rate, 4),
    }


def machine() -> dict[str, Any]:
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    cpu = {name.strip(): value.strip() for name, value in facts.items()}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "instructions": [
            f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in cpu.get("flags", "").split()
        ],
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(lines: list[dict[str, Any]]) -> str:
    columns = {"median_s": "s", "times_ours": "/ ours", "median_cpu_s": "CPU s", "cpu_times_ours": "/ ours",
               "same_text": "same text"}  # fmt: skip
    rows = [f"{'workload':9} {'engine':28}" + "".join(f" {name:>9}" for name in columns.values()) + "  setting"]
    for line in lines:
        begin = f"{line['workload']:9} {line['engine']:28}"
        if "errors" in line:
            rows.append(f"{begin} {line['errors']}")
        else:
            setting = " ".join(f"{k}={v}" for k, v in line["setting"].items())
            rows.append(begin + "".join(f" {line.get(key, float('nan')):9.2f}" for key in columns) + f"  {setting}")
    return "\n".join(rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gguf", help="the same model's file for llama.cpp; without it llama.cpp is left out")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of each workload's rows, for a quick look")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", type=int, help="of each engine try so many settings; without it all")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--omp-wait-policy", default="passive", choices=["passive", "active"])
    parser.add_argument("--port", type=int, default=18_273, help="of llama.cpp's server, on the loopback interface")
    parser.add_argument("--timeout-s", type=int, default=3600, help="of one run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.folder is None and args.child is None:
        parser.error("name the folder with mmlu.jsonl, gsm8k.jsonl and unique.jsonl")
    if args.gguf is None and "llama.cpp" in args.engines:
        args.engines.remove("llama.cpp")
    args.out = args.out or Path(__file__).parent / "results" / f"cpu-{time.strftime('%Y-%m-%d')}.json"
    return args


def main() -> None:
    args = parse_args()
    if args.child is not None:
        child(args.child)
    prompts = {}
    for name in args.workloads:
        num_rows = max(1, round(WORKLOADS[name][0] * args.scale))
        with (args.folder / f"{name}.jsonl").open() as file:
            prompts[name] = [json.loads(line)["prompt"] for line, _ in zip(file, range(num_rows), strict=False)]
    runs = compare(args, prompts)
    print(table(document(args, prompts, runs)["summary"]))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
