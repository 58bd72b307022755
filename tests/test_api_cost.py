"""What a job on an API model costs: estimated without network or key, and held to a cap while it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.budget import Budget
from sglbatch.api_spec.encodings import load_encoding
from sglbatch.api_spec.model import resolve_api_model
from sglbatch.api_spec.prices import ListedPrices, UnknownPrices, dollars, parse_price, prices_for
from sglbatch.errors import BackendStopped, SglbatchError
from tests.api_world import PEOPLE, people

ROOT = Path(__file__).parent.parent
PRICE = "input=1,output=4"


def cli(*arguments: str, cwd: Path, code: int = 0, **env: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", "sglbatch", *arguments, "--json"],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout.startswith("{") else done.stderr


def test_prices_are_exact_and_never_zero_for_the_unknown() -> None:
    price = parse_price("input=0.25,output=2,cached=0.025")
    assert price.cost(Tokens(prompt=1000, generated=100, cached=500)) == Decimal("0.0003375")
    listed = ListedPrices("gpt-5-mini")
    assert listed.cost(Tokens(prompt=1000, generated=100, cached=500)) == Decimal("0.0003375")
    assert listed.cost(Tokens(prompt=1000, generated=100, cached=0), batch=True) == Decimal("0.000225")
    assert ListedPrices("gpt-no-such-model").cost(Tokens(prompt=1, generated=1)) is None
    local = resolve_api_model("openai/x", base_url="http://127.0.0.1:1/v1")
    assert isinstance(prices_for(local, None), UnknownPrices)
    assert [dollars(Decimal(x)) for x in ("12.345", "0.00012", "0.5", "0")] == ["$12.34", "$0.00012", "$0.50", "$0.00"]
    assert dollars(None) == "unknown"


@pytest.mark.parametrize(
    "text", ["", "input=1", "input=1,output=x", "input=-1,output=1", "in=1,output=1", "input=nan,output=1"]
)
def test_bad_prices_are_refused(text: str) -> None:
    with pytest.raises(SglbatchError, match="--price"):
        parse_price(text)


def test_a_budget_holds_back_what_is_under_way() -> None:
    budget = Budget(parse_price("input=1000000,output=0"), max_cost=Decimal(10))
    first = budget.reserve(Tokens(prompt=6, generated=5))
    assert first == 6
    assert budget.reserve(Tokens(prompt=5, generated=0)) is None  # the first may leave enough over
    budget.settle(first, Tokens(prompt=6, generated=5), Tokens(prompt=2, generated=5))
    second = budget.reserve(Tokens(prompt=5, generated=0))
    assert second == 5
    budget.settle(second, Tokens(prompt=5, generated=0), None)
    assert budget.spent == 7
    with pytest.raises(BackendStopped) as stopped:
        budget.reserve(Tokens(prompt=4, generated=0))
    assert stopped.value.exit_code == 4


def test_a_cap_needs_a_price() -> None:
    with pytest.raises(SglbatchError) as error:
        Budget(UnknownPrices(), max_cost=Decimal(1))
    assert error.value.code == "unknown-price"


def test_planning_needs_no_network_and_no_key(tmp_path: Path) -> None:
    arguments = (
        str(ROOT / "templates/extract.py"),
        str(ROOT / "samples/people.jsonl"),
        "-o",
        str(tmp_path / "o.jsonl"),
    )
    plan = cli("plan", *arguments, "--model", "openai/gpt-4.1-mini", cwd=tmp_path)["cost"]
    assert plan["rows"] == 20 and not plan["first_prompt_tokens"]["exact"]
    assert 0 < plan["dollars"]["this job"]["low"] < plan["dollars"]["this job"]["high"]
    assert plan["dollars"]["speculating"]["high"] < plan["dollars"]["one call a gen"]["low"]
    unknown = cli("plan", *arguments, "--model", "openai/any", "--base-url", "http://127.0.0.1:9/v1", cwd=tmp_path)
    assert unknown["cost"]["dollars"]["this job"] is None and unknown["cost"]["most_dollars_per_row"] is None
    refused = cli("plan", *arguments, "--model", "openai/gpt-5-mini", cwd=tmp_path, code=2)
    assert "unsupported-by-model" in refused and "--temperature 1" in refused
    no_key = cli("run", *arguments, "--model", "openai/gpt-4.1-mini", cwd=tmp_path, code=3)
    assert "no-api-key" in no_key


CHAT = """
import sglbatch as sgl

@sgl.function(temperature={temperature})
def answer(s, q):
    s += sgl.system("You are brief.") + sgl.user(q) + sgl.assistant(sgl.gen("a", max_tokens=20))
"""


def test_openais_own_models_are_counted_without_network(tmp_path: Path) -> None:
    texts = ["hello", "Grüße aus Köln!", "数学は楽しい <|endoftext|>"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"q": text}) + "\n" for text in texts))
    (tmp_path / "t.py").write_text(CHAT.format(temperature=0))
    counted = cli("plan", "t.py", "d.jsonl", "--model", "openai/gpt-4.1-mini", cwd=tmp_path)["cost"]
    encoding = load_encoding("o200k")
    assert encoding is not None
    right = sum(len(encoding.ids("You are brief.")) + len(encoding.ids(text)) + 2 * 4 + 3 for text in texts)
    assert counted["first_prompt_tokens"] == {"tokens": right, "exact": True, "guess": None}
    (tmp_path / "t.py").write_text(CHAT.format(temperature=1))
    guessed = cli("plan", "t.py", "d.jsonl", "--model", "openai/gpt-5-mini", cwd=tmp_path)["cost"]
    assert not guessed["first_prompt_tokens"]["exact"] and "messages" in guessed["first_prompt_tokens"]["guess"]
    ways = counted["dollars"]
    assert ways["speculating, batch"]["high"] == pytest.approx(ways["speculating"]["high"] / 2)


@pytest.mark.parametrize(
    "option", [("--max-cost", "1"), ("--batch-api",), ("--price", PRICE), ("--requests-per-min", "9")]
)
def test_a_local_model_refuses_what_would_do_nothing(tmp_path: Path, option: tuple[str, ...]) -> None:
    (tmp_path / "t.py").write_text(CHAT.format(temperature=0))
    (tmp_path / "d.jsonl").write_text('{"q": "hello"}\n')
    refused = cli("run", "t.py", "d.jsonl", "--model", "smollm2-135m", *option, cwd=tmp_path, code=2)
    assert "bad-option" in refused and option[0] in refused


def test_planning_imports_neither_torch_nor_the_client(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from sglbatch.job import commands; from sglbatch.job.config import RunConfig\n"
        f"config = RunConfig(template=Path({str(ROOT / 'templates/chat.py')!r}), "
        f"data=({str(ROOT / 'samples/prompts.jsonl')!r},), model='openai/gpt-4.1-mini')\n"
        "commands.plan(config, save=None, as_json=True)\n"
        "print(*sorted({'torch', 'transformers', 'openai'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].strip() == ""


def test_estimate_usage_and_cap_on_a_real_server(api_url: str, smollm2_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "people.py").write_text(PEOPLE.format(options=", num_api_spec_tokens=0"))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in people(8)))
    job = ("people.py", "data.jsonl", "--model", "openai/smollm2", "--base-url", api_url, "-o", "out.jsonl")
    options = (*job, "--tokenizer", str(smollm2_dir), "--price", PRICE)
    plan = cli("plan", *options, cwd=tmp_path)["cost"]
    assert plan["first_prompt_tokens"]["exact"]
    low, high = plan["dollars"]["this job"]["low"], plan["dollars"]["this job"]["high"]

    cap = low * 0.4
    stopped = cli("run", *options, "--max-cost", str(cap), "--concurrency", "4", cwd=tmp_path, code=4)
    assert stopped["state"] == "stopped" and 0 < stopped["api"]["cost"]["dollars"] <= cap
    rest = cli("plan", *options, cwd=tmp_path)["cost"]
    assert rest["dollars"]["this job"]["high"] < high, "what is answered is not paid for again"
    done = cli("run", *options, "--max-cost", "1", cwd=tmp_path)
    assert done["calls_reused"] == stopped["requests"]
    real = stopped["api"]["cost"]["dollars"] + done["api"]["cost"]["dollars"]
    assert low <= real <= high <= 3 * low


@pytest.mark.parametrize("chat", [False, True])
def test_first_calls_are_counted_as_the_server_counts_them(
    api_url: str, smollm2_dir: Path, tmp_path: Path, chat: bool
) -> None:
    body = "s += sgl.user('Say: ' + q); s += sgl.assistant(sgl.gen('a', max_tokens=1))"
    plain = "s += 'Say: ' + q + sgl.gen('a', max_tokens=1)"
    (tmp_path / "t.py").write_text(
        f"import sglbatch as sgl\n\n@sgl.function(temperature=0)\ndef t(s, q):\n    {body if chat else plain}\n"
    )
    texts = ["hello", "Grüße aus Köln!", "a\n\n  b\tc", "数学は楽しい", "x" * 300]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"q": text}) + "\n" for text in texts))
    job = ("t.py", "d.jsonl", "--model", "openai/smollm2", "--base-url", api_url, "-o", "out.jsonl")
    options = (*job, "--tokenizer", str(smollm2_dir))
    plan = cli("plan", *options, cwd=tmp_path)
    assert cli("run", *options, cwd=tmp_path)["prompt_tokens"] == plan["cost"]["first_prompt_tokens"]["tokens"]
