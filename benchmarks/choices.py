"""Whether choices inside constrained texts have the model's own probabilities, and what that changes.

    python benchmarks/choices.py distortion [--out RESULTS.json]
    python benchmarks/choices.py answers --mmlu mmlu_test.parquet [--rows N] [--out RESULTS.json]
    python benchmarks/choices.py subjects --mmlu mmlu_test.parquet [--rows N] [--out RESULTS.json]

distortion: 20 questions with choices of different lengths, once bare (a regex) and once as a property of an object.
The exact distribution is computed with transformers' own model, on the canonical tokens of every alternative and of
what ends it. Against it stands what the engine draws from, and what drawing token by token under the mask amounts to:
the sum over all sequences of legal tokens, again with transformers' model.

answers, subjects: tasks with known answers as {"answer": one of the options}, greedy, with exact choices, with forced
runs alone, and with plain masking (every token the model's, among the legal ones). The options are the four answers to
an MMLU question, or eight subjects that it could belong to.

Each adds its figures to --out, a JSON file.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads that spin hold up whatever else runs

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

import sglbatch
from sglbatch.engine.engine import LocalEngine
from sglbatch.engine.fsm import Forced, SchemaConstraint, TokenMasks, compile_regex
from sglbatch.engine.fsm.bitmask import allowed_ids
from sglbatch.engine.fsm.guide import Guide
from sglbatch.engine.probe import Probe
from sglbatch.models import resolve_model
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate, Request, Result, Text

MODEL = "smollm2-135m"
MIN_MASS = 1e-3
"""A sequence of tokens less likely than this is not followed; the sum of what is left out is in the results."""
MAX_QUESTION_LEN = 400
SUBJECTS = {
    "astronomy": "astronomy",
    "marketing": "marketing",
    "virology": "virology and infectious diseases",
    "world_religions": "religions of the world",
    "nutrition": "nutrition",
    "international_law": "international law",
    "machine_learning": "machine learning",
    "us_foreign_policy": "foreign policy of the United States",
}

Figures = dict[str, Any]
Distribution = dict[str, float]

QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Is the sky blue on a clear day?", ("yes", "no", "not always")),
    ("How often does it snow in Cairo?", ("never", "never ever", "rarely", "every single winter")),
    ("Which animal says meow?", ("cat", "caterpillar", "cattle", "dog")),
    ("What is the capital of France?", ("Paris", "Parma", "London", "the city of Lyon")),
    ("What do bees make?", ("honey", "honeycomb cereal", "milk", "hats")),
    ("How do you feel about this product: it broke after a day.", ("positive", "negative", "neither of them")),
    ("Which month comes after June?", ("July", "June", "January", "the month of August")),
    ("What is two plus two?", ("four", "fourteen", "forty", "five")),
    ("Where do fish live?", ("in water", "in waterproof boots", "on land", "in")),
    ("Which colour do you get from blue and yellow?", ("green", "greenish brown", "red", "violet")),
    ("What is ice made of?", ("water", "watermelon", "stone", "frozen carbon dioxide")),
    ("Who wrote Hamlet?", ("Shakespeare", "Shaw", "Goethe", "nobody knows")),
    ("Is a whale a fish?", ("no", "no, it is a mammal", "yes", "yes, of course")),
    ("Which planet is the largest?", ("Jupiter", "Juno", "Mars", "the planet Saturn")),
    ("How urgent is this ticket: the server is on fire?", ("low", "lower than low", "high", "critical")),
    ("What is the opposite of hot?", ("cold", "cold as ice", "warm", "hotter")),
    ("Which instrument has keys?", ("piano", "pianist", "drum", "violin")),
    ("What do you call a baby dog?", ("puppy", "puppet", "kitten", "pup")),
    ("Which department handles refunds?", ("billing", "bill", "sales", "technical support")),
    ("Is this sentence English: The cat sat on the mat?", ("true", "false", "it is partly English")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["distortion", "answers", "subjects"])
    parser.add_argument("--mmlu", type=Path)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engine = sglbatch.Runtime(MODEL)
    figures = measure_distortion(engine) if options.what == "distortion" else measure_known(engine, options)
    print(json.dumps(figures, indent=1, ensure_ascii=False))
    if options.out:
        known = json.loads(options.out.read_text()) if options.out.exists() else {}
        figures["machine"] = {"cpu": platform.machine(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
        text = json.dumps({**known, options.what: figures}, indent=1, ensure_ascii=False)
        options.out.write_text(text + "\n")


# --- distortion --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One choice: the prompt, what comes before an alternative, and what ends it."""

    prompt: str
    choices: tuple[str, ...]
    constraint: Constraint
    before: str
    after: str

    @staticmethod
    def bare(question: str, choices: tuple[str, ...]) -> Case:
        prompt = f"Question: {question}\nAnswer (one of: {'; '.join(choices)}):"
        source = f" ({'|'.join(map(re.escape, choices))})\n"
        return Case(
            prompt=prompt, choices=choices, constraint=Constraint(kind="regex", source=source), before=" ", after="\n"
        )

    @staticmethod
    def in_object(question: str, choices: tuple[str, ...]) -> Case:
        schema = {
            "type": "object",
            "properties": {"answer": {"enum": list(choices)}, "sure": {"type": "boolean"}},
            "required": ["answer", "sure"],
            "additionalProperties": False,
        }
        prompt = f"Question: {question}\nAnswer as JSON (one of: {'; '.join(choices)}):\n"
        constraint = Constraint(kind="json_schema", source=json.dumps(schema))
        return Case(prompt=prompt, choices=choices, constraint=constraint, before='{"answer": "', after='", "sure": ')


class Reference:
    """transformers' own model, behind one prompt at a time."""

    def __init__(self) -> None:
        folder = resolve_model(MODEL).path
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._cache: Any = None
        self._first_V = torch.empty(0)

    @torch.inference_mode()
    def begin(self, prompt_ids: list[int]) -> None:
        output = self._model(torch.tensor([prompt_ids]), use_cache=True)
        self._cache = output.past_key_values
        self._first_V = torch.log_softmax(output.logits[0, -1], dim=-1)

    @torch.inference_mode()
    def next_logprobs(self, paths: list[tuple[int, ...]]) -> torch.Tensor:
        """Log-probabilities [paths, length + 1, V] along paths of one length behind the prompt."""
        first = self._first_V.expand(len(paths), 1, -1)
        if not paths[0]:
            return first
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(len(paths))
        logits = self._model(torch.tensor(paths), past_key_values=cache, use_cache=True).logits
        return torch.cat([first, torch.log_softmax(logits, dim=-1)], dim=1)


def measure_distortion(engine: LocalEngine) -> Figures:
    tokenizer, reference = engine.tokenizer, Reference()
    masks = TokenMasks(tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.vocab_size)
    kinds = {"bare": Case.bare, "in_object": Case.in_object}
    return {
        kind: summary([measure_case(make(*question), engine, reference, masks) for question in QUESTIONS])
        for kind, make in kinds.items()
    }


def measure_case(case: Case, engine: LocalEngine, reference: Reference, masks: TokenMasks) -> Figures:
    tokenizer = engine.tokenizer
    prompt_ids = encoded(tokenizer, case.prompt)
    reference.begin(prompt_ids.tolist())
    exact = exact_distribution(case, tokenizer, reference)
    masked, left_out = masked_distribution(case, tokenizer, reference, masks)
    with recorded_choices() as recorded:
        (greedy,) = answers(engine, [request(0, prompt_ids, case.constraint, exact_choices=True)])
    ours = engine_distribution(case, recorded[0], tokenizer)
    (token_greedy,) = answers(engine, [request(0, prompt_ids, case.constraint, exact_choices=False)])
    best = max(exact, key=exact.__getitem__)
    found = {
        "choices": case.choices,
        "exact": exact,
        "engine": ours,
        "token_masking": masked,
        "token_masking_left_out": left_out,
        "distance": {"engine": distance(ours, exact), "token_masking": distance(masked, exact)},
        "greedy_right": {
            "engine": chosen(case, greedy) == best,
            "token_masking": chosen(case, token_greedy) == best,
        },
    }
    print(case.choices, found["distance"], found["greedy_right"], flush=True)
    return found


def exact_distribution(case: Case, tokenizer: Tokenizer, reference: Reference) -> Distribution:
    """Canonical tokens of what comes before, the alternative and what ends it, up to the first token boundary there."""
    logs = {}
    for choice in case.choices:
        tokens = tokenizer.encode(case.before + choice + case.after)
        ends = np.cumsum([len(tokenizer.token_bytes[t]) for t in tokens])
        past = len((case.before + choice).encode()) + 1
        path = tuple(tokens[: int(np.searchsorted(ends, past)) + 1])
        logprobs_TV = reference.next_logprobs([path])[0]
        logs[choice] = sum(float(logprobs_TV[i, token]) for i, token in enumerate(path))
    return normalised(logs)


def masked_distribution(
    case: Case, tokenizer: Tokenizer, reference: Reference, masks: TokenMasks
) -> tuple[Distribution, float]:
    """What drawing under the mask gives each choice: the sum over all ways to spell it with legal tokens."""
    guide = guide_of(masks, case.constraint)
    run = Forced(guide, tokenizer.encode).tokens(guide.start)
    start = guide.start
    for token in run:
        start = guide.advance(start, token)
    ends = {(case.before + choice + case.after[:1]).encode(): choice for choice in case.choices}
    found, left_out = dict.fromkeys(case.choices, 0.0), 0.0
    level: dict[tuple[int, ...], tuple[int, float]] = {run: (start, 1.0)}
    while level:
        logprobs_PV = reference.next_logprobs(list(level))[:, -1]
        following: dict[tuple[int, ...], tuple[int, float]] = {}
        for (path, (state, mass)), logprobs_V in zip(level.items(), logprobs_PV, strict=True):
            ids = [i for i in allowed_ids(guide.mask(state)).tolist() if guide.bytes_of(i)]
            for token, share in zip(ids, torch.softmax(logprobs_V[ids], dim=-1).tolist(), strict=True):
                spelled = b"".join(map(guide.bytes_of, (*path, token)))
                choice = next((c for end, c in ends.items() if spelled.startswith(end)), None)
                if choice is not None:
                    found[choice] += mass * share
                elif mass * share < MIN_MASS:
                    left_out += mass * share
                else:
                    following[*path, token] = (guide.advance(state, token), mass * share)
        level = following
    return found, left_out


@contextmanager
def recorded_choices() -> Iterator[list[Probe]]:
    """The choices that an engine makes meanwhile, with their scores."""
    found: list[Probe] = []
    scored = Probe.log_masses

    def log_masses(probe: Probe) -> list[float]:
        found.append(probe)
        return scored(probe)

    Probe.log_masses = log_masses  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Probe.log_masses = scored  # type: ignore[method-assign]


def engine_distribution(case: Case, probe: Probe, tokenizer: Tokenizer) -> Distribution:
    """The probabilities that the engine's first choice is drawn with."""
    logs = {}
    for alternative, log_mass in zip(probe.alternatives, probe.log_masses(), strict=True):
        text = b"".join(tokenizer.token_bytes[token] for token in alternative.tokens).decode().strip()
        fitting = [c for c in case.choices if text.startswith(c) or c == text]
        logs[max(fitting, key=len)] = log_mass
    assert set(logs) == set(case.choices)
    return normalised(logs)


def normalised(logs: Distribution) -> Distribution:
    top = max(logs.values())
    total = sum(math.exp(log - top) for log in logs.values())
    return {choice: math.exp(log - top) / total for choice, log in logs.items()}


def distance(a: Distribution, b: Distribution) -> float:
    """Total variation."""
    return sum(abs(a[choice] - b[choice]) for choice in b) / 2


def chosen(case: Case, result: Result) -> str:
    if case.constraint.kind == "regex":
        return result.text.strip()
    return str(json.loads(result.text)["answer"])


def summary(cases: list[Figures]) -> Figures:
    ways = ("engine", "token_masking")
    distances = {way: [case["distance"][way] for case in cases] for way in ways}
    return {
        "prompts": len(cases),
        "distance_mean": {way: float(np.mean(distances[way])) for way in ways},
        "distance_max": {way: max(distances[way]) for way in ways},
        "greedy_choice_flipped": {way: sum(not case["greedy_right"][way] for case in cases) for way in ways},
        "token_masking_left_out_max": max(case["token_masking_left_out"] for case in cases),
        "cases": cases,
    }


# --- a task with known answers -----------------------------------------------------------------


class NoRuns(Forced):
    """Plain masking: nothing is forced, and the model picks among the legal tokens at each place."""

    def tokens(self, state: int) -> tuple[int, ...]:
        return ()


def measure_known(engine: LocalEngine, options: argparse.Namespace) -> Figures:
    rows = pq.read_table(options.mmlu).to_pylist()
    return measure_task(engine, getattr(Task, options.what)(rows, options.rows))


@dataclass(frozen=True, kw_only=True)
class Task:
    """Questions with known answers, each a choice among ``options`` in an object."""

    prompts: list[str]
    options: list[list[str]]
    truths: list[str]

    @staticmethod
    def answers(rows: list[dict[str, Any]], number: int) -> Task:
        rows = spread([row for row in rows if is_short(row)], number)
        options = [[row[letter] for letter in "ABCD"] for row in rows]
        prompts = [
            f"Question: {row['question']}\nOptions:\n{listed(texts)}\nThe right option as JSON:\n"
            for row, texts in zip(rows, options, strict=True)
        ]
        return Task(prompts=prompts, options=options, truths=[row[row["answer"]] for row in rows])

    @staticmethod
    def subjects(rows: list[dict[str, Any]], number: int) -> Task:
        rows = spread([row for row in rows if row["subject"] in SUBJECTS and is_short(row)], number)
        prompts = [
            f"Question: {row['question']}\nSubjects:\n{listed(SUBJECTS.values())}\nThe question's subject as JSON:\n"
            for row in rows
        ]
        truths = [SUBJECTS[row["subject"]] for row in rows]
        return Task(prompts=prompts, options=[list(SUBJECTS.values())] * len(rows), truths=truths)

    def requests(self, tokenizer: Tokenizer, *, exact_choices: bool) -> list[Request]:
        return [
            request(i, encoded(tokenizer, prompt), answer_in(texts), exact_choices=exact_choices, max_tokens=160)
            for i, (prompt, texts) in enumerate(zip(self.prompts, self.options, strict=True))
        ]


def measure_task(engine: LocalEngine, task: Task) -> Figures:
    exact = task.requests(engine.tokenizer, exact_choices=True)
    token = task.requests(engine.tokenizer, exact_choices=False)
    answers(engine, [replace(asked, operation=Generate(max_tokens=1, temperature=0.0)) for asked in token])  # fills KV
    found = {"exact_choices": timed_answers(engine, exact), "forced_runs": timed_answers(engine, token)}
    forced_runs, engine._forced_runs = engine._forced_runs, lambda guide: NoRuns(guide, engine.tokenizer.encode)  # type: ignore[method-assign]
    found["plain_masking"] = timed_answers(engine, token)
    engine._forced_runs = forced_runs  # type: ignore[method-assign]
    plain = found["plain_masking"][0]
    return {
        "rows": len(task.prompts),
        **{
            way: {
                **figures,
                "right": sum(answer_of(r) == truth for r, truth in zip(results, task.truths, strict=True)),
                "texts_unlike_plain_masking": sum(a.text != b.text for a, b in zip(results, plain, strict=True)),
            }
            for way, (results, figures) in found.items()
        },
    }


def spread(rows: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return rows[:: max(1, len(rows) // number)][:number]


def listed(texts: Iterable[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def answer_in(texts: list[str]) -> Constraint:
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": texts}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    return Constraint(kind="json_schema", source=json.dumps(schema, ensure_ascii=False))


def is_short(row: dict[str, Any]) -> bool:
    texts = [row[letter] for letter in "ABCD"]
    return len(row["question"]) + sum(map(len, texts)) < MAX_QUESTION_LEN and len(set(texts)) == 4 and all(texts)


def answer_of(result: Result) -> str | None:
    return str(json.loads(result.text)["answer"]) if result.error is None else None


# --- asking ------------------------------------------------------------------------------------


def guide_of(masks: TokenMasks, constraint: Constraint) -> Guide:
    if constraint.kind == "regex":
        return masks.guide(compile_regex(constraint.source))
    return masks.guide(SchemaConstraint(json.loads(constraint.source)))


def encoded(tokenizer: Tokenizer, text: str) -> np.ndarray:
    (ids,) = tokenizer.encode_prompts([(Text(text),)])
    return np.asarray(ids)


def request(
    number: int, prompt_ids: np.ndarray, constraint: Constraint, *, exact_choices: bool, max_tokens: int = 64
) -> Request:
    operation = Generate(
        max_tokens=max_tokens, temperature=0.0, constraint=constraint, exact_choices=exact_choices, complete=True
    )
    return Request(request_id=number, program_id=number, prompt_ids=prompt_ids, operation=operation, seed=number)


def answers(engine: LocalEngine, requests: list[Request]) -> list[Result]:
    engine.submit(requests)
    results: list[Result] = []
    while engine.has_unfinished:
        results += engine.step()
    return sorted(results, key=lambda result: result.request_id)


def timed_answers(engine: LocalEngine, requests: list[Request]) -> tuple[list[Result], Figures]:
    steps, begin = engine.stats().steps, time.perf_counter()
    results = answers(engine, requests)
    figures = {
        "seconds": round(time.perf_counter() - begin, 1),
        "steps": engine.stats().steps - steps,
        "tokens": sum(result.usage.generated_tokens for result in results),
        "errors": sum(result.error is not None for result in results),
    }
    print(figures, flush=True)
    return results, figures


if __name__ == "__main__":
    main()
