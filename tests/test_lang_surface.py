"""Every name, argument and default of the language, one after another (docs/language.md lists them)."""

from __future__ import annotations

import asyncio
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sglbatch as sgl
from sglbatch.lang import Driver, Program
from sglbatch.lang.dialect import TokenDialect
from sglbatch.lang.environment import Environment
from sglbatch.lang.graph import Graph
from sglbatch.lang.reasoning import MARKS, split_reasoning
from sglbatch.lang.sharing import SharedBackends
from sglbatch.lang.state import ProgramState
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Choose, ErrorInfo, Generate, Request
from tests.lang_backend import ScriptedBackend


def echo(prompt: str, request: Request) -> str | int:
    """The prompt's last word in brackets; a select takes its last choice."""
    if isinstance(request.operation, Choose):
        return len(request.operation.alternatives) - 1
    return f"[{prompt.rsplit(maxsplit=1)[-1]}]"


@pytest.fixture
def backend(smollm2_tokenizer: Tokenizer) -> ScriptedBackend:
    return ScriptedBackend(smollm2_tokenizer, echo)


def run(backend: ScriptedBackend, body: Any, **options: Any) -> ProgramState:
    def program(s: Any) -> Any:
        return body(s)

    state = sgl.function(program).run(backend=backend, **options)
    assert state.error() is None, state.error()
    return state


def add(expression: Any) -> Any:
    return lambda s: s.__iadd__(expression)


# --- names -------------------------------------------------------------------------------------

NAMES = """
function gen gen_int gen_string select image video system user assistant system_begin system_end user_begin user_end
assistant_begin assistant_end separate_reasoning set_default_backend flush_cache get_server_info Runtime Engine
RuntimeEndpoint OpenAI global_config token_length_normalized greedy_token_selection unconditional_likelihood_normalized
"""
GEN_ARGUMENTS = """
name max_tokens min_tokens n stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
presence_penalty ignore_eos return_logprob logprob_start_len top_logprobs_num return_text_in_logprobs dtype choices
choices_method regex json_schema
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_exports(name: str) -> None:
    assert getattr(sgl, name) is not None and name in sgl.__all__


def test_gen_has_the_arguments_in_their_order_and_none_as_default() -> None:
    parameters = list(inspect.signature(sgl.gen).parameters.values())
    names = GEN_ARGUMENTS.split()
    assert [parameter.name for parameter in parameters][: len(names)] == names
    assert all(parameter.default is None for parameter in parameters)
    assert list(inspect.signature(sgl.select).parameters) == ["name", "choices", "temperature", "choices_method"]


# --- arguments reach the backend ---------------------------------------------------------------

GIVEN: dict[str, tuple[Any, str, Any]] = {  # argument: value, field of the operation, its value there
    "max_tokens": (5, "max_tokens", 5),
    "min_tokens": (2, "min_tokens", 2),
    "stop": (["a", "b"], "stop", ("a", "b")),
    "stop_token_ids": ([7, 3, 7], "stop_token_ids", (3, 7)),
    "stop_regex": ("[0-9]+", "stop_regex", ("[0-9]+",)),
    "temperature": (0.3, "temperature", 0.3),
    "top_p": (0.9, "top_p", 0.9),
    "top_k": (40, "top_k", 40),
    "min_p": (0.1, "min_p", 0.1),
    "frequency_penalty": (0.5, "frequency_penalty", 0.5),
    "presence_penalty": (-0.5, "presence_penalty", -0.5),
    "ignore_eos": (True, "ignore_eos", True),
    "return_logprob": (True, "num_top_logprobs", 0),
}


def operation(backend: ScriptedBackend, **options: Any) -> Generate:
    run(backend, add("x" + sgl.gen("x", **options)))
    found = backend.requests[-1].operation
    assert isinstance(found, Generate)
    return found


@pytest.mark.parametrize("name", GIVEN)
def test_arguments_of_gens_functions_and_runs(backend: ScriptedBackend, name: str) -> None:
    value, field, expected = GIVEN[name]
    assert getattr(operation(backend, **{name: value}), field) == expected
    option = "max_new_tokens" if name == "max_tokens" else name
    program = sgl.function(**{option: value})(lambda s: s.__iadd__("x" + sgl.gen("x")))
    program.run(backend=backend)
    assert getattr(backend.requests[-1].operation, field) == expected
    plain = sgl.function(lambda s: s.__iadd__("x" + sgl.gen("x")))
    plain.run(backend=backend, **{option: value})
    assert getattr(backend.requests[-1].operation, field) == expected
    list(plain.run_batch([{}, {}], backend=backend, **{option: value}))
    assert getattr(backend.requests[-1].operation, field) == expected


def test_defaults(backend: ScriptedBackend) -> None:
    assert operation(backend) == Generate(max_tokens=128, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0)


def test_logprob_arguments(backend: ScriptedBackend) -> None:
    asked = operation(backend, return_logprob=True, top_logprobs_num=4, logprob_start_len=2)
    assert (asked.num_top_logprobs, asked.input_logprobs_from) == (4, 2)
    for argument in ({"top_logprobs_num": 2}, {"logprob_start_len": 0}, {"return_text_in_logprobs": True}):
        state = sgl.function(lambda s, given=argument: s.__iadd__("x" + sgl.gen("x", **given)))
        with pytest.raises(sgl.SglbatchError, match=f"{next(iter(argument))} needs return_logprob"):
            state.run(backend=backend)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_tokens": -1},
        {"min_tokens": 9, "max_tokens": 5},
        {"n": 0},
        {"n": 1.5},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]},
        {"stop_regex": "("},
        {"stop_regex": "a*"},
        {"frequency_penalty": 3},
        {"presence_penalty": "1"},
        {"ignore_eos": 1},
        {"top_logprobs_num": -1},
        {"choices_method": sgl.exact},
        {"choices": ["a"], "regex": "a"},
        {"choices": ["a"], "min_tokens": 2},
        {"choices": ["a"], "n": 2},
        {"choices": ["a"], "choices_method": "best"},
        {"choices": ["a", "b"], "choices_method": sgl.greedy_token_selection, "temperature": 1.0},
    ],
)
def test_wrong_arguments_are_errors_when_they_are_given(wrong: dict[str, Any]) -> None:
    with pytest.raises(sgl.SglbatchError) as caught:
        sgl.gen("x", **wrong)
    assert caught.value.code == "invalid-argument"


@pytest.mark.parametrize(("dtype", "column"), [(int, "int"), ("float", "float"), (bool, "bool"), (str, "text")])
def test_dtypes(backend: ScriptedBackend, dtype: Any, column: str) -> None:
    expression = sgl.gen("x", dtype=dtype)
    assert isinstance(expression, type(sgl.gen_int("x")))
    assert operation(backend, dtype=dtype).constraint is not None
    assert expression.var_type.kind == column


def test_gen_int_and_gen_string_take_gens_arguments() -> None:
    number, text = sgl.gen_int("x", max_tokens=4, n=2, stop_regex="a"), sgl.gen_string("x", top_p=0.5)
    assert (number.var_type.kind, number.sampling.n) == ("int", 2)  # type: ignore[union-attr]
    assert text.constraint is not None and text.sampling.top_p == 0.5  # type: ignore[union-attr]


def test_n_answers(backend: ScriptedBackend) -> None:
    state = run(backend, add("a" + sgl.gen("x", n=3) + "b" + sgl.gen("y")))
    assert state["x"] == ["[a]"] * 3
    assert state.text() == "a[a]b" + state["y"]
    first = backend.requests[:3]
    assert len({request.prompt_ids.tobytes() for request in first}) == 1
    assert len({request.seed for request in first}) == len(first) == 3
    assert [meta["finish_reason"] for meta in state.get_meta_info("x")] == [{"type": "stop"}] * 3


def test_one_failed_answer_of_several_fails_the_gen(smollm2_tokenizer: Tokenizer) -> None:
    def fail_second(prompt: str, request: Request) -> str | ErrorInfo:
        return ErrorInfo(code="broken", message="no") if len(request.priority or ()) > 2 else "fine"

    driver = Driver(
        tokenizer=smollm2_tokenizer,
        model_identity="m",
        context_len=99,
        backend=ScriptedBackend(smollm2_tokenizer, fail_second, shuffle=1, batch=1),
    )
    row = Program(sgl.function(lambda s: s.__iadd__("a" + sgl.gen("x", n=4))), {}, program_id=0, row_key="0")
    driver.add(row)
    driver.submit(calls := driver.collect(), range(len(calls)))
    while driver.unfinished:
        driver.step()
    assert row.outcome.error == ErrorInfo(code="broken", message="no", call="x")


@pytest.mark.parametrize("method", ["token_length_normalized", "greedy_token_selection"])
def test_select_and_its_methods(backend: ScriptedBackend, method: str) -> None:
    state = run(backend, add("Pick:" + sgl.select("x", [" a", " b"]) + "!"))
    assert (state["x"], state.text()) == (" b", "Pick: b!"), "the choice is appended"
    asked = backend.requests[-1].operation
    assert isinstance(asked, Choose) and asked.method == "exact"
    assert [len(ids) for ids in asked.alternatives] == [1, 1]
    for given in (method, getattr(sgl, method)):
        expression = sgl.select("x", [" a", " b"], choices_method=given)
        assert expression.method == method and repr(getattr(sgl, method)) == method
    assert sgl.gen("x", choices=["a"], temperature=0.5) == sgl.select("x", ["a"], 0.5)


# --- state -------------------------------------------------------------------------------------


def test_reading_and_writing(backend: ScriptedBackend) -> None:
    def body(s: Any) -> str:
        s += "a" + sgl.gen("x")
        s["y"] = 1
        s.set_var("z", [1, 2])
        assert "x" in s and "nothing" not in s
        assert s.get_var("x") == s["x"] == "[a]"
        assert (s["y"], s["z"]) == (1, [1, 2])
        s.sync()
        assert s.error() is None and s.text() == "a[a]"
        return "returned"

    state = run(backend, body)
    assert state.ret_value == "returned"
    meta = state.get_meta_info("x")
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (1, 3, 0)
    with pytest.raises(sgl.SglbatchError, match="there is no variable 'nothing' here; there are: y, z, x"):
        state["nothing"]


def test_roles_and_messages(backend: ScriptedBackend) -> None:
    def body(s: Any) -> None:
        with s.system():
            s += "  Be kind."
        s.user("Hello")
        with s.assistant():
            s += sgl.gen("x")
        s += sgl.user_begin() + " Again" + sgl.user_end()
        s += sgl.assistant(sgl.gen("y"))
        messages = s.messages()
        assert messages[0] == {"role": "system", "content": "Be kind."}
        assert messages[3] == {"role": "user", "content": "Again"}

    state = run(backend, body)
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert state.text().startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n")


def test_a_default_system_prompt_comes_from_the_template(backend: ScriptedBackend) -> None:
    state = run(backend, add(sgl.user("Hi") + sgl.assistant(sgl.gen("x"))))
    assert state.text().startswith("<|im_start|>system\n") and "Hi" in state.text()


def test_var_scope(backend: ScriptedBackend) -> None:
    def body(s: Any) -> str:
        s += "before "
        with s.var_scope("whole"):
            s += "in" + sgl.gen("x")
            s += " out"
        s += " after" + sgl.gen("y")
        return str(s["whole"])

    state = run(backend, body)
    assert state["whole"] == state.ret_value == "in[in] out"


def test_fork_copy_and_join(backend: ScriptedBackend) -> None:
    def body(s: Any) -> None:
        s += "a"
        with s.copy() as branch:
            branch.__iadd__(" b" + sgl.gen("x"))
        forks = s.fork(2, None)
        forks += " same"
        forks += [" one", " two"]
        forks += lambda i: f" {i}" + sgl.gen("y")
        forks[0] += " more"
        assert len(forks) == len(list(forks)) == 2
        forks.join("gather_variable")
        again = s.fork(2)
        again += lambda i: f" c{i}"
        again.join("concate_and_append")

    state = run(backend, body)
    assert (state["x"], state["y"]) == (["[b]"], ["[0]", "[1]"])
    assert state.text() == "a c0 c1"
    failed = sgl.function(lambda s: s.__enter__()).run(backend=backend).error()
    assert failed is not None and "only a copy" in failed.message
    failed = sgl.function(lambda s: s.fork(2, [1, 2])).run(backend=backend).error()
    assert failed is not None and "position_ids_offset" in failed.message


def test_functions_bind_trace_and_call(backend: ScriptedBackend) -> None:
    @sgl.function
    def inner(s: Any, word: str) -> str:
        s += word + sgl.gen("x")
        return str(s["x"])

    @sgl.function
    def outer(s: Any, word: str, n: int = 2) -> str:
        s += "go "
        return inner(s, word) + str(n)

    assert outer.bind(word="w").run(backend=backend).ret_value == "[w]2"
    assert outer("w", 3, backend=backend).ret_value == "[w]3"
    assert [s.ret_value for s in outer.run_batch([("a",), {"word": "b", "n": 5}], backend=backend)] == ["[a]2", "[b]5"]
    states = outer.run_batch([("a",)], backend=backend, num_threads=4, progress_bar=False, generator_style=True)
    assert next(iter(states)).ret_value == "[a]2"


def test_run_batch_shows_its_progress_and_texts(
    backend: ScriptedBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = sgl.function(lambda s, word: s.__iadd__(word + sgl.gen("x")))
    list(program.run_batch([("a",), ("b",)], backend=backend, progress_bar=True))
    assert "2/2" in capsys.readouterr().err
    assert list(program.run_batch([], backend=backend)) == []
    list(program.run_batch([("a",)], backend=backend))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sgl.global_config, "verbosity", 2)
    list(program.run_batch([("a",), ("b",)], backend=backend))
    assert capsys.readouterr().out == "a[a]\nb[b]\n"


def test_a_group_takes_tuples_and_a_fork_is_of_one_by_default(backend: ScriptedBackend) -> None:
    def body(s: Any) -> None:
        s += "a"
        (branch,) = s.fork()
        branch += " b" + sgl.gen("x")
        forks = s.fork(2)
        forks += (" c" + sgl.gen("y"), " d" + sgl.gen("y"))
        s["read"] = [branch["x"], forks[0]["y"], forks[1]["y"]]
        with pytest.raises(sgl.SglbatchError, match="a list of 3 expressions was added to 2 branches"):
            forks += ["1", "2", "3"]
        with pytest.raises(sgl.SglbatchError, match="fork needs at least one branch, not 0"):
            s.fork(0)

    assert run(backend, body)["read"] == ["[b]", "[c]", "[d]"]


# --- reading while it runs ---------------------------------------------------------------------


def test_text_iter(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x") + " b" + sgl.gen("y")

    state = program.run(backend=backend, stream=True)
    assert backend.requests == [] or not state._program.done
    assert "".join(state.text_iter("x")) == "[a]"
    assert "".join(state.text_iter()) == "a[a] b[b]" == state.text()
    whole = program.run(backend=backend)
    assert (list(whole.text_iter()), list(whole.text_iter("y"))) == (["a[a] b[b]"], ["[b]"])
    with pytest.raises(sgl.SglbatchError, match="no variable 'z'"):
        list(program.run(backend=backend, stream=True).text_iter("z"))


def test_two_programs_are_read_side_by_side(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any, word: str) -> None:
        for i in range(3):
            s += f"{word}{i}" + sgl.gen(f"x{i}")

    left, right = (program.run(word, backend=backend, stream=True) for word in ("l", "r"))
    for i in range(3):
        assert left[f"x{i}"].startswith("[") and right[f"x{i}"].startswith("[")
    left.sync()
    right.sync()
    assert left["x0"] == "[l0]" and right["x0"] == "[r0]"
    assert program.run("z", backend=backend)["x0"] == "[z0]"


def test_text_async_iter(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x")

    async def read() -> list[str]:
        state = program.run(backend=backend, stream=True)
        return [piece async for piece in state.text_async_iter("x")]

    assert asyncio.run(read()) == ["[a]"]


def test_a_dropped_programs_results_reach_nobody(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x") + "b" + sgl.gen("y")

    state = program.run(backend=backend, stream=True)
    assert state["x"] == "[a]"
    del state
    assert program.run(backend=backend)["x"] == "[a]"
    shared = SharedBackends()
    port = shared.port(backend)
    assert not port.has_unfinished and port.identity == backend.identity


# --- reasoning, media, the process -------------------------------------------------------------


@pytest.mark.parametrize("model_type", MARKS)
def test_reasoning_marks(model_type: str) -> None:
    marks = MARKS[model_type]
    text = f"{marks.start}I think.{marks.end}\n\nYes."
    assert split_reasoning(text, model_type) == ("I think.", "Yes.")
    expected = ("No marks", "") if marks.always else ("", "No marks")
    assert split_reasoning("No marks", model_type) == expected
    assert split_reasoning(f"{marks.start}cut off", model_type) == ("cut off", "")


def test_separate_reasoning(smollm2_tokenizer: Tokenizer) -> None:
    backend = ScriptedBackend(smollm2_tokenizer, lambda prompt, _: "<think>hm</think>Yes" if "Q" in prompt else "ok")

    def body(s: Any) -> None:
        s += "Q:" + sgl.separate_reasoning(sgl.gen("x"), model_type="qwen3") + " then" + sgl.gen("y")
        assert s["x"] == "Yes"

    state = run(backend, body)
    assert (state["x"], state["x_reasoning_content"]) == ("Yes", "hm")
    assert state.text().startswith("Q:Yes then") and backend.prompts[1] == "Q:Yes then"
    with pytest.raises(sgl.SglbatchError, match="model_type 'gpt-9'"):
        sgl.separate_reasoning(sgl.gen("x"), model_type="gpt-9")
    with pytest.raises(sgl.SglbatchError, match="names"):
        sgl.separate_reasoning(sgl.gen(), model_type="qwen3")


def test_images_and_videos_are_one_clear_error(backend: ScriptedBackend, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"png")
    for expression in (sgl.image(str(picture)), sgl.video(picture, num_frames=4)):
        with pytest.raises(sgl.SglbatchError) as caught:
            run(backend, add("Look:" + expression + sgl.gen("x")))
        assert caught.value.code == "unsupported-media"
    with pytest.raises(sgl.SglbatchError, match=r"missing\.png"):
        sgl.image("missing.png")
    with pytest.raises(sgl.SglbatchError, match="num_frames"):
        sgl.video(picture, num_frames=0)


class SeeingDialect(TokenDialect):
    """As of a backend that takes media."""

    def environment(self, *, seed: int, parse_special: bool, max_calls: int) -> Environment:

        return replace(
            super().environment(seed=seed, parse_special=parse_special, max_calls=max_calls), takes_media=True
        )


def test_media_keep_their_place_in_the_tree_by_content(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    same = tmp_path / "same.png"
    same.write_bytes(b"picture")
    driver = Driver(
        dialect=SeeingDialect(smollm2_tokenizer, context_len=99), model_identity="m", context_len=99, seed=0
    )
    contents = [sgl.image(b"picture"), sgl.image(same), sgl.image(b"other"), sgl.video(b"picture", 4)]
    for i, content in enumerate(contents):
        program = sgl.function(lambda s, content=content: s.__iadd__("Look " + content + " at" + sgl.gen("x")))
        driver.add(Program(program.bind(content=content), {}, program_id=i, row_key="0"))
    calls = driver.collect()
    ids = [call.prompt_ids.tolist() for call in calls]
    assert all(prompt[:2] == smollm2_tokenizer.encode("Look ") and min(prompt[2:6]) < 0 for prompt in ids)
    assert [call.program_ids for call in calls] == [[0, 1], [2], [3]], "equal content is one call"
    assert len({tuple(prompt) for prompt in ids}) == 3
    assert all(prompt[6:] == smollm2_tokenizer.encode(" at") for prompt in ids)


def test_the_default_backend(backend: ScriptedBackend) -> None:
    program = sgl.function(lambda s: s.__iadd__("a" + sgl.gen("x")))
    with pytest.raises(sgl.SglbatchError, match="no backend"):
        program.run()
    try:
        sgl.set_default_backend(backend)
        assert program.run()["x"] == "[a]"
        assert sgl.global_config.default_backend is backend
        assert sgl.flush_cache() is False
        assert sgl.get_server_info()["context_len"] == 8192
    finally:
        sgl.set_default_backend(None)


def test_cache_asks_for_the_constant_beginning(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any, word: str) -> None:
        s += sgl.system("Known to all.") + sgl.user(f"Say {word}") + sgl.assistant(sgl.gen("x"))

    program.cache(backend)
    (prompt,) = backend.prompts
    assert prompt.startswith("<|im_start|>system\nKnown to all.<|im_end|>\n") and prompt.endswith("Say ")


# --- traces ------------------------------------------------------------------------------------


def test_a_trace_is_a_graph_in_three_forms() -> None:
    @sgl.function
    def program(s: Any, topic: str) -> None:
        s += f"About {topic}: " + sgl.gen("draft", max_tokens=9)
        forks = s.fork(2)
        forks += [f" view {i} of {s['draft']}" + sgl.select("vote", ["yes", "no"]) for i in range(2)]
        forks.join()
        s += "Votes: " + forks[0]["vote"]

    graph = program.trace().graph
    kinds = [node.kind for node in graph.nodes]
    assert kinds == [
        *("ConstantText", "Argument", "ConstantText", "Gen", "Fork"),
        *("GetForkItem", "ConstantText", "Variable", "Select") * 2,
        *("Join", "ConstantText", "Variable"),
    ]
    by_kind = {kind: [node for node in graph.nodes if node.kind == kind] for kind in kinds}
    gen = by_kind["Gen"][0]
    assert gen.details == {"max_tokens": 9}
    assert all(gen.id in variable.after for variable in by_kind["Variable"][:2])
    selects = by_kind["Select"]
    assert set(by_kind["Join"][0].after) == {by_kind["Fork"][0].id, *(node.id for node in selects)}
    assert selects[0].id in by_kind["Variable"][2].after
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph
    assert "%3 = %2 + Gen('draft', max_tokens=9)" in str(graph).splitlines()
    dot = graph.to_dot()
    assert dot.startswith("digraph program {") and f"n{gen.id} -> n{by_kind['Fork'][0].id};" in dot
    assert graph.stopped is None


def test_a_trace_with_known_arguments_and_a_models_template(backend: ScriptedBackend) -> None:
    @sgl.function
    def program(s: Any, question: str, examples: list[str]) -> None:
        s += sgl.user("".join(examples) + question) + sgl.assistant(sgl.gen("x"))

    graph = program.trace(examples=["One. ", "Two. "], backend=backend).graph
    assert [node.kind for node in graph.nodes] == ["ConstantText", "Argument", "ConstantText", "Gen", "ConstantText"]
    assert str(graph.nodes[0].value).endswith("<|im_start|>user\nOne. Two. ")
    assert "[user]" in str(program.trace(examples=[]).graph)
    with pytest.raises(sgl.SglbatchError, match="no parameter 'other'"):
        program.trace(other=1)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda s: "a" if s["x"] else "b", "branches on the answer 'x'"),
        (lambda s: s["x"] == "yes", "branches on the answer 'x'"),
        (lambda s: s["x"].strip(), "looks into the answer 'x' (strip)"),
        (lambda s: int(s["x"]), "makes a number of the answer 'x'"),
        (lambda s: f"{s['x']:>5}", "formats the answer 'x' as '>5'"),
        (lambda s: s.get_meta_info("x"), "reads the meta info of 'x'"),
        (lambda s: s.rng.random(), "draws random numbers"),
        (lambda s: sgl.call(len, "a"), "calls len outside"),
        (lambda s: s.text()[0], "looks into the answer 'x' (getitem)"),
    ],
)
def test_where_a_trace_stops(use: Any, reason: str) -> None:
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x")
        use(s)

    trace = sgl.function(program).trace()
    assert trace.stopped is not None and trace.stopped.startswith(reason)
    assert "(test_lang_surface.py:" in trace.stopped
