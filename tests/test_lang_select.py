"""A select's alternatives as token ids, on a real tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglbatch as sgl
from sglbatch.errors import ConstraintError
from sglbatch.lang.calls import Choices
from sglbatch.lang.choices import choice_prompts, split_choices
from sglbatch.lang.guard import GUARD
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Choose, Text
from tests.lang_backend import ScriptedBackend


def split(tokenizer: Tokenizer, before: str, choices: list[str], after: str = "") -> tuple[list[int], list[list[int]]]:
    following = (Text(after),) if after else ()
    question = Choices(choices=tuple(choices), temperature=0.0, specials=frozenset(), following=following)
    encoded = tokenizer.encode_prompts(choice_prompts((Text(before),), question))
    prompt_ids, choose = split_choices(encoded, question, tokenizer.token_bytes, tokenizer.specials)
    return prompt_ids.tolist(), [list(ids) for ids in choose.alternatives]


def test_space_before_or_in_the_choice_is_the_same(smollm2_tokenizer: Tokenizer) -> None:
    inside = split(smollm2_tokenizer, "Answer:", [" A", " B"])
    outside = split(smollm2_tokenizer, "Answer: ", ["A", "B"])
    encode = smollm2_tokenizer.encode
    assert inside == outside == (encode("Answer:"), [encode(" A"), encode(" B")])


def test_a_choice_that_begins_another(smollm2_tokenizer: Tokenizer) -> None:
    prompt_ids, alternatives = split(smollm2_tokenizer, "Well?", [" yes", " yes sir"])
    encode = smollm2_tokenizer.encode
    assert prompt_ids == encode("Well?")
    assert alternatives == [encode(" yes"), encode(" yes sir")]


def test_common_tokens_belong_to_the_prompt(smollm2_tokenizer: Tokenizer) -> None:
    prompt_ids, alternatives = split(smollm2_tokenizer, "In", [" New York", " New Jersey"])
    assert prompt_ids == smollm2_tokenizer.encode("In New")
    assert alternatives == [smollm2_tokenizer.encode(" York"), smollm2_tokenizer.encode(" Jersey")]


def test_following_text_that_shares_a_token(smollm2_tokenizer: Tokenizer) -> None:
    encode = smollm2_tokenizer.encode
    _, alternatives = split(smollm2_tokenizer, "Say", [" walk", " talk"], "ing.\n")
    assert [smollm2_tokenizer.decode(ids) for ids in alternatives] == [" walking", " talking"]
    assert split(smollm2_tokenizer, "Say", [" A", " B"], "\n") == (encode("Say"), [encode(" A"), encode(" B")])


def test_equal_ids_are_an_error(smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConstraintError, match="'a' and 'a"):
        split(smollm2_tokenizer, "Say ", ["a", f"a{GUARD}"])


WORDS = st.text(alphabet="ab yesno1.\n", min_size=1, max_size=8)


@given(st.text(alphabet="xy :\n", min_size=1, max_size=6), st.lists(WORDS, min_size=2, max_size=4, unique=True), WORDS)
def test_alternatives_spell_their_choices(
    smollm2_tokenizer: Tokenizer, before: str, choices: list[str], after: str
) -> None:
    try:
        prompt_ids, alternatives = split(smollm2_tokenizer, before, choices, after)
    except ConstraintError as error:
        assert error.code in ("empty-prompt", "equal-choices")
        return
    for choice, ids in zip(choices, alternatives, strict=True):
        whole = smollm2_tokenizer.decode([*prompt_ids, *ids])
        assert (before + choice + after).startswith(whole)
        assert whole.startswith(before + choice)
        shorter = smollm2_tokenizer.decode([*prompt_ids, *ids[:-1]])
        assert len(shorter) < len(before + choice)


def test_select_in_a_program(smollm2_tokenizer: Tokenizer) -> None:
    backend = ScriptedBackend(smollm2_tokenizer, lambda prompt, _: 1 if prompt.endswith(":") else "end")

    @sgl.function
    def program(s: Any) -> None:
        s += "Pick: " + sgl.select("x", ["A", "B"]) + "\nand" + sgl.gen("y", temperature=0)

    state = program.run(backend=backend)
    assert (state["x"], state["y"]) == ("B", "end")
    assert backend.prompts == ["Pick:", "Pick: B\nand"]
    operation = backend.requests[0].operation
    assert isinstance(operation, Choose) and operation.temperature == 0.0
    assert backend.requests[1].prompt_ids.tolist() == smollm2_tokenizer.encode("Pick: B\nand")
    assert state.get_meta_info("x")["choice_logprobs"] == {"A": -9.0, "B": 0.0}
