#!/usr/bin/env python3
"""Runs the workload files on a GPU with a random-weight model and writes the times.

    python benchmarks/gpu.py TOKENIZER_DIR WORKLOAD.jsonl ... [--shape llama-8b] [--out results.json]
    python benchmarks/gpu.py TOKENIZER_DIR json.jsonl [--no-jump-forward | --rebuild-masks]

TOKENIZER_DIR holds a tokenizer.json (SmolLM2's for the published numbers). Each workload takes the way of a job, from
rows in memory to texts out: a program for each row, tokenising, planning, running, everything but journal and files.
Rows, token counts and the hit rate are checked; a wrong count fails.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglbatch.data import Row, open_rows
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.loader import DEFAULT_ROWS, default_batch_tokens, make_engine
from sglbatch.engine.model_runner import ATTENTION_NAME
from sglbatch.job.config import RunConfig
from sglbatch.job.execution import Execution, Surroundings
from sglbatch.job.planning import plan_job
from sglbatch.job.prepare import Prepared
from sglbatch.job.progress import Progress
from sglbatch.job.rows import FinishedRow
from sglbatch.job.signals import StopRequest
from sglbatch.lang.template_file import load_template
from sglbatch.models import LocalModel
from sglbatch.planner import Plan, Summary, Tree
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import BackendStats, Request, Result

PROGRAM = Path(__file__).with_name("gpu_program.py")
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


def shape_config(shape: str) -> LlamaConfig:
    return LlamaConfig(**(COMMON | SHAPES[shape]), attn_implementation=ATTENTION_NAME, bos_token_id=1, eos_token_id=2)


def random_model(config: LlamaConfig, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def random_engine(
    shape: str,
    folder: Path,
    *,
    kv_tokens: int | None = None,
    max_batch_tokens: int | None = None,
    max_rows: int = DEFAULT_ROWS["cuda"],
    reserve: Literal["soft", "full"] = "soft",
) -> tuple[LocalEngine, LocalModel, Tokenizer]:
    """An engine with random weights, made as a run makes one, and the tokenizer in ``folder``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = shape_config(shape)
    module = random_model(config, device)
    tokenizer = Tokenizer.load(folder)
    tokenizer.warm_up()  # a job tokenises beside the loading of its model
    model = LocalModel(name=shape, path=folder, identity=shape, context_len=8192, config=config.to_dict())
    engine = make_engine(
        module,
        model,
        tokenizer,
        kv_tokens=kv_tokens,
        max_batch_tokens=max_batch_tokens or default_batch_tokens(torch.device(device)),
        max_rows=max_rows,
        reserve=reserve,
        retain=False,
    )
    return engine, model, tokenizer


def with_own_constraints(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows, each regex one that no other row has: a comment says which row's it is.

    So every row compiles its automaton, makes its masks and looks for its forced runs, as an engine does that keeps
    nothing of a constraint from one request to the next.
    """
    return [row | ({"regex": f"{row['regex']}(?#row {i})"} if row.get("regex") else {}) for i, row in enumerate(rows)]


def floor_s(config: LlamaConfig, plan: Plan, rows: list[dict[str, Any]], out_tokens: int) -> float:
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


class Watched:
    """The engine as the job's backend, with a log of its steps.

    Attributes:
        steps: (begin, seconds, tokens, pieces) of each, as the processor sees it.
        num_late: steps that were all launched only after the device had finished the one before.
        first_submit: when the first requests came.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._events: list[list[torch.Event]] = []
        self.steps: list[tuple[float, float, int, int]] = []
        self.num_late = 0
        self.first_submit: float | None = None

    def device_s(self) -> list[tuple[float, float]]:
        """For each step how long the device had waited before it, and how long it worked on it, in seconds.

        A step's launches stand between two events. What the device waits for among them counts as work.
        """
        end, times = 0.0, []
        for events in self._events:
            before, after = (self._events[0][0].elapsed_time(event) / 1000 for event in events)
            times.append((round(before - end, 5), round(after - before, 5)))
            end = after
        return times

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Puts events around what a step launches."""
        launch = self._engine._passes.launch

        def timed(*args: Any) -> Any:
            events = [torch.Event("cuda", enable_timing=True) for _ in range(2)]
            events[0].record()
            pending = launch(*args)
            events[1].record()
            self.num_late += bool(self._events) and self._events[-1][1].query()
            self._events.append(events)
            return pending

        if torch.cuda.is_available():
            self._engine._passes.launch = timed  # type: ignore[method-assign]
        yield
        self._engine._passes.launch = launch  # type: ignore[method-assign]

    @property
    def identity(self) -> str:
        return self._engine.identity

    @property
    def context_len(self) -> int:
        return self._engine.context_len

    @property
    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    def expect_more(self, more: bool) -> None:
        self._engine.expect_more(more)

    def submit(self, requests: Sequence[Request]) -> None:
        if self.first_submit is None:
            self.first_submit = time.perf_counter()
        self._engine.submit(requests)

    def step(self) -> list[Result]:
        begin = time.perf_counter()
        with self._timed():
            results = self._engine.step()
        launched = self._engine._in_flight[0] if self._engine._in_flight else None
        size = (launched.num_tokens, len(launched.pieces)) if launched else (0, 0)
        self.steps.append((round(begin, 4), round(time.perf_counter() - begin, 4), *size))
        return results

    def finish_program(self, program_id: int) -> None:
        self._engine.finish_program(program_id)

    def stats(self) -> BackendStats:
        return self._engine.stats()

    def close(self) -> None:
        """The engine runs further workloads."""


@contextmanager
def opened(
    file: Path,
    rows: Sequence[Mapping[str, Any]],
    model: LocalModel,
    tokenizer: Tokenizer,
    *,
    choice_decoding: str = "exact",
) -> Iterator[Prepared]:
    """A workload as a job that can start: what is the same in all rows is a parameter, as ``--param`` sets one."""
    values = {name: {row.get(name) for row in rows} for name in ("max_tokens", "ignore_eos", "regex")}
    params = {name: json.dumps(found.pop()) for name, found in values.items() if len(found) == 1}
    config = RunConfig(
        template=PROGRAM,
        data=(str(file),),
        model=model.name,
        limit=len(rows),
        params=params,
        choice_decoding=choice_decoding,
    )
    template = load_template(config.template, params=params)
    with open_rows(config.data, limit=config.limit) as inputs:
        binding = template.bind(inputs.columns, {})
        yield Prepared(
            config=config,
            template=template,
            binding=binding,
            inputs=inputs,
            rows=inputs.use(set(binding.sources.values())),
            model=model,
            tokenizer=tokenizer,
        )


def run_workload(engine: LocalEngine, ready: Prepared, asked: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows in memory to texts out, as ``sglbatch run`` does it, without a journal."""
    rows = [Row(index=i, values=values, error=None, where=f"row {i}") for i, values in enumerate(asked)]
    watched = Watched(engine)
    finished: list[FinishedRow] = []
    planned: list[tuple[Plan, Summary, Tree]] = []
    surroundings = Surroundings(progress=Progress(io.StringIO()), stop=StopRequest(), load_backend=lambda *_: watched)
    execution = Execution(
        ready,
        ready.driver(),
        surroundings,
        on_finished=finished.append,
        after_step=lambda: None,
        on_planned=lambda calls: planned.append(plan_job(calls, ready, errors=(), calls_reused=0)),
        with_transcript=False,
    )
    gc.collect()
    before, jumped = engine.stats(), engine.num_jumped_tokens
    start = time.perf_counter()
    with execution:
        execution.start_rows((row, None) for row in rows)
        started = time.perf_counter()
        execution.prepare()
        execution.run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        end = time.perf_counter()
    after = engine.stats()
    ((plan, summary, _),) = planned
    check_rows(asked, finished)
    computed = after.computed_prompt_tokens - before.computed_prompt_tokens
    recomputed = after.recomputed_tokens - before.recomputed_tokens
    assert computed - recomputed == plan.unique_tokens, (computed, recomputed, plan.unique_tokens)
    assert after.prompt_tokens - before.prompt_tokens == plan.num_tokens
    assert watched.first_submit is not None
    device = watched.device_s()
    return {
        "seconds": round(end - start, 3),
        "device_wait_s": round(sum(wait for wait, _ in device), 3),
        "late_steps": watched.num_late,
        "start_s": round(started - start, 3),
        "first_submit_s": round(watched.first_submit - start, 3),
        "rows": len(rows),
        "equal_calls": summary.num_equal_calls,
        "prompt_tokens": plan.num_tokens,
        "unique_tokens": plan.unique_tokens,
        "computed_tokens": computed,
        "recomputed_tokens": recomputed,
        "hit_rate": round(1 - computed / plan.num_tokens, 4),
        "best_hit_rate": round(plan.best_hit_rate, 4),
        "out_tokens": after.generated_tokens - before.generated_tokens,
        "steps": after.steps - before.steps,
        "jumped_tokens": engine.num_jumped_tokens - jumped,
        "plan": plan,
        "step_log": {"steps": [(round(begin - start, 4), *rest) for begin, *rest in watched.steps], "device": device},
    }


def check_rows(asked: Sequence[Mapping[str, Any]], finished: Sequence[FinishedRow]) -> None:
    """Every row has ended once, with a text of the length that was asked for."""
    assert sorted(row.index for row in finished) == list(range(len(asked)))
    for row in finished:
        assert row.error is None and isinstance(row.values["answer"], str), (row.index, row.error)
        tokens, most = row.usage.generated_tokens, asked[row.index]["max_tokens"]
        assert tokens == most if asked[row.index]["ignore_eos"] else 0 < tokens <= most, (row.index, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--kv-tokens", type=int)
    parser.add_argument("--max-batch-tokens", type=int, help="default: as a run")
    parser.add_argument("--max-rows", type=int, default=DEFAULT_ROWS["cuda"])
    parser.add_argument("--reserve", default="soft", choices=["soft", "full"])
    parser.add_argument("--no-jump-forward", action="store_true", help="forced tokens take a step each")
    parser.add_argument("--choice-decoding", default="exact", choices=["exact", "token"], help="token: as peers do")
    parser.add_argument("--rebuild-masks", action="store_true", help="every row's constraint is built anew")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    engine, model, tokenizer = random_engine(
        args.shape,
        args.tokenizer,
        kv_tokens=args.kv_tokens,
        max_batch_tokens=args.max_batch_tokens,
        max_rows=args.max_rows,
        reserve=args.reserve,
    )
    engine.jump_forward = not args.no_jump_forward
    load_s = time.perf_counter() - start
    print(f"load and warm-up {load_s:.1f} s, {engine.scheduler.config.num_slots} KV tokens", flush=True)
    table = []
    for file in args.files:
        rows = [json.loads(line) for line in file.open()][: args.limit]
        if args.rebuild_masks:
            rows = with_own_constraints(rows)
        with opened(file, rows, model, tokenizer, choice_decoding=args.choice_decoding) as ready:
            result = run_workload(engine, ready, rows)
        log = result.pop("step_log")
        if args.out:
            args.out.with_name(f"steps-{file.stem}.json").write_text(json.dumps(log))
        floor = floor_s(shape_config(args.shape), result.pop("plan"), rows, result["out_tokens"])
        line = {"workload": file.stem, "model": args.shape, "kv_tokens": engine.scheduler.config.num_slots}
        line |= {"jump_forward": engine.jump_forward, "rebuild_masks": args.rebuild_masks}
        line |= {"choice_decoding": args.choice_decoding}
        line |= {"floor_s": round(floor, 2), "load_s": round(load_s, 1), **result}
        table.append(line)
        if args.out:
            args.out.write_text(json.dumps({"machine": machine(), "results": table}, indent=1))
        shown = (
            "workload",
            "seconds",
            "floor_s",
            "start_s",
            "first_submit_s",
            "device_wait_s",
            "late_steps",
            "hit_rate",
            "best_hit_rate",
        )
        numbers = ("recomputed_tokens", "out_tokens", "jumped_tokens", "steps")
        print({name: line[name] for name in (*shown, *numbers)}, flush=True)


def processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    import transformers
    import triton

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "cpu": processor_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
