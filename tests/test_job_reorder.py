"""``--reorder`` through a whole job: only what the template marks moves, and only when the user says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglbatch.errors import SglbatchError
from sglbatch.job.config import parse_list
from sglbatch.job.foreseeing import suggest
from sglbatch.job.prepare import prepared
from tests.job_world import World

JUDGE = """
import sglbatch as sgl

@sgl.function(temperature=0)
def two(s, id, essay, topic, tone):
    s += f"Number {id}.\\n"
    s += sgl.any_order(essay=f"Essay: {essay}\\n", topic=f"Topic: {topic}\\n")
    s += f"Tone: {tone}\\nVerdict:" + sgl.gen("verdict", max_tokens=8)
    s += " Because" + sgl.gen("reason", max_tokens=8)
"""

AS_WRITTEN = r"Number \d\.\nEssay: essay \d\nTopic: a topic of some length, [01]\nTone: dry\nVerdict:"
REORDERED = r"Number \d\.\nTopic: a topic of some length, [01]\nEssay: essay \d\nTone: dry\nVerdict:"


@pytest.fixture
def world(tmp_path: Path, smollm2_dir: Path) -> World:
    world = World(tmp_path, smollm2_dir)
    world.write_template(JUDGE)
    world.write_rows(
        [{"id": i, "essay": f"essay {i}", "topic": f"a topic of some length, {i % 2}", "tone": "dry"} for i in range(8)]
    )
    return world


def transcripts(world: World) -> list[str]:
    return [row["_transcript"] for row in world.output()]


def suggested(world: World) -> tuple[str, ...]:
    """What stands behind ``--reorder`` in the suggestion that a plan prints."""
    with prepared(world.config(), tell=lambda _: None) as ready:
        movement = suggest(ready)
    assert movement is not None
    found = re.search(r"--reorder (\S+)\)", "\n".join(movement.lines()))
    assert found is not None, movement.lines()
    return parse_list(found[1])


def test_a_suggestion_is_only_one(world: World) -> None:
    assert suggested(world) == ("topic", "essay")
    assert world.run(save=("transcript",)).exit_code == 0
    assert all(re.match(AS_WRITTEN, text) for text in transcripts(world))


def test_the_suggested_order_holds_in_every_prompt_of_a_job(world: World) -> None:
    order = suggested(world)
    assert world.run(save=("transcript",), reorder=order).exit_code == 0
    assert world.backend is not None
    prompts = world.backend.prompts
    assert len(prompts) == 16 and all(re.match(REORDERED, prompt) for prompt in prompts)  # follow-ups too
    assert all(re.match(REORDERED, text) for text in transcripts(world))
    before = world.num_requests
    assert world.run(save=("transcript",), reorder=order, restart=True).exit_code == 0
    assert world.num_requests == 2 * before


def test_another_order_is_other_work_and_the_same_order_the_same(world: World) -> None:
    world.run(reorder=("topic", "essay"))
    made = world.num_requests
    assert world.run(reorder=("topic", "essay")).unchanged
    world.run()
    assert world.num_requests == 2 * made
    world.run(reorder=("topic",))  # the others follow as they are written: the first order again
    assert world.num_requests == 2 * made


@pytest.mark.parametrize("name", ["tone", "id", "missing"])
def test_what_is_not_marked_never_moves(world: World, name: str) -> None:
    with pytest.raises(SglbatchError, match=f"--reorder names '{name}'") as raised:
        world.run(reorder=("topic", name))
    assert raised.value.hint == "it marks: essay, topic"
    assert world.num_requests == 0
