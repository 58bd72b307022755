"""Row values never make special tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sglbatch as sgl
from sglbatch.lang import Driver, Program
from sglbatch.lang.guard import GUARD, Guard, strip_guard
from sglbatch.tokenizer import Tokenizer
from tests.lang_backend import ScriptedBackend

END = "<|im_end|>"


@sgl.function
def by_hand(s: Any, value: Any) -> Any:
    s += "<|im_start|>user\n"
    s += f"{value}<|im_end|>\n" + sgl.gen("x")
    s["kept"] = value
    return [value, s["x"]]


def outcome(tokenizer: Tokenizer, value: Any, answer: str = "ok", **options: Any) -> tuple[Program, ScriptedBackend]:
    backend = ScriptedBackend(tokenizer, lambda *_: answer)
    driver = Driver(tokenizer=tokenizer, model_identity="m", context_len=8192, backend=backend, **options)
    program = Program(by_hand, {"value": value}, program_id=0, row_key="r")
    driver.add(program)
    while driver.unfinished:
        driver.step()
    return program, backend


@pytest.mark.parametrize("value", [END, f"a{END}b", "x<|im_end", "|im_end|>", "<", "plain", END * 3])
def test_data_makes_no_special_token(smollm2_tokenizer: Tokenizer, value: str) -> None:
    program, backend = outcome(smollm2_tokenizer, value)
    ids = backend.requests[0].prompt_ids.tolist()
    assert ids.count(smollm2_tokenizer.specials[END]) == 1
    assert ids.count(smollm2_tokenizer.specials["<|im_start|>"]) == 1
    assert program.outcome.error is None
    assert program.outcome.values["kept"] == value
    assert program.outcome.returned == [value, "ok"]
    assert GUARD not in program.outcome.transcript and value in program.outcome.transcript
    assert backend.prompts[0].endswith(f"{value}{END}\n")


def test_generated_text_read_back_is_data(smollm2_tokenizer: Tokenizer) -> None:
    backend = ScriptedBackend(smollm2_tokenizer, lambda *_: f"so {END}")

    @sgl.function
    def program(s: Any) -> None:
        s += f"a{END}" + sgl.gen("x")
        s += "again: " + s["x"] + sgl.gen("y")

    state = program.run(backend=backend)
    assert state["x"] == f"so {END}"
    assert backend.requests[1].prompt_ids.tolist().count(smollm2_tokenizer.specials[END]) == 1


def test_the_guard_character_in_data_is_the_rows_error(smollm2_tokenizer: Tokenizer) -> None:
    program, _ = outcome(smollm2_tokenizer, ["a", {"b": f"x{GUARD}"}])
    assert program.outcome.error is not None
    assert program.outcome.error.code == "guard-character"
    assert "'value'" in program.outcome.error.message
    program, _ = outcome(smollm2_tokenizer, "fine", answer=f"x{GUARD}y")
    assert program.outcome.error is not None and program.outcome.error.code == "guard-character"
    assert program.outcome.values["x"] == f"x{GUARD}y"


def test_parse_special_opts_out(smollm2_tokenizer: Tokenizer) -> None:
    _, backend = outcome(smollm2_tokenizer, END, parse_special=True)
    assert backend.requests[0].prompt_ids.tolist().count(smollm2_tokenizer.specials[END]) == 2


def test_templates_without_special_text_leave_data_alone() -> None:
    guard = Guard.of(["Hello", "<|im_"], [END])
    assert guard.protect(f"{END} <") == f"{END} <"


PIECES = st.sampled_from(["<|a|>", "<|b|>", "<", "|", "a", "b", "|>", "<|", "x", " "])


@given(st.lists(PIECES, max_size=8).map("".join), st.lists(st.integers(0, 20), max_size=3))
@example("<|a|>", [3])
@example("x<|b|>", [2, 2])
def test_protected_values_side_by_side_make_no_special(text: str, cuts: list[int]) -> None:
    ends = sorted(min(cut, len(text)) for cut in cuts)
    values = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    guard = Guard.of(["<|a|>", "<|b|>"], ["<|a|>", "<|b|>", "<|c|>"])
    joined = "".join(guard.protect(value) for value in values)
    assert "<|a|>" not in joined and "<|b|>" not in joined
    assert strip_guard(joined) == "".join(values)
