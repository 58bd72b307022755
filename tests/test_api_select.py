"""Select on an endpoint: by which means, named in the output, and decided as the model's probabilities say."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglbatch.api_spec.first_token import MIN_MASS, can_tell, decide
from sglbatch.types import TextChoices
from tests.api_world import SHORT, ApiWorld
from tests.fault_proxy import FaultProxy

YES_NO = TextChoices(choices=("yes", "no"))


def top(**probabilities: float) -> list[tuple[str, float]]:
    return [(token.replace("_", " "), math.log(p)) for token, p in probabilities.items()]


def chosen(question: TextChoices, seed: int = 0, **probabilities: float) -> str | None:
    decision = decide(question, top(**probabilities), seed=seed)
    return None if decision is None else question.choices[decision.choice]


def test_the_likeliest_first_token_names_the_choice() -> None:
    assert chosen(YES_NO, yes=0.6, no=0.35) == "yes"
    assert chosen(YES_NO, _yes=0.05, y=0.05, no=0.35, No=0.5) is None, "less than half begins with a choice in all"
    assert chosen(YES_NO, _no=0.3, no=0.3, yes=0.35) == "no", "every way of writing it counts"
    assert chosen(YES_NO, yes=0.45, no=0.40) is None, "what is not named could turn it"
    assert chosen(YES_NO, yes=0.48, no=0.44, Maybe=0.079) == "yes", "another answer cannot"


def test_choices_that_begin_alike_are_left_open() -> None:
    assert not can_tell(TextChoices(choices=("art", "artist"))) and not can_tell(TextChoices(choices=("a", " ")))
    alike = TextChoices(choices=("positive", "poor"))
    assert can_tell(alike)
    assert chosen(alike, po=0.9, positive=0.08) is None
    assert chosen(alike, pos=0.9, po=0.05) == "positive"
    numbers = TextChoices(choices=("1", "2"))
    assert chosen(numbers, **{"12": 0.9, "2": 0.06}) is None, "12 is not 1"
    assert chosen(numbers, **{"2.": 0.9}) == "2"


def test_log_probabilities_are_those_of_the_choices_alone() -> None:
    decision = decide(YES_NO, top(yes=0.6, no=0.3, Well=0.1), seed=0)
    assert decision is not None and decision.logprobs is not None
    assert [round(math.exp(p), 6) for p in decision.logprobs] == [0.666667, 0.333333]
    only = decide(YES_NO, top(yes=0.97), seed=0)
    assert only is not None and only.logprobs is None


def test_drawn_choices_follow_the_probabilities() -> None:
    drawn = TextChoices(choices=("yes", "no"), temperature=1.0)
    share = sum(chosen(drawn, seed, yes=0.7, no=0.3) == "yes" for seed in range(2000)) / 2000
    assert 0.66 < share < 0.74
    assert chosen(drawn, yes=0.7, no=0.2) is None, "a tenth is not known"
    cold = TextChoices(choices=("yes", "no"), temperature=0.1)
    assert all(chosen(cold, seed, yes=0.7, no=0.3) == "yes" for seed in range(200))


TOKENS = ["a", "b", "ab", "ba", " a", "c", "ca", "x", "", " "]


@given(
    st.lists(st.sampled_from(["a", "ab", "b", "ca", "c"]), min_size=2, max_size=3, unique=True),
    st.lists(st.tuples(st.sampled_from(TOKENS), st.floats(0.001, 1)), min_size=1, max_size=8, unique_by=lambda t: t[0]),
)
def test_a_certain_choice_stays_whatever_the_open_tokens_turn_out_to_be(
    choices: list[str], weights: list[tuple[str, float]]
) -> None:
    """Give all that is not certainly another choice's to any rival: it does not catch up."""
    question = TextChoices(choices=tuple(choices))
    if not can_tell(question):
        return
    total = sum(weight for _, weight in weights) * 1.1
    named = [(token, math.log(weight / total)) for token, weight in weights]
    decision = decide(question, named, seed=0)
    if decision is None:
        return
    own: dict[str, float] = dict.fromkeys(choices, 0.0)
    open_mass = 1 - sum(weight / total for _, weight in weights)
    for token, weight in weights:
        text = token.strip()
        fitting = [c for c in choices if text and (c.startswith(text) or re.fullmatch(rf"{c}\b.*", text))]
        if len(fitting) == 1:
            own[fitting[0]] += weight / total
        elif fitting:
            open_mass += weight / total
    best = choices[decision.choice]
    assert sum(own.values()) >= MIN_MASS - 1e-9
    assert all(own[best] > own[rival] + open_mass - 1e-9 for rival in choices if rival != best)


# --- on a real server ---------------------------------------------------------------------------

CHAT_SELECT = """
import sglbatch as sgl

@sgl.function(temperature=0)
def ask(s, q):
    s += sgl.system("You answer with one word.")
    s += sgl.user("Is fire hot? Answer with yes or no.") + sgl.assistant("yes")
    s += sgl.user("Is ice hot? Answer with yes or no.") + sgl.assistant("no")
    s += sgl.user(q + " Answer with yes or no.")
    s += sgl.assistant(sgl.select("verdict", choices=["yes", "no"]))
    p = s.get_meta_info("verdict").get("choice_logprobs")
    s["p"] = p and p[s["verdict"]]
"""

QUESTIONS = [{"q": q} for q in ("Is water wet?", "Can fish fly?", "Is the sun cold?", "Do birds have wings?")]


def first_tokens(url: str, question: str) -> dict[str, float]:
    """What the server itself says of the first token, asked without any of our code."""
    messages = [
        {"role": "system", "content": "You answer with one word."},
        {"role": "user", "content": "Is fire hot? Answer with yes or no."},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "Is ice hot? Answer with yes or no."},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": question + " Answer with yes or no."},
    ]
    body = {"model": "smollm2", "messages": messages, "temperature": 1, "max_tokens": 1}
    body |= {"logprobs": True, "top_logprobs": 20}
    request = urllib.request.Request(
        url + "/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        value = json.loads(response.read())
    return {t["token"]: t["logprob"] for t in value["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}


def test_a_select_is_one_token_where_the_first_token_tells(api_url: str, tmp_path: Path) -> None:
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    world.write(CHAT_SELECT, QUESTIONS)
    report = world.run()
    rows = world.output()
    told = [row for row in rows if row["_usage"]["means"] == {"verdict": "logprobs of choices"}]
    assert told, rows
    for row in told:
        assert row["_usage"]["generated_tokens"] == 1
        mine = first_tokens(api_url, QUESTIONS[rows.index(row)]["q"])
        masses = {
            choice: sum(math.exp(p) for token, p in mine.items() if token.strip() and choice.startswith(token.strip()))
            for choice in ("yes", "no")
        }
        assert row["verdict"] == max(masses, key=masses.__getitem__)
        if row["p"] is not None:
            assert math.exp(row["p"]) == pytest.approx(masses[row["verdict"]] / sum(masses.values()), abs=0.06)
    others = [row for row in rows if row not in told]
    assert all(row["_usage"]["means"] == {"verdict": "one field by schema"} for row in others)
    assert report.api["methods"].get("logprobs of choices", 0) == len(told)


def test_parquet_names_the_means_too(api_url: str, tmp_path: Path) -> None:
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    world.write(CHAT_SELECT, QUESTIONS[:2])
    output = tmp_path / "out.parquet"
    world.run(output=output)
    usage: list[dict[str, Any]] = pq.read_table(output).column("_usage").to_pylist()
    assert all(value["means"]["verdict"] in ("logprobs of choices", "one field by schema") for value in usage)


def test_a_server_without_log_probabilities_is_asked_once_for_them(api_url: str, tmp_path: Path) -> None:
    def refuse(body: dict[str, Any]) -> str | None:
        return "logprobs are not supported by this server" if "logprobs" in body else None

    with FaultProxy(upstream=api_url.removesuffix("/v1"), refuse=refuse).running() as proxy:
        world = ApiWorld(folder=tmp_path, base_url=proxy.base_url, concurrency=1)
        world.write(CHAT_SELECT, QUESTIONS)
        assert world.run().rows_failed == 0
        asked = [seen for seen in proxy.seen if "logprobs" in seen.body]
    assert len(asked) == 1 and len(proxy.seen) == 1 + len(QUESTIONS)
    assert all(row["_usage"]["means"] == {"verdict": "one field by schema"} for row in world.output())


PLAIN_SELECT = """
import sglbatch as sgl

@sgl.function(temperature=0)
def sort(s, q):
    s += "apple: fruit\\ncarrot: vegetable\\npear: fruit\\nleek: vegetable\\n" + q + ": "
    s += sgl.select("kind", choices=["fruit", "vegetable"])
"""


def test_plain_text_is_taken_where_it_begins_with_a_choice(api_url: str, tmp_path: Path) -> None:
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    world.write(PLAIN_SELECT, [{"q": "plum"}, {"q": "cabbage"}])
    world.run()
    means = [row["_usage"]["means"]["kind"] for row in world.output()]
    assert set(means) <= {"text that fits", "one field by schema"} and "text that fits" in means


def test_a_gen_has_no_means(api_url: str, tmp_path: Path) -> None:
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    world.write(SHORT, [{"q": "1"}])
    world.run()
    assert world.output()[0]["_usage"].keys() == {"prompt_tokens", "generated_tokens"}
