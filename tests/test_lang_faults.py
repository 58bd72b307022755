"""Faults of the original frontend that this one must not have, one test each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglbatch as sgl
from sglbatch.engine.loader import load_engine
from sglbatch.lang import Driver, Program
from sglbatch.models import resolve_model
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import ErrorInfo, Request, Result, Usage
from tests.lang_backend import ScriptedBackend


def echo(prompt: str, request: Request) -> str | ErrorInfo:
    last = prompt.rsplit(maxsplit=1)[-1]
    return ErrorInfo(code="broken", message="the call broke") if last == "BAD" else f"[{last}]"


@pytest.fixture
def backend(smollm2_tokenizer: Tokenizer) -> ScriptedBackend:
    return ScriptedBackend(smollm2_tokenizer, echo)


def test_a_plain_str_can_be_added_to_a_fork_group(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a"
        forks = s.fork(2)
        forks += " b"
        forks += sgl.gen("x")
        forks.join()

    assert program.run(backend=backend)["x"] == ["[b]", "[b]"]


def test_a_users_stop_list_stays_as_it_is(backend: ScriptedBackend) -> None:
    stop = ["\n"]

    @sgl.function(stop=stop)
    def program(s: Any) -> None:
        s += sgl.user("hi") + sgl.assistant(sgl.gen("x", dtype=int, stop=stop) + sgl.gen("y"))

    for _ in range(2):
        program.run(backend=backend, stop=stop)
    assert stop == ["\n"]
    assert {request.operation.stop[:1] for request in backend.requests} == {("\n",)}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["x", "later", "never"])
def test_reading_after_an_error_raises_its_cause(backend: ScriptedBackend, name: str) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "is BAD" + sgl.gen("x") + " and" + sgl.gen("later")

    state = program.run(backend=backend)
    with pytest.raises(sgl.CallError, match="the call broke"):
        state[name]
    streamed = program.run(backend=backend, stream=True)
    with pytest.raises(sgl.CallError, match="the call broke"):
        list(streamed.text_iter("x"))


def test_an_error_in_a_branch_reaches_the_reader(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> str:
        s += "a"
        forks = s.fork(2)
        forks += [" fine", " BAD"]
        forks += sgl.gen("x")
        return str(forks[1]["x"])

    error = program.run(backend=backend).error()
    assert error is not None and (error.code, error.where) == ("broken", "x")


def test_a_failing_row_of_a_batch_is_not_silent(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any, word: str) -> None:
        s += word + sgl.gen("x")

    fine, bad = program.run_batch([("a",), ("BAD",)], backend=backend)
    assert fine.error() is None and fine["x"] == "[a]"
    assert bad.error() is not None
    with pytest.raises(sgl.CallError):
        bad["x"]


def test_a_second_join_on_a_name_drops_nothing(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a"
        for round_ in range(2):
            forks = s.fork(2)
            forks += lambda i, round_=round_: f" {round_}{i}" + sgl.gen("x")
            forks.join()

    assert program.run(backend=backend)["x"] == ["[00]", "[01]", "[10]", "[11]"]


def test_parameters_may_be_called_like_options_of_run(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any, n: int, stop: str, stream: str = "s", temperature: str = "t") -> str:
        return f"{n}{stop}{stream}{temperature}"

    assert program.run(n=3, stop="p", stream="r", backend=backend).ret_value == "3prt"
    (state,) = program.run_batch([{"n": 1, "stop": "", "temperature": "x"}], backend=backend)
    assert state.ret_value == "1sx"


def test_bind_and_fork_keep_the_speculation_setting(backend: ScriptedBackend) -> None:
    @sgl.function(num_api_spec_tokens=64)
    def program(s: Any, word: str, other: str) -> None:
        s += word
        s.copy().__iadd__(other + sgl.gen("x"))

    bound = program.bind(word="a").bind(other="b")
    assert bound.num_api_spec_tokens == 64
    row = Program(bound, {}, program_id=0, row_key="0")
    driver = Driver(tokenizer=backend.tokenizer, model_identity="m", context_len=99)
    driver.add(row)
    branch = row.streams[1]
    assert branch.host.ahead_tokens == 64


class AheadBackend(ScriptedBackend):
    """Answers the first gen of a program together with the second one, which is empty for one program."""

    def step(self) -> list[Result]:
        results = super().step()
        return [
            Result(request_id=r.request_id, text=r.text, output_ids=r.output_ids, usage=r.usage, ahead=self._ahead(r))
            for r in results
        ]

    def _ahead(self, result: Result) -> tuple[Result, ...]:
        if "first" not in result.text:
            return ()
        guess = f"guess for {result.text}"
        usage = Usage(prompt_tokens=1, generated_tokens=1)
        return (Result(request_id=-1, text=guess, output_ids=tuple(self.tokenizer.encode(guess)), usage=usage),)


def test_speculation_belongs_to_its_program_and_is_never_silently_empty(smollm2_tokenizer: Tokenizer) -> None:
    backend = AheadBackend(smollm2_tokenizer, lambda prompt, _: f"<{prompt.split()[-1]}>")

    @sgl.function
    def program(s: Any, word: str) -> None:
        s += f"{word}:" + f" {word}" + sgl.gen("x") + " and" + sgl.gen("y") + " then" + sgl.gen("z")

    one, two, three = program.run_batch([("first1",), ("first2",), ("plain",)], backend=backend)
    assert (one["y"], two["y"]) == ("guess for <first1>", "guess for <first2>")
    assert three["y"] and all(state["z"] for state in (one, two, three)), "what was not guessed is asked"


@pytest.mark.parametrize("regex", ["", None])
def test_an_empty_regex_is_an_error_and_none_is_none(regex: str | None) -> None:
    if regex is None:
        assert sgl.gen("x", regex=None).constraint is None  # type: ignore[union-attr]
        return
    with pytest.raises(sgl.SglbatchError) as caught:
        sgl.gen("x", regex=regex)
    assert caught.value.code == "invalid-argument"


def test_a_fork_before_any_text(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: f"branch {i}" + sgl.gen("x")
        forks.join("concate_and_append")

    state = program.run(backend=backend)
    assert state.text() == "branch 0[0]branch 1[1]"


def test_a_regex_ends_at_max_tokens_and_mixed_rows_do_not_disturb_each_other(smollm2_tokenizer: Tokenizer) -> None:
    engine = load_engine(resolve_model("smollm2-135m"), smollm2_tokenizer, kv_tokens=2048)

    @sgl.function(temperature=0, max_new_tokens=6)
    def program(s: Any, kind: str) -> None:
        s += "The number of days in a week is"
        options: dict[str, Any] = {"regex": {"regex": " [a-z]+"}, "int": {"dtype": int}, "free": {}}[kind]
        s += sgl.gen("x", **options)

    kinds = ["regex", "int", "free"]
    alone = [program.run(kind, backend=engine) for kind in kinds]
    together = list(program.run_batch([(kind,) for kind in kinds * 2], backend=engine))
    engine.scheduler.check_integrity()
    assert [state["x"] for state in together] == [state["x"] for state in alone] * 2
    regex, number, _ = alone
    assert regex.get_meta_info("x")["completion_tokens"] <= 6 and regex["x"].strip().isalpha()
    assert int(number["x"]) is not None


LOOP = """
import sglbatch as sgl

@sgl.function
def loop(s, word):
    s += word
    while True:
        s += sgl.gen("x", max_tokens=1, regex="[a-z]")
        if s["x"] == "!":
            break
"""


@pytest.mark.slow
def test_a_program_that_never_ends_is_a_row_error(tmp_path: Path, smollm2_dir: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "rows.jsonl").write_text('{"word": "a"}\n')
    out = tmp_path / "out.jsonl"
    options = ["--model", str(smollm2_dir), "-o", str(out), "--max-calls-per-row", "5"]
    command = [sys.executable, "-m", "sglbatch", "run", str(tmp_path / "loop.py"), str(tmp_path / "rows.jsonl")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    assert row["_error"]["code"] == "too-many-calls" and "more than 5 calls" in row["_error"]["message"]
