"""How the option that decides choices in constraints reaches the calls, and when it makes them new ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sglbatch as sgl
from sglbatch.errors import SglbatchError
from sglbatch.job.config import RunConfig
from sglbatch.lang.as_text import _question
from sglbatch.lang.calls import call_key
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Constraint, Generate
from tests.job_world import World
from tests.lang_backend import ScriptedBackend

TEMPLATE = """
import sglbatch as sgl

@sgl.function(temperature=0)
def two(s, q):
    s += q + sgl.gen("answer", regex="(yes|no)", max_tokens=4)
    s += sgl.gen("number", dtype=int, max_tokens=4) + sgl.gen("thought", max_tokens=8)
"""


@sgl.function
def constrained(s):  # type: ignore[no-untyped-def]
    s += "Is it? " + sgl.gen("a", regex="(yes|no)") + sgl.gen("b", json_schema={"enum": ["x", "y"]})
    s += sgl.gen("c", dtype=bool) + sgl.gen("d", dtype=int) + sgl.gen("e", dtype=str) + sgl.gen("f")
    s += sgl.gen("g", regex="(yes|no)", presence_penalty=1)


def exact(backend: ScriptedBackend) -> list[bool]:
    return [q.operation.exact_choices for q in backend.requests if isinstance(q.operation, Generate)]


def test_calls_whose_constraints_leave_choices_are_exact(smollm2_tokenizer: Tokenizer) -> None:
    """Integers and strings never do, and with a penalty the scores would not be what is drawn from."""
    backend = ScriptedBackend(smollm2_tokenizer, lambda *_: '"x"')
    constrained.run(backend=backend)
    assert exact(backend) == [True, True, True, False, False, False, False]
    token = ScriptedBackend(smollm2_tokenizer, lambda *_: '"x"')
    constrained.run(backend=token, choice_decoding="token")
    assert not any(exact(token))


def test_only_exact_calls_have_keys_of_their_own() -> None:
    """Whatever is answered as before keeps its key, so journals stay good."""
    constraint = Constraint(kind="regex", source="(yes|no)")
    ids = np.array([1, 2], dtype=np.int32)

    def key(operation: Generate) -> str:
        return call_key(model_identity="m", prompt_ids=ids, operation=operation, seed_material=None)

    plain = Generate(max_tokens=3, constraint=constraint)
    assert key(plain) == "96541b123268c3bd56fce8c91871eb1f"
    assert key(Generate(max_tokens=3, constraint=constraint, exact_choices=True)) != key(plain)


def test_an_endpoint_is_asked_as_before() -> None:
    asked = Generate(max_tokens=3, constraint=Constraint(kind="regex", source="a|b"), exact_choices=True)
    question = _question(asked)
    assert isinstance(question, Generate) and not question.exact_choices


def test_the_option_of_a_run(tmp_path: Path, smollm2_dir: Path) -> None:
    world = World(tmp_path, smollm2_dir)
    world.write_template(TEMPLATE)
    world.questions(range(2))
    world.run()
    assert world.backend is not None
    assert sorted(exact(world.backend)) == [False] * 4 + [True] * 2
    world.run(choice_decoding="token")
    assert world.backend is not None
    assert len(world.backend.requests) >= 2 and not any(exact(world.backend))
    world.run(choice_decoding="token")
    assert world.backend is None, "nothing is asked again"


def test_mistakes_are_named() -> None:
    with pytest.raises(SglbatchError) as caught:
        RunConfig(template=Path("t.py"), data=("d",), model="m", choice_decoding="beam")
    assert caught.value.code == "bad-option" and "exact, token" in str(caught.value.hint)
    with pytest.raises(SglbatchError) as caught:
        sgl.function(choice_decoding="beam")(lambda s: None)
    assert caught.value.code == "invalid-argument"
