"""Programs run as written: sequences, control flow, branches, nesting, outside calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import sglbatch as sgl
from sglbatch.lang import Driver, Program
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import ErrorInfo, Request
from tests.lang_backend import ScriptedBackend

MakeBackend = Callable[..., ScriptedBackend]


def last_word(prompt: str, request: Request) -> str:
    """Answers with the prompt's last word in brackets."""
    return f"[{prompt.rsplit(maxsplit=1)[-1]}]"


@pytest.fixture
def backend(smollm2_tokenizer: Tokenizer) -> ScriptedBackend:
    return ScriptedBackend(smollm2_tokenizer, last_word)


def test_gens_in_sequence(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any, word: str) -> str:
        s += "Say " + word
        s += sgl.gen("first", max_tokens=7, stop="\n", temperature=0)
        s += " then more" + sgl.gen("second")
        return s["first"] + "!"

    state = program.run("one", backend=backend, temperature=0.5)
    assert state["first"] == "[one]"
    assert state["second"] == "[more]"
    assert state.ret_value == "[one]!"
    assert state.text() == "Say one[one] then more[more]"
    assert backend.prompts == ["Say one", "Say one[one] then more"]
    first, second = (request.operation for request in backend.requests)
    assert (first.max_tokens, first.stop, first.temperature) == (7, ("\n",), 0)
    assert (second.max_tokens, second.temperature) == (128, 0.5)
    assert [request.keep for request in backend.requests] == [True, False]
    assert state.get_meta_info("first")["finish_reason"] == {"type": "stop"}
    assert state.error() is None
    assert backend.ended_programs == [backend.requests[0].program_id]


def test_generated_ids_stay_as_they_are(backend: ScriptedBackend, smollm2_tokenizer: Tokenizer) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x") + "b" + sgl.gen("y")

    program.run(backend=backend)
    ids = backend.requests[1].prompt_ids.tolist()
    encode = smollm2_tokenizer.encode
    assert ids == encode("a") + encode("[a]") + encode("b")


def test_control_flow_on_results(smollm2_tokenizer: Tokenizer) -> None:
    backend = ScriptedBackend(smollm2_tokenizer, lambda prompt, _: str(prompt.count("?")))

    @sgl.function
    def count(s: Any, limit: int) -> None:
        s["n"] = 0
        while s["n"] < limit:
            s += "?"
            s += sgl.gen("last")
            s["n"] = int(s["last"])

    states = count.run_batch([{"limit": i} for i in range(4)], backend=backend)
    assert [state["n"] for state in states] == [0, 1, 2, 3]
    assert states[3].text() == "?1?2?3"
    assert "last" in states[1] and "last" not in states[0]


def test_a_name_read_in_a_loop_is_the_latest(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> list[str]:
        seen = []
        for word in ("a", "b", "c"):
            s += f" {word}"
            s += sgl.gen("x")
            seen.append(s["x"])
        return seen

    assert program.run(backend=backend).ret_value == ["[a]", "[b]", "[c]"]


def test_fork_and_gather(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Start" + sgl.gen("head") + "."
        forks = s.fork(3)
        forks += " same"
        forks += [" a", " b", " c"]
        forks += lambda i: sgl.gen("x") if i != 1 else ""
        forks[1] += sgl.gen("only")
        forks.join()
        s += " End" + sgl.gen("tail")
        assert s["x"] == ["[a]", None, "[c]"]

    state = program.run(backend=backend)
    assert state.error() is None
    assert state["x"] == ["[a]", None, "[c]"]
    assert state["only"] == [None, "[b]", None]
    assert state.text() == "Start[Start]. End[End]"
    assert backend.prompts[1:4] == [f"Start[Start]. same {x}" for x in "abc"]


def test_fork_begins_where_the_parent_stood(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> tuple[str, str]:
        s += "one"
        branch = s.copy()
        s += " two"
        branch += sgl.gen("x")
        s += sgl.gen("x")
        return branch["x"], s["x"]

    assert program.run(backend=backend).ret_value == ("[one]", "[two]")


def test_a_second_join_of_a_name_loses_nothing(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "S"
        for words in ([" a", " b"], [" c", " d"]):
            forks = s.fork(2)
            forks += words
            forks += sgl.gen("x")
            forks.join()

    assert program.run(backend=backend)["x"] == ["[a]", "[b]", "[c]", "[d]"]


def test_join_concatenates(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Tips"
        forks = s.fork(2)
        forks += lambda i: f" tip{i}" + sgl.gen("tip")
        forks.join("concate_and_append")
        s += " so" + sgl.gen("end")

    state = program.run(backend=backend)
    assert state.text() == "Tips tip0[tip0] tip1[tip1] so[so]"
    assert backend.prompts[-1] == "Tips tip0[tip0] tip1[tip1] so"
    assert "tip" not in state


def test_functions_in_functions(backend: ScriptedBackend) -> None:
    @sgl.function(temperature=0.25)
    def inner(s: Any, word: str) -> str:
        s += f" {word}" + sgl.gen("inner", max_tokens=3)
        return "got " + s["inner"]

    @sgl.function(temperature=0.75, max_new_tokens=9)
    def outer(s: Any) -> str:
        s += "Begin"
        value = inner(s, "deep")
        s += sgl.gen("after")
        apart = inner("alone")
        s["apart"] = apart["inner"]
        return f"{value}, {apart.ret_value}"

    state = outer.run(backend=backend)
    assert state.ret_value == "got [deep], got [alone]"
    assert state.text() == "Begin deep[deep][deep[deep]]"
    assert state["apart"] == "[alone]"
    assert [(r.operation.temperature, r.operation.max_tokens) for r in backend.requests] == [
        (0.25, 3),
        (0.75, 9),
        (0.25, 3),
    ]


def test_bind_and_parameters_with_names_of_options(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any, n: int, temperature: str, stop: str = "z") -> str:
        return f"{n} {temperature} {stop}"

    assert program.bind(n=5).run(temperature="hot", backend=backend).ret_value == "5 hot z"
    with pytest.raises(sgl.SglbatchError, match="no parameter 'm'"):
        program.bind(m=5)
    with pytest.raises(sgl.SglbatchError, match="was not given n"):
        program.run(temperature="a", backend=backend)


def test_run_batch_in_order_and_with_failures(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any, word: str) -> None:
        s += word + sgl.gen("x")
        if word == "bad":
            raise ValueError("no good")

    states = program.run_batch([("a",), ("bad",), {"word": "c"}], backend=backend, generator_style=True)
    first, bad, third = states
    assert (first["x"], third["x"]) == ("[a]", "[c]")
    error = bad.error()
    assert error is not None and error.code == "program-error"
    assert error.message.startswith("ValueError: no good (test_lang_programs.py:")
    assert bad["x"] == "[bad]"
    with pytest.raises(sgl.CallError, match="no good"):
        bad["missing"]


def double(value: int) -> dict[str, int]:
    return {"twice": 2 * value}


def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "late"


def test_outside_calls(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any, value: int) -> Any:
        found = sgl.call(double, value)
        s += f"It is {found['twice']}" + sgl.gen("x")
        return sgl.call(double, len(s["x"]))

    states = program.run_batch([(i,) for i in range(30)], backend=backend)
    assert [state["x"] for state in states] == [f"[{2 * i}]" for i in range(30)]
    assert states[29].ret_value == {"twice": 8}


@pytest.mark.parametrize(
    ("function", "args", "code"),
    [
        (lambda: 1 / 0, (), "call-failed"),
        (object, (), "call-result"),
        (double, (object(),), "call-arguments"),
        (slow, (5,), "call-timeout"),
        (str.upper, ("a builtin",), "no error"),
    ],
)
def test_outside_calls_that_fail(
    backend: ScriptedBackend, function: Callable[..., Any], args: tuple[Any, ...], code: str
) -> None:
    @sgl.function
    def program(s: Any) -> str:
        s += "text"
        try:
            sgl.call(function, *args, timeout_s=0.2)
        except sgl.CallError as error:
            return error.code
        return "no error"

    before = time.process_time()
    state = program.run(backend=backend)
    assert state.ret_value == code
    assert state.error() is None
    assert time.process_time() - before < 0.15


def failing(prompt: str, request: Request) -> str | ErrorInfo:
    return ErrorInfo(code="too-big", message="does not fit") if "BAD" in prompt else "fine"


def test_failed_calls(smollm2_tokenizer: Tokenizer) -> None:
    backend = ScriptedBackend(smollm2_tokenizer, failing)

    @sgl.function
    def unread(s: Any) -> None:
        s += "ok" + sgl.gen("a") + "BAD" + sgl.gen("b") + sgl.gen("c")

    state = unread.run(backend=backend)
    assert state["a"] == "fine"
    for name in ("b", "c"):
        with pytest.raises(sgl.CallError, match="does not fit"):
            state[name]
    error = state.error()
    assert error is not None and (error.code, error.where) == ("too-big", "b")

    @sgl.function
    def caught(s: Any) -> str:
        s += "ok" + sgl.gen("a")
        s["a"]
        branch = s.copy()
        branch += "BAD" + sgl.gen("a")
        try:
            return str(branch["a"])
        except sgl.CallError as error:
            return error.code

    state = caught.run(backend=backend)
    assert (state.ret_value, state.error()) == ("too-big", None)


@pytest.mark.parametrize(("go_on", "code"), [(False, None), (True, "too-big")])
def test_adding_to_a_failed_branch_is_not_forgotten(
    smollm2_tokenizer: Tokenizer, go_on: bool, code: str | None
) -> None:
    @sgl.function
    def program(s: Any) -> str:
        s += "BAD" + sgl.gen("a")
        try:
            s["a"]
        except sgl.CallError:
            if go_on:
                s += "go on" + sgl.gen("b")
        return "done"

    backend = ScriptedBackend(smollm2_tokenizer, failing)
    driver = Driver(tokenizer=smollm2_tokenizer, model_identity="m", context_len=99, backend=backend)
    row = Program(program, {}, program_id=0, row_key="0")
    driver.add(row)
    while driver.unfinished:
        driver.step()
    assert row.outcome.returned == "done"
    assert (row.outcome.error.code if row.outcome.error else None) == code


def test_errors_of_branches_reach_the_join(smollm2_tokenizer: Tokenizer) -> None:
    backend = ScriptedBackend(smollm2_tokenizer, failing)

    @sgl.function
    def program(s: Any) -> None:
        s += "S"
        forks = s.fork(3)
        forks += [" x", " BAD", " y"]
        forks += sgl.gen("x")
        forks.join()
        s += sgl.gen("after")
        s["x"]

    state = program.run(backend=backend)
    error = state.error()
    assert error is not None and (error.code, error.where) == ("too-big", "x")
    with pytest.raises(sgl.CallError, match="does not fit"):
        state["after"]


def test_errors_of_rows(backend: ScriptedBackend) -> None:
    def code_of(body: Callable[[Any], object]) -> tuple[str, str]:
        def program(s: Any) -> object:
            return body(s)

        error = sgl.function(program).run(backend=backend).error()
        assert error is not None
        return error.code, error.message

    def add(value: object) -> Callable[[Any], object]:
        return lambda s: s.__iadd__(value)

    def loop(s: Any) -> None:
        s += "go"
        while True:
            s += sgl.gen("x")
            s["x"]

    def stop_python(s: Any) -> None:
        raise SystemExit(3)

    assert code_of(add(sgl.gen("x"))) == ("empty-prompt", "the prompt is empty: add text before the first gen")
    assert code_of(add(sgl.select("x", ["a", "b"])))[0] == "empty-prompt"
    assert code_of(add(None))[0] == "null-text"
    assert code_of(add(5))[0] == "not-text"
    assert code_of(add("x" * 70_000 + sgl.gen("x")))[0] == "prompt-too-long"
    assert code_of(stop_python)[1].startswith("SystemExit: 3")
    code, message = code_of(lambda s: [s.set_var("a", 1), s["b"]])
    assert code == "unknown-variable" and "there are: a" in message


def test_endless_loops_on_answers_end(smollm2_tokenizer: Tokenizer) -> None:
    @sgl.function
    def program(s: Any) -> None:
        while True:
            s.copy().__iadd__("go" + sgl.gen("x"))
            sgl.call(double, 1)

    state = program.run(backend=ScriptedBackend(smollm2_tokenizer, lambda *_: "x"))
    error = state.error()
    assert error is not None and error.code == "too-many-calls"


def test_keyboard_interrupt_passes_on(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program.run(backend=backend)


def test_arguments_are_checked_when_made() -> None:
    stop = ["a"]
    expression = sgl.gen("x", stop=stop)
    stop.append("b")
    assert expression.sampling.stop == ("a",)
    for wrong in (
        lambda: sgl.gen("x", max_tokens=0),
        lambda: sgl.gen("x", temperature=-1),
        lambda: sgl.gen("x", top_p=0),
        lambda: sgl.gen("x", regex=""),
        lambda: sgl.gen("x", stop=[""]),
        lambda: sgl.gen("x", dtype=list),
        lambda: sgl.gen("x", dtype=int, regex="a"),
        lambda: sgl.select("x", []),
        lambda: sgl.select("x", ["a", 3]),  # type: ignore[list-item]
        lambda: sgl.select("x", ["a", "a"]),
        lambda: sgl.gen(""),
    ):
        with pytest.raises(sgl.SglbatchError) as caught:
            wrong()
        assert caught.value.code == "invalid-argument"
    with pytest.raises(sgl.SglbatchError, match="_error"):
        sgl.gen("_error")
    assert isinstance(sgl.gen("x", choices=["a", "b"]), type(sgl.select("x", ["a"])))
    assert sgl.gen_int("n").constraint is not None
