"""Log-probabilities of gens on an endpoint: the server's own, in the local engine's form, and never lost silently."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglbatch as sgl
from sglbatch.api_spec.answers import read_answer
from sglbatch.api_spec.backend import ApiBackend
from sglbatch.api_spec.client import Endpoint
from sglbatch.api_spec.families import check_question, family_of
from sglbatch.api_spec.limits import Limits
from sglbatch.api_spec.model import resolve_api_model
from sglbatch.api_spec.token_logprobs import Told, between, read_told
from sglbatch.api_spec.tokens import counter_for
from sglbatch.engine.loader import load_engine
from sglbatch.errors import SglbatchError
from sglbatch.lang.state import ProgramState
from sglbatch.models import resolve_model
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate
from tests.api_batches import BatchServer
from tests.api_world import ApiWorld
from tests.fault_proxy import FaultProxy
from tests.test_api_cost import cli

TOLERANCE = 0.15
"""Of likely tokens, between the server, which multiplies in 8 bits, and the engine in fp32 on the same weights.
Measured are 0.12 at the most, and 0.52 of less likely ones."""

PROMPT = "France: Paris\\nSpain: Madrid\\nItaly: Rome\\n"

PLAIN = f"""
import sglbatch as sgl

@sgl.function(temperature=0)
def plain(s, q):
    s += "{PROMPT}" + q + ":"
    s += sgl.gen("a", max_tokens=6{{stop}}, return_logprob=True, top_logprobs_num=3{{text}})
    s["told"] = s.get_meta_info("a")["output_token_logprobs"]
    s["top"] = s.get_meta_info("a")["output_top_logprobs"]
"""

CHAT = """
import sglbatch as sgl

@sgl.function(temperature=0)
def chat(s, q):
    s += sgl.user("What is the capital of " + q + "?")
    s += sgl.assistant(sgl.gen("a", max_tokens=6, return_logprob=True, top_logprobs_num=2))
    s["told"] = s.get_meta_info("a")["output_token_logprobs"]
    s["top"] = s.get_meta_info("a")["output_top_logprobs"]
"""

COUNTRIES = [{"q": name} for name in ("Germany", "Japan")]


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    """A choice of the server's, asked for without any of our code."""
    data = json.dumps({"model": "smollm2", "temperature": 0, "max_tokens": 6, **body}).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        choice: dict[str, Any] = json.loads(response.read())["choices"][0]
    return choice


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_they_are_the_servers_own(api_url: str, tmp_path: Path, chat: bool) -> None:
    """Without the tokenizer tokens are known by their text."""
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    world.write(CHAT if chat else PLAIN.format(stop="", text=""), COUNTRIES)
    world.run()
    for row, country in zip(world.output(), COUNTRIES, strict=True):
        assert row["_error"] is None, row
        if chat:
            message = {"role": "user", "content": f"What is the capital of {country['q']}?"}
            own = post(api_url, "/chat/completions", messages=[message], logprobs=True, top_logprobs=2)
            assert row["a"] == own["message"]["content"]
        else:
            own = post(api_url, "/completions", prompt=PROMPT.replace("\\n", "\n") + country["q"] + ":", logprobs=3)
            assert row["a"] == own["text"]
        content = own["logprobs"]["content"]
        assert [(token_id, text) for _, token_id, text in row["told"]] == [(None, c["token"]) for c in content]
        assert [p for p, _, _ in row["told"]] == pytest.approx([c["logprob"] for c in content], abs=0.02)
        assert "".join(text for _, _, text in row["told"]) == row["a"]
        assert [len(top) for top in row["top"]] == [2 if chat else 3] * len(content)
        for (p, _, text), top in zip(row["told"], row["top"], strict=True):
            assert top[0] == [p, None, text], "greedy: the token is the likeliest"
            assert [q for q, _, _ in top] == sorted((q for q, _, _ in top), reverse=True)


@sgl.function
def capital(s: Any, country: str) -> None:
    s += "France: Paris\nSpain: Madrid\nItaly: Rome\n" + country + ":"
    s += sgl.gen(
        "a", max_tokens=6, temperature=0, return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True
    )


@sgl.function
def reply(s: Any, country: str) -> None:
    s += sgl.system("You answer in one sentence.") + sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(
        sgl.gen("a", max_tokens=6, temperature=0, return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True)
    )


@pytest.mark.parametrize("program", [capital, reply], ids=["completions", "chat"])
def test_they_are_the_local_engines(api_url: str, smollm2_tokenizer: Tokenizer, program: Any) -> None:
    """With the tokenizer: the same ids and texts, and values as near as the server's arithmetic allows."""
    engine = load_engine(resolve_model("smollm2-135m"), smollm2_tokenizer, kv_tokens=4096)
    endpoint = Endpoint(model=resolve_api_model("openai/smollm2", base_url=api_url), limits=Limits())
    told = ApiBackend(endpoint, counter_for(smollm2_tokenizer), concurrency=2)
    compared = 0
    for country in ("Germany", "Japan", "Egypt", "Norway"):
        here: ProgramState = program.run(country=country, backend=engine)
        there: ProgramState = program.run(country=country, backend=told)
        assert here.error() is None and there.error() is None, there.error()
        mine, theirs = here.get_meta_info("a"), there.get_meta_info("a")
        pairs = list(zip(mine["output_token_logprobs"], theirs["output_token_logprobs"], strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a[1] != b[1]), len(pairs))
        for i, ((p, token_id, text), (q, other_id, other_text)) in enumerate(pairs[:same]):
            assert (token_id, text) == (other_id, other_text) and p == pytest.approx(q, abs=TOLERANCE)
            others = {token: p for p, token, _ in theirs["output_top_logprobs"][i]}
            both = [(p, others[token]) for p, token, _ in mine["output_top_logprobs"][i] if token in others]
            assert len(both) >= 2 and all(abs(p - q) < 5 * TOLERANCE for p, q in both)
            compared += 1
    told.close()
    assert compared >= 16


def test_temperature_is_not_in_them(api_url: str, tmp_path: Path) -> None:
    """They are the model's own, whatever its answers are drawn with."""
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    greedy = PLAIN.format(stop="", text="")
    tops = []
    for program in (greedy, greedy.replace("temperature=0", "temperature=1.5, top_p=0.9")):
        world.write(program, COUNTRIES)
        world.run()
        tops.append([row["top"][0] for row in world.output()])
    for cold, hot in zip(*tops, strict=True):
        assert [text for _, _, text in cold] == [text for _, _, text in hot]
        assert [p for p, _, _ in cold] == pytest.approx([p for p, _, _ in hot], abs=0.02)


def test_a_stop_is_told_as_far_as_it_was_generated(api_url: str, tmp_path: Path) -> None:
    """Of more stop strings than a request takes the others are cut off here, with the tokens behind them."""
    stops = ["zzz", "yyy", "xxx", "www", "\n"]
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    world.write(PLAIN.format(stop=f", stop={stops!r}", text=""), COUNTRIES)
    world.run()
    for row in world.output():
        assert row["_error"] is None and row["_finish"]["a"] == "stop"
        assert "".join(text for _, _, text in row["told"]) == row["a"] + "\n"
        assert len(row["top"]) == len(row["told"])


THREE = """
import sglbatch as sgl

@sgl.function(temperature=0)
def three(s, q):
    s += "Name: Ada\\nBorn: 1815\\nCity: London\\n\\nName: Carl\\nBorn: 1777\\nCity: Rome\\n\\nName:"
    s += sgl.gen("name", max_tokens=6, stop="\\n") + "\\nBorn:"
    s += sgl.gen("born", max_tokens=6, stop="\\n"{options})
    s += "\\nCity:" + sgl.gen("city", max_tokens=6, stop="\\n")
"""


def test_speculation_leaves_them_to_a_call_of_their_own(api_url: str, tmp_path: Path) -> None:
    with FaultProxy(upstream=api_url.removesuffix("/v1")).running() as proxy:
        world = ApiWorld(folder=tmp_path, base_url=proxy.base_url)
        told = '\n    s["told"] = s.get_meta_info("born")["output_token_logprobs"]\n'
        world.write(THREE.format(options=", return_logprob=True") + told, [{"q": "1"}])
        world.run()
        (row,) = world.output()
        assert row["_error"] is None and row["told"] and row["name"] and row["city"]
        assert "".join(text for _, _, text in row["told"]).startswith(row["born"])
        assert [seen.body.get("logprobs") for seen in proxy.seen] == [None, 1, None]
        assert [seen.body["max_tokens"] for seen in proxy.seen] == [6, 6, 6], "none went ahead into another"
        proxy.seen.clear()
        world.write(THREE.format(options=""), [{"q": "2"}])
        world.run()
        assert proxy.seen[0].body["max_tokens"] > 6, "without them the first goes ahead"


def test_calls_without_them_stay_answered(api_url: str, tmp_path: Path) -> None:
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    world.write(THREE.format(options=""), [{"q": "1"}])
    assert world.run().calls_reused == 0
    before = world.output()[0]
    world.write(THREE.format(options=", return_logprob=True"), [{"q": "1"}])
    report = world.run()
    assert report.calls_reused == 2 and report.requests == 1
    after = world.output()[0]
    assert [after[name] for name in ("name", "born", "city")] == [before[name] for name in ("name", "born", "city")]


def test_they_come_out_of_the_journal_as_they_went_in(api_url: str, tmp_path: Path) -> None:
    world = ApiWorld(folder=tmp_path, base_url=api_url)
    program = PLAIN.format(stop="", text="")
    world.write(program, COUNTRIES)
    world.run()
    before = world.output()
    world.write(program + '    s["more"] = "1"\n', COUNTRIES)
    assert world.run().requests == 0
    after = world.output()
    assert [row["told"] for row in after] == [row["told"] for row in before] and after[0]["more"] == "1"
    assert all(row["told"] and row["top"] for row in before)


def test_a_batch_brings_them(api_url: str, tmp_path: Path) -> None:
    with BatchServer(upstream=api_url.removesuffix("/v1")).running() as server:
        world = ApiWorld(folder=tmp_path, base_url=server.base_url, batches={})
        world.write(PLAIN.format(stop="", text=""), COUNTRIES)
        world.run()
        assert all("".join(text for _, _, text in row["told"]) == row["a"] for row in world.output())


def test_a_server_that_names_none_is_an_error_of_the_row(api_url: str, tmp_path: Path) -> None:
    def refuse(body: dict[str, Any]) -> str | None:
        body.pop("logprobs", None)
        return None

    with FaultProxy(upstream=api_url.removesuffix("/v1"), refuse=refuse).running() as proxy:
        world = ApiWorld(folder=tmp_path, base_url=proxy.base_url)
        world.write(PLAIN.format(stop="", text=""), COUNTRIES)
        assert world.run().rows_failed == 2
    assert [row["_error"]["code"] for row in world.output()] == ["no-logprobs"] * 2


def test_a_plan_knows_programs_that_read_them(api_url: str, smollm2_dir: Path, tmp_path: Path) -> None:
    source = (
        PLAIN.format(stop="", text="") + '    if s["told"][0][0] > -50: s += "\\nNext:" + sgl.gen("b", max_tokens=4)\n'
    )
    (tmp_path / "t.py").write_text(source)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in COUNTRIES))
    job = ("t.py", "d.jsonl", "--model", "openai/smollm2", "--base-url", api_url, "--tokenizer", str(smollm2_dir))
    cost = cli("plan", *job, cwd=tmp_path)["cost"]
    assert cost["calls"] == {"low": 4, "expected": 4, "high": 4}


# --- what a model does not have -----------------------------------------------------------------

WORD = Constraint(kind="regex", source="[a-z]+")


@pytest.mark.parametrize(
    ("model", "question", "completions", "named"),
    [
        ("gpt-5-mini", {"num_top_logprobs": 0}, False, "return_logprob=True"),
        ("gpt-4.1-mini", {"num_top_logprobs": 21}, False, "top_logprobs_num=21"),
        ("gpt-4.1-mini", {"num_top_logprobs": 20}, False, None),
        ("gpt-4", {"num_top_logprobs": 0}, False, None),
        ("gpt-3.5-turbo-instruct", {"num_top_logprobs": 5}, True, None),
        ("gpt-3.5-turbo-instruct", {"num_top_logprobs": 6}, True, "top_logprobs_num=6"),
        ("gpt-4.1-mini", {"num_top_logprobs": 0, "constraint": WORD}, False, "return_logprob=True"),
        ("gpt-4.1-mini", {"num_top_logprobs": 0, "input_logprobs_from": 0}, False, "logprob_start_len=0"),
    ],
)
def test_what_a_family_cannot_honour_is_named(
    model: str, question: dict[str, Any], completions: bool, named: str | None
) -> None:
    family = family_of(model, own_endpoint=False)
    asked = Generate(max_tokens=4, **question)
    if named is None:
        check_question(asked, family, model, completions=completions)
        return
    with pytest.raises(SglbatchError) as error:
        check_question(asked, family, model, completions=completions)
    assert error.value.code == "unsupported-by-model" and named in error.value.message and error.value.hint


def test_a_plan_refuses_them_before_anything_is_spent(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(CHAT)
    (tmp_path / "d.jsonl").write_text('{"q": "Japan"}\n')
    refused = cli("plan", "t.py", "d.jsonl", "--model", "openai/gpt-5-mini", "--temperature", "1", cwd=tmp_path, code=2)
    assert "unsupported-by-model" in refused
    source = CHAT.replace("temperature=0", "temperature=1")
    (tmp_path / "t.py").write_text(source)
    named = cli("plan", "t.py", "d.jsonl", "--model", "openai/gpt-5-mini", cwd=tmp_path, code=2)
    assert "return_logprob" in named and "leave return_logprob out" in named


# --- reading them -------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text(min_size=1, max_size=3), st.floats(-30, 0)), max_size=6))
def test_both_forms_say_the_same(tokens: list[tuple[str, float]]) -> None:
    likeliest = [{text: p, text + "x": p - 1} for text, p in tokens]
    newer = [
        {"token": text, "logprob": p, "top_logprobs": [{"token": t, "logprob": q} for t, q in reversed(top.items())]}
        for (text, p), top in zip(tokens, likeliest, strict=True)
    ]
    older = {"tokens": [t for t, _ in tokens], "token_logprobs": [p for _, p in tokens], "top_logprobs": likeliest}
    told = read_told({"content": newer})
    assert told == read_told(older)
    assert [(token.piece, token.logprob) for token in told] == [
        (text.encode("utf-8", "replace"), p) for text, p in tokens
    ]
    assert all(token.top[0].logprob > token.top[1].logprob for token in told)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: entry.pop("logprob"),
        lambda entry: entry.update(logprob=True),
        lambda entry: entry.update(logprob=float("-inf")),
        lambda entry: entry.update(token=7),
    ],
)
def test_half_of_them_are_none(spoil: Callable[[dict[str, Any]], object]) -> None:
    entries: list[dict[str, Any]] = [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0, "id": 5}]
    body = {"choices": [{"text": "ab", "finish_reason": "stop", "logprobs": {"content": entries}}]}
    assert len(read_answer(json.dumps(body).encode()).told) == 2
    spoil(entries[1])
    assert read_answer(json.dumps(body).encode()).told == ()


@given(st.lists(st.text("aé€ ", min_size=1, max_size=4), min_size=1, max_size=5), st.data())
def test_tokens_between_two_places(pieces: list[str], data: st.DataObject) -> None:
    """Held against looking at each character's token."""
    told = [Told(piece=piece.encode(), logprob=-float(i)) for i, piece in enumerate(pieces)]
    text = "".join(pieces)
    begin = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(begin + 1, len(text)))
    owner = [i for i, piece in enumerate(pieces) for _ in piece]
    assert between(told, text, begin, end) == tuple(told[i] for i in dict.fromkeys(owner[begin:end]))
    after = Told(piece=b"", logprob=-9.0)
    assert between([*told, after], text, 0, None) == (*told, after)
    assert between(told, text + "!", 0, None) is None


def test_ids_are_those_of_the_known_tokenizer(smollm2_tokenizer: Tokenizer) -> None:
    counter = counter_for(smollm2_tokenizer)
    paris = smollm2_tokenizer.encode(" Paris")[0]
    assert counter.token_id(b" Paris", None) == counter.token_id(b" Paris", paris) == paris
    assert counter.token_id(b" Paris", paris + 1) == paris, "another tokenizer's id is not believed"
    end = smollm2_tokenizer.specials["<|im_end|>"]
    assert counter.token_id(b"", paris) == paris, "nothing contradicts it"
    assert counter.token_id(b"", end) == counter.token_id(b"<|im_end|>", None) == end
    assert counter.token_id(b" Paris and more", None) is None and counter.token_id(b"", None) is None
    assert counter.token_text(paris) == " Paris" and counter.token_text(end) == "<|im_end|>"
    partial = next(i for i, data in enumerate(smollm2_tokenizer.token_bytes) if data == b"\xc3")
    assert counter.token_id(b"\xc3", None) == partial
    openai = counter_for(None, family_of("gpt-4.1-mini", own_endpoint=False))
    token_id = openai.token_id(b" Paris", None)
    assert token_id is not None and openai.token_text(token_id) == " Paris"
    assert openai.token_id(b"\xc3", None) is None
    assert counter_for(None).token_id(b" Paris", paris) is None
