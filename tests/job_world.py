"""A job in a folder of its own over a scripted backend: what the tests of the job run on."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglbatch.job.config import RunConfig
from sglbatch.job.execution import Surroundings
from sglbatch.job.paths import JobPaths
from sglbatch.job.progress import Progress
from sglbatch.job.runner import Ended, retry_job, run_job
from sglbatch.job.signals import StopRequest
from sglbatch.models import LocalModel
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import ErrorInfo, Request
from tests.lang_backend import ScriptedBackend

TWO_GENS = """
import sglbatch as sgl

@sgl.function(temperature=0)
def two(s, q):
    s += "Question: " + q + "\\nThought:" + sgl.gen("thought", max_tokens=8)
    s += "\\nAnswer:" + sgl.gen("answer", max_tokens=8)
"""


@dataclass
class World:
    """``run`` is one process's life as far as the job can tell.

    Args:
        failing: prompts that contain one of these fail.
        on_request: called with every request's number, counted over all runs.
    """

    folder: Path
    model: Path
    failing: tuple[str, ...] = ()
    on_request: Any = None
    batch: int = 8
    stderr: io.StringIO = field(default_factory=io.StringIO)
    stop: StopRequest = field(default_factory=StopRequest)
    backend: ScriptedBackend | None = None
    make_backend: type[ScriptedBackend] = ScriptedBackend
    num_requests: int = 0

    def __post_init__(self) -> None:
        self.write_template(TWO_GENS)

    @property
    def template(self) -> Path:
        return self.folder / "two.py"

    @property
    def data(self) -> Path:
        return self.folder / "data.jsonl"

    @property
    def paths(self) -> JobPaths:
        return JobPaths(output=self.folder / "out.jsonl")

    def write_template(self, text: str) -> None:
        self.template.write_text(text)

    def write_rows(self, rows: Sequence[dict[str, Any] | str]) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        self.data.write_text("".join(line + "\n" for line in lines))

    def questions(self, numbers: Sequence[int]) -> None:
        self.write_rows([{"q": f"number {i}?"} for i in numbers])

    def config(self, **options: Any) -> RunConfig:
        return RunConfig(
            **{
                "template": self.template,
                "data": (str(self.data),),
                "model": str(self.model),
                "output": self.paths.output,
                **options,
            }
        )

    def run(self, *, restart: bool = False, **options: Any) -> Ended:
        self.backend = None
        config = self.config(**options)
        return run_job(config, self._surroundings(config.time_limit_s), restart=restart)

    def retry(self, **changed: Any) -> Ended:
        self.backend = None
        return retry_job(self.paths, self._surroundings(), changed=changed)

    def output(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.paths.output.read_text().splitlines()]

    def _surroundings(self, time_limit_s: float | None = None) -> Surroundings:
        self.stop = StopRequest(time_limit_s=time_limit_s)
        return Surroundings(progress=Progress(self.stderr), stop=self.stop, load_backend=self._load)

    def _load(self, model: LocalModel, tokenizer: Tokenizer, config: RunConfig) -> ScriptedBackend:
        self.backend = self.make_backend(tokenizer, self._answer, shuffle=1, batch=self.batch)
        return self.backend

    def _answer(self, prompt: str, request: Request) -> str | int | ErrorInfo:
        self.num_requests += 1
        if self.on_request is not None:
            self.on_request(self.num_requests)
        if any(text in prompt for text in self.failing):
            return ErrorInfo(code="scripted", message="as the script says")
        return f" {sum(prompt.encode())}"
