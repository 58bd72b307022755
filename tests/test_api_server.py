"""API models from end to end, on a real server with a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglbatch.job.report import Report
from sglbatch.tokenizer import Tokenizer
from tests.api_world import PEOPLE, ApiWorld, people

OUTPUT_WEIGHT = 4

IGNORED = """
import sglbatch as sgl

@sgl.function(temperature=0{options})
def ignored(s, text):
    s += f"A short story about {{text}}\\nOnce upon a time," + sgl.gen("a", max_tokens=12, stop="\\n")
    s += "\\n[[Q7]] " + sgl.gen("b", max_tokens=12, stop="\\n")
    s += "\\n[[Q8]] " + sgl.gen("c", max_tokens=12, stop="\\n")
"""


def values(world: ApiWorld) -> list[tuple[Any, ...]]:
    rows = world.output()
    assert all(row["_error"] is None for row in rows)
    return [tuple(v for k, v in row.items() if not k.startswith("_")) for row in rows]


def with_and_without(
    folder: Path, url: str, template: str, rows: list[dict[str, Any]], tokenizer: Tokenizer | None
) -> tuple[tuple[Report, list[Any]], tuple[Report, list[Any]]]:
    """The same job speculating and not, in that order."""
    results = []
    for name, options in (("with", ""), ("without", ", num_api_spec_tokens=0")):
        (folder / name).mkdir()
        world = ApiWorld(folder=folder / name, base_url=url, tokenizer=tokenizer)
        world.write(template.format(options=options), rows)
        results.append((world.run(), values(world)))
    return results[0], results[1]


def cost(report: Report) -> float:
    return report.prompt_tokens + OUTPUT_WEIGHT * report.generated_tokens


def test_one_call_fills_three_variables(api_url: str, smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    ahead, single = with_and_without(tmp_path, api_url, PEOPLE, people(4), smollm2_tokenizer)
    assert single[0].requests == 12 and single[0].api["calls_ahead"] == 0
    assert ahead[0].requests + ahead[0].api["calls_ahead"] == 12
    assert ahead[0].requests <= 6
    assert ahead[1] == single[1]


def test_without_the_tokenizer_only_certain_values_are_taken(api_url: str, tmp_path: Path) -> None:
    ahead, single = with_and_without(tmp_path, api_url, PEOPLE, people(3), None)
    assert ahead[1] == single[1]
    assert ahead[0].requests < single[0].requests


@pytest.mark.slow
def test_a_followed_template_costs_a_third(api_url: str, smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    ahead, single = with_and_without(tmp_path, api_url, PEOPLE, people(100), smollm2_tokenizer)
    print("prompt tokens", single[0].prompt_tokens, ahead[0].prompt_tokens, "cost", cost(single[0]), cost(ahead[0]))
    different = sum(a != b for a, b in zip(ahead[1], single[1], strict=True))
    assert single[0].prompt_tokens / ahead[0].prompt_tokens >= 2.8
    assert different == 0


@pytest.mark.slow
def test_an_ignored_template_costs_no_more(api_url: str, smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    ahead, single = with_and_without(tmp_path, api_url, IGNORED, people(100), smollm2_tokenizer)
    print("cost", cost(single[0]), cost(ahead[0]), ahead[0].api)
    assert ahead[0].api["speculation"]["places_off"]
    assert cost(ahead[0]) <= 1.1 * cost(single[0])


CHAT_RUN = """
import sglbatch as sgl

@sgl.function(temperature=0)
def card(s, text):
    s += sgl.system("You fill in forms.")
    s += sgl.user(text)
    s += sgl.assistant(
        "Name: " + sgl.gen("name", max_tokens=12, stop="\\n")
        + "\\nBorn: " + sgl.gen("born", regex="1[0-9]{3}", max_tokens=8)
        + "\\nKind: " + sgl.select("kind", choices=["person", "place"])
    )
    s += sgl.user("Is that a person? Answer with yes or no.")
    s += sgl.assistant(sgl.select("sure", choices=["yes", "no"]))
    return s.text()
"""


def test_a_chat_turn_is_one_call_held_to_a_schema(api_url: str, tmp_path: Path) -> None:
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    world.write(CHAT_RUN, people(2))
    report = world.run()
    assert report.requests == 4 and report.api["calls_ahead"] == 4, report.api
    methods = report.api["methods"]
    assert methods.pop("fields by schema") == 2
    assert sum(methods.values()) == 2 and methods.keys() <= {"logprobs of choices", "one field by schema"}
    for row in world.output():
        assert row["_error"] is None and row["name"] and 1000 <= int(row["born"]) <= 1999
        assert row["kind"] in ("person", "place") and row["sure"] in ("yes", "no")
        text = f"Name: {row['name']}\nBorn: {row['born']}\nKind: {row['kind']}"
        assert text in row["_return"], "the fields are put back into the template's text"
        means = row["_usage"]["means"]
        assert means["kind"] == "fields by schema" and means["sure"] in ("logprobs of choices", "one field by schema")


def test_editing_the_last_question_asks_only_that_again(api_url: str, tmp_path: Path) -> None:
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    world.write(CHAT_RUN, people(2))
    world.run()
    world.write(CHAT_RUN.replace("Is that a person?", "Is that somebody?"), people(2))
    report = world.run()
    assert report.requests == 2 and report.calls_reused == 6


def test_text_outside_of_messages_is_a_rows_error(api_url: str, tmp_path: Path) -> None:
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    world.write(CHAT_RUN.replace('s += sgl.user("Is', 's += "stray"\n    s += sgl.user("Is'), people(1))
    world.run()
    assert world.output()[0]["_error"]["code"] == "text-outside-messages"
