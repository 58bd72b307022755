"""Costs before they are spent: what the guesses rest on, and that real costs lie between low and high."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sglbatch.api_spec.answers import Tokens
from sglbatch.api_spec.calibration import MIN_ROWS, real_over_expected
from sglbatch.api_spec.dry import DryBackend, Guess
from sglbatch.api_spec.lengths import Lengths, example_values, lengths, shows_how_it_goes_on
from sglbatch.api_spec.model import resolve_api_model
from sglbatch.api_spec.prices import parse_price
from sglbatch.api_spec.speculation import PROBES
from sglbatch.api_spec.tokens import TokenizerCounter, counter_for
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Choose, Constraint, Generate, NextAsk, Request, TextCall, TextChoices
from tests.api_batches import BatchServer
from tests.api_world import PEOPLE, ApiWorld, people
from tests.test_api_cost import PRICE, ROOT, cli
from tests.test_api_select import CHAT_SELECT, QUESTIONS
from tests.test_api_server import IGNORED

CARD = "Text: a\nName: Ada Lovelace\nBorn: 1815\n\nText: b\nName: Carl\nBorn: 1777\n\nText: c\nName:"


@pytest.fixture(scope="module")
def counter(smollm2_tokenizer: Tokenizer) -> TokenizerCounter:
    found = counter_for(smollm2_tokenizer)
    assert isinstance(found, TokenizerCounter)
    return found


def test_examples_show_how_long_values_are(counter: TokenizerCounter) -> None:
    question = Generate(max_tokens=50, stop=("\n",))
    assert example_values(CARD, question.stop) == ("Ada Lovelace", "Carl")
    counts = [counter.count(text) for text in ("Ada Lovelace", "Carl")]
    found = lengths(question, CARD, counter)
    assert found == Lengths(short=max(1, min(counts) // 2), typical=sum(counts) // 2, long=2 * max(counts))
    assert example_values("no line\n before", ("\n",)) == () and example_values("", ()) == ()
    alone = lengths(question, "Text: c\nName:", counter)
    assert alone == Lengths(short=3, typical=16, long=50)
    tight = lengths(Generate(max_tokens=2, stop=("\n",)), CARD, counter)
    assert tight.short <= tight.typical <= tight.long == 2


def test_a_constraint_says_the_least(counter: TokenizerCounter) -> None:
    year = Generate(max_tokens=20, constraint=Constraint(kind="regex", source="1[0-9]{3}"))
    assert lengths(year, "Born:", counter).short == counter.count("1000")
    schema = {"type": "object", "properties": {"name": {"type": "string", "minLength": 8}}, "required": ["name"]}
    record = Generate(max_tokens=40, constraint=Constraint(kind="json_schema", source=json.dumps(schema)))
    assert counter.count('{"name": ""}') < lengths(record, "JSON:", counter).short <= 40
    choices = TextChoices(choices=("a", "a much longer choice"))
    found = lengths(choices, "x", counter)
    assert (found.short, found.long) == (1, counter.count("a much longer choice"))


def test_a_prompt_shows_what_follows_only_with_examples() -> None:
    following = ("\nBorn:", NextAsk(name="born", question=Generate(max_tokens=4)))
    assert shows_how_it_goes_on(CARD, following)
    assert not shows_how_it_goes_on(CARD.replace("Born:", "Year:"), following)
    assert not shows_how_it_goes_on(CARD, ())


def test_answered_rows_say_what_the_rest_costs() -> None:
    """A thousand jobs whose rows cost 0.6 times what is expected, give or take: the rest's mean is in the range."""
    rng = random.Random(0)
    outside = 0
    for _ in range(1000):
        expected = [rng.uniform(50, 500) for _ in range(200)]
        real = [0.6 * e * rng.lognormvariate(0, 0.3) for e in expected]
        ratio = real_over_expected(real[:20], expected[:20])
        assert ratio is not None and ratio.low < ratio.middle < ratio.high < 3 * ratio.low
        outside += not ratio.low <= sum(real[20:]) / sum(expected[20:]) <= ratio.high
    assert outside <= 10
    assert real_over_expected([1.0] * (MIN_ROWS - 1), [1.0] * (MIN_ROWS - 1)) is None
    assert real_over_expected([0.0] * 9, [0.0] * 9) is None


def dry(counter: TokenizerCounter, call: TextCall, guess: Guess, *, batch: bool) -> DryBackend:
    """40 rows that make the same call."""
    model = resolve_api_model("openai/any", base_url="http://127.0.0.1:1/v1")
    backend = DryBackend(model, counter, guess, batch=batch)
    operation = call.question if isinstance(call.question, Generate) else Choose(alternatives=((1,), (2,)))
    ids = counter.text_ids(call.prefix)
    backend.submit(
        [Request(request_id=i, program_id=i, prompt_ids=ids, operation=operation, seed=i, text=call) for i in range(40)]
    )
    assert len(backend.step()) == 40
    return backend


def test_a_wave_goes_ahead_before_anything_is_seen(counter: TokenizerCounter) -> None:
    line = Generate(max_tokens=16, stop=("\n",))
    following = ("\nBorn:", NextAsk(name="born", question=line))
    call = TextCall(chat=False, messages=(), prefix="A story.\nName:", name="name", question=line, following=following)
    ignored = Guess(length="long", choice="first", template="ignored")
    one_by_one, batched = (dry(counter, call, ignored, batch=batch).calls for batch in (False, True))
    wasted = [[made for made in calls if not made.is_request] for calls in (one_by_one, batched)]
    assert [len(found) for found in wasted] == [PROBES, 40]
    assert all(made.once for made in wasted[0]) and not any(made.once for made in wasted[1])
    single = dry(counter, call, Guess(length="long", choice="first", template="single"), batch=True)
    assert all(made.is_request for made in single.calls)


def test_a_batch_asks_for_a_choice_by_its_schema(counter: TokenizerCounter) -> None:
    question = TextChoices(choices=("yes", "no"))
    call = TextCall(chat=True, messages=(("user", "Is it?"),), prefix="", name="x", question=question)
    guess = Guess(length="typical", choice="any", template="likely")
    (told, *_), (asked, *_) = (dry(counter, call, guess, batch=batch).calls for batch in (False, True))
    assert told.tokens == Tokens(prompt=told.tokens.prompt, generated=1)
    assert asked.tokens.generated > 1 and asked.tokens.prompt > told.tokens.prompt


# --- held against a real server's usage ---------------------------------------------------------

TEMPLATES = [
    ("extract", "people"),
    ("classify", "reviews"),
    ("multiple_choice", "questions"),
    ("json_extract", "orders"),
    ("judge", "essays"),
]


def estimate_and_run(folder: Path, template: Path, data: Path, url: str, tokenizer: Path, *options: str) -> Any:
    """(the plan's costs, the run's report)"""
    arguments = (str(template), str(data), "--model", "openai/smollm2", "--base-url", url, "-o", "out.jsonl")
    whole = (*arguments, "--tokenizer", str(tokenizer), "--price", PRICE, *options)
    planned = cli("plan", *whole, cwd=folder)["cost"]
    return planned, cli("run", *whole, "--max-failures", "100%", cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize(("template", "data"), TEMPLATES)
def test_real_costs_lie_between_low_and_high(
    api_url: str, smollm2_dir: Path, tmp_path: Path, *, template: str, data: str
) -> None:
    program, rows = ROOT / f"templates/{template}.py", ROOT / f"samples/{data}.jsonl"
    planned, done = estimate_and_run(tmp_path, program, rows, api_url, smollm2_dir, "--limit", "10")
    found = planned["dollars"]["this job"]
    real = done["api"]["cost"]["dollars"]
    print(f"{template}: {found['low']:.6f} {real:.6f} {found['high']:.6f}, high/low {found['high'] / found['low']:.2f}")
    assert found["low"] <= real <= found["high"] <= 3 * found["low"]
    assert found["low"] <= found["expected"] <= found["high"]


@pytest.mark.slow
@pytest.mark.parametrize("template", [PEOPLE, IGNORED], ids=["followed", "ignored"])
def test_the_range_holds_for_followed_and_for_ignored_templates(
    api_url: str, smollm2_dir: Path, tmp_path: Path, template: str
) -> None:
    """Without examples in the prompt nobody knows whether a model will go on with the template: the range is wide."""
    (tmp_path / "program.py").write_text(template.format(options=""))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in people(24)))
    job = (tmp_path, tmp_path / "program.py", tmp_path / "data.jsonl", api_url, smollm2_dir)
    planned, some = estimate_and_run(*job, "--limit", "12")
    found, real = planned["dollars"]["this job"], some["api"]["cost"]["dollars"]
    print(f"{found['low']:.6f} {real:.6f} {found['high']:.6f}, high/low {found['high'] / found['low']:.2f}")
    assert found["low"] <= real <= found["high"]
    assert planned["answered_rows"] == 0

    planned, rest = estimate_and_run(*job)
    assert planned["answered_rows"] == 12
    narrow, real = planned["dollars"]["this job"], rest["api"]["cost"]["dollars"]
    print(f"{narrow['low']:.6f} {real:.6f} {narrow['high']:.6f}, high/low {narrow['high'] / narrow['low']:.2f}")
    assert narrow["low"] <= real <= narrow["high"]
    assert narrow["high"] / narrow["low"] < found["high"] / found["low"]


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHAT_SELECT, PEOPLE, IGNORED], ids=["select", "followed", "ignored"])
def test_a_batch_costs_what_it_was_estimated_at(
    api_url: str, smollm2_dir: Path, smollm2_tokenizer: Tokenizer, tmp_path: Path, template: str
) -> None:
    """Batches speculate in whole waves, and ask for choices by schema, at half of the price."""
    with BatchServer(upstream=api_url.removesuffix("/v1")).running() as server:
        world = ApiWorld(folder=tmp_path, base_url=server.base_url, batches={}, tokenizer=smollm2_tokenizer)
        rows = QUESTIONS if template == CHAT_SELECT else people(8)
        world.write(template if template == CHAT_SELECT else template.format(options=""), rows)
        job = ("program.py", "data.jsonl", "--model", "openai/smollm2", "--base-url", server.base_url)
        options = ("--tokenizer", str(smollm2_dir), "--price", PRICE)
        direct = cli("plan", *job, *options, cwd=tmp_path)["cost"]
        planned = cli("plan", *job, *options, "--batch-api", cwd=tmp_path)["cost"]
        report = world.run(tokenizer=str(smollm2_dir))
    assert planned["dollars"]["this job"] == planned["dollars"]["speculating, batch"]
    assert planned["dollars"]["speculating, batch"] == direct["dollars"]["speculating, batch"]
    assert planned["dollars"]["speculating"] == direct["dollars"]["speculating"]
    assert report.rows_failed == 0
    used = Tokens(prompt=report.prompt_tokens, generated=report.generated_tokens)
    real = float(parse_price(PRICE).cost(used, batch=True) or 0)
    found = planned["dollars"]["this job"]
    print(f"{found['low']:.6f} {real:.6f} {found['high']:.6f}, high/low {found['high'] / found['low']:.2f}")
    assert 0 < found["low"] <= real <= found["high"]
    if template == CHAT_SELECT:
        assert planned["first_prompt_tokens"] == {"tokens": used.prompt, "exact": True, "guess": None}
        assert direct["first_prompt_tokens"]["tokens"] < used.prompt
