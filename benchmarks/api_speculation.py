"""What speculation saves on an OpenAI-compatible endpoint: the same job with it and without, and what both cost.

    python benchmarks/api_speculation.py --base-url http://127.0.0.1:8081/v1 --model NAME --tokenizer smollm2-135m

Two templates: one that a model goes on with by itself (few-shot, three fields), one that it ignores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from sglbatch.job.backends import load_backend
from sglbatch.job.config import RunConfig
from sglbatch.job.execution import Surroundings
from sglbatch.job.progress import Progress
from sglbatch.job.runner import run_job
from sglbatch.job.signals import StopRequest

FOLLOWED = """
import sglbatch as sgl

KNOWN = [("Michael Faraday", 1791, "London"), ("Marie Curie", 1867, "Warsaw"), ("Ada Lovelace", 1815, "London")]
EXAMPLES = "".join(
    f"Text: {n} was born in {y} in {c}.\\nName: {n}\\nBorn: {y}\\nCity: {c}\\n\\n" for n, y, c in KNOWN
)

@sgl.function(temperature=0, num_api_spec_tokens=%s)
def followed(s, name, year, city):
    s += EXAMPLES + f"Text: {name} was born in {year} in {city}.\\nName:" + sgl.gen("a", max_tokens=12, stop="\\n")
    s += "\\nBorn:" + sgl.gen("b", max_tokens=8, stop="\\n")
    s += "\\nCity:" + sgl.gen("c", max_tokens=8, stop="\\n")
"""

IGNORED = """
import sglbatch as sgl

@sgl.function(temperature=0, num_api_spec_tokens=%s)
def ignored(s, name, year, city):
    s += f"A story about {name} of {city}, {year}.\\nOnce upon a time," + sgl.gen("a", max_tokens=12, stop="\\n")
    s += "\\n[[Q7]] " + sgl.gen("b", max_tokens=12, stop="\\n")
    s += "\\n[[Q8]] " + sgl.gen("c", max_tokens=12, stop="\\n")
"""

FIRST = ("Emmy", "Carl", "Niels", "Lise", "Max", "Rosa", "Hugo", "Nina", "Otto", "Ida")
LAST = ("Weber", "Rossi", "Moreau", "Novak", "Lindt", "Vega", "Tanaka", "Silva", "Adler", "Brandt")
CITIES = ("Paris", "Oslo", "Rome", "Kyoto", "Lima")


def people(number: int) -> list[dict[str, Any]]:
    names = [f"{first} {last}" for last in LAST for first in FIRST]
    return [
        {"name": names[i % len(names)], "year": 1800 + 7 * i % 190, "city": CITIES[i % len(CITIES)]}
        for i in range(number)
    ]


def run(folder: Path, template: str, ahead: str, options: argparse.Namespace) -> tuple[Any, list[tuple[Any, ...]]]:
    """The report and the values of one job."""
    folder.mkdir()
    (folder / "program.py").write_text(template % ahead)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in people(options.rows)))
    config = RunConfig(
        template=folder / "program.py",
        data=(str(folder / "data.jsonl"),),
        model=f"openai/{options.model}",
        base_url=options.base_url,
        api_key_env=options.api_key_env,
        tokenizer=options.tokenizer,
        concurrency=options.concurrency,
        output=folder / "out.jsonl",
    )
    surroundings = Surroundings(progress=Progress(sys.stderr), stop=StopRequest(), load_backend=load_backend)
    report = run_job(config, surroundings).report
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return report, [(row["a"], row["b"], row["c"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key-env")
    parser.add_argument("--tokenizer")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=4)
    options = parser.parse_args()
    print(f"{'template':<10}{'':<10}{'requests':>9}{'prompt':>9}{'generated':>10}{'seconds':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for name, template in (("followed", FOLLOWED), ("ignored", IGNORED)):
            single = run(Path(folder) / f"{name}-single", template, "0", options)
            ahead = run(Path(folder) / f"{name}-ahead", template, "None", options)
            for way, (report, _) in (("single", single), ("ahead", ahead)):
                numbers = (report.requests, report.prompt_tokens, report.generated_tokens, report.seconds["run"])
                print(f"{name:<10}{way:<10}{numbers[0]:>9,}{numbers[1]:>9,}{numbers[2]:>10,}{numbers[3]:>9.1f}")
            same = sum(a == b for a, b in zip(single[1], ahead[1], strict=True))
            saved = single[0].prompt_tokens / ahead[0].prompt_tokens
            print(
                f"{name:<10}{saved:.2f} times fewer prompt tokens; {same} of {options.rows} rows have the same values"
            )


if __name__ == "__main__":
    main()
