"""A job on an API model in a folder of its own: what the tests of API models run."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from sglbatch.api_spec import ApiModel
from sglbatch.api_spec.backend import ApiBackend
from sglbatch.api_spec.batchstore import BatchStore
from sglbatch.api_spec.budget import Budget
from sglbatch.api_spec.client import Endpoint
from sglbatch.api_spec.limits import Limits
from sglbatch.api_spec.prices import parse_price
from sglbatch.api_spec.speculation import Speculation
from sglbatch.api_spec.tokens import counter_for
from sglbatch.job.config import RunConfig
from sglbatch.job.execution import Surroundings
from sglbatch.job.paths import JobPaths
from sglbatch.job.progress import Progress
from sglbatch.job.report import Report
from sglbatch.job.runner import run_job
from sglbatch.job.signals import StopRequest
from sglbatch.job.spending import Spending
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Backend

SHORT = """
import sglbatch as sgl

@sgl.function(temperature=0)
def short(s, q):
    s += "The number " + q + " is" + sgl.gen("a", max_tokens=2)
"""

PEOPLE = """
import sglbatch as sgl

EXAMPLES = '''\\
Text: Michael Faraday was born in 1791.
Name: Michael Faraday
Born: 1791
City: London

Text: Virginia Woolf was born in 1882.
Name: Virginia Woolf
Born: 1882
City: London

Text: Marie Curie was born in 1867.
Name: Marie Curie
Born: 1867
City: Warsaw

'''

@sgl.function(temperature=0{options})
def people(s, text):
    s += EXAMPLES + f"Text: {{text}}\\nName:" + sgl.gen("name", max_tokens=12, stop="\\n")
    s += "\\nBorn:" + sgl.gen("born", max_tokens=8, stop="\\n")
    s += "\\nCity:" + sgl.gen("city", max_tokens=8, stop="\\n")
"""

FIRST = ["Ada", "Emmy", "Carl", "Niels", "Lise", "Max", "Rosa", "Hugo", "Nina", "Otto"]
LAST = ["Weber", "Rossi", "Moreau", "Novak", "Lindt", "Vega", "Tanaka", "Silva", "Adler", "Brandt"]


def people(number: int) -> list[dict[str, Any]]:
    names = [f"{first} {last}" for last in LAST for first in FIRST][:number]
    return [{"text": f"{name} was born in {1800 + 7 * i % 190}."} for i, name in enumerate(names)]


@dataclass(kw_only=True)
class ApiWorld:
    """Args:
    tokenizer: of the model, where the client knows it.
    endpoint: settings of ``Endpoint`` beyond its model.
    stop: makes what ends a run from outside.
    price, max_cost: in the budget, over all runs in the folder.
    batches: settings of ``BatchStore`` beyond its path; None asks one by one.
    """

    folder: Path
    base_url: str
    tokenizer: Tokenizer | None = None
    concurrency: int = 4
    limits: Limits = field(default_factory=Limits)
    endpoint: dict[str, Any] = field(default_factory=dict)
    stderr: io.StringIO = field(default_factory=io.StringIO)
    backend: ApiBackend | None = None
    batches: dict[str, Any] | None = None
    on_load: Callable[[ApiBackend], None] | None = None
    stop: Callable[[], StopRequest] = StopRequest
    max_cost: Decimal | None = None
    price: str | None = None

    @property
    def paths(self) -> JobPaths:
        return JobPaths(output=self.folder / "out.jsonl")

    def write(self, template: str, rows: Sequence[dict[str, Any]]) -> None:
        (self.folder / "program.py").write_text(template)
        (self.folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, **options: Any) -> Report:
        config = RunConfig(
            **{
                "template": self.folder / "program.py",
                "data": (str(self.folder / "data.jsonl"),),
                "model": "openai/smollm2",
                "base_url": self.base_url,
                "output": self.paths.output,
                **options,
            }
        )
        surroundings = Surroundings(progress=Progress(self.stderr), stop=self.stop(), load_backend=self._load)
        return run_job(config, surroundings).report

    def output(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.paths.output.read_text().splitlines()]

    def _load(self, model: ApiModel, tokenizer: Tokenizer | None, config: RunConfig) -> Backend:
        settings = {"backoff_scale": 0.05, **self.endpoint}
        if self.price is not None:
            ledger = Spending(self.paths.spending)
            settings["budget"] = Budget(parse_price(self.price), max_cost=self.max_cost, ledger=ledger)
        endpoint = Endpoint(model=model, limits=self.limits, **settings)
        store = None
        if self.batches is not None:
            store = BatchStore(path=self.paths.batches, **{"poll_s": 0.1, "settle_s": 0.3, **self.batches})
        self.backend = ApiBackend(
            endpoint,
            counter_for(self.tokenizer),
            concurrency=self.concurrency if store is None else 1000,
            speculation=Speculation(probes=1000) if store is not None else None,
            batches=store,
        )
        if self.on_load is not None:
            self.on_load(self.backend)
        return self.backend
