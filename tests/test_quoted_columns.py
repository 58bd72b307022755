"""``gen(dtype=str)``: a string in quotes to the program, as in SGLang, and the string itself in the output."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from sglbatch.types import ErrorInfo, Request
from tests.job_world import World

TEMPLATE = """
import sglbatch as sgl

@sgl.function(temperature=0)
def two(s, q):
    s += "Say: " + q + sgl.gen("name", dtype=str)
    s["copy"] = s["name"]
    if q == "free":
        s += sgl.gen("mixed")
    else:
        s += sgl.gen_string("mixed")
    s += sgl.gen("free") + sgl.gen("several", dtype=str, n=2)
    f = s.fork(2)
    f += sgl.gen_string("branches")
    f.join()
    f = s.fork(2)
    f[0] += sgl.gen_string("either")
    f[1] += sgl.gen("either")
    f.join()
    return s["name"]
"""


class _Quoting(World):
    def _answer(self, prompt: str, request: Request) -> str | int | ErrorInfo:
        return '"it is 1"'


def test_the_output_has_what_is_between_the_quotes(tmp_path: Path, smollm2_dir: Path) -> None:
    world = _Quoting(folder=tmp_path, model=smollm2_dir)
    world.write_template(TEMPLATE)
    world.write_rows([{"q": "a"}, {"q": "free"}])
    world.run(save=("transcript",))
    quoted, bare = '"it is 1"', "it is 1"
    for row in world.output():
        assert row["_error"] is None and row["_transcript"].count(quoted) >= 4
        assert row["name"] == bare and row["several"] == row["branches"] == [bare, bare]
        assert row["copy"] == row["_return"] == row["free"] == quoted, (
            "what the program has is text, as it was generated"
        )
        assert row["either"] == [quoted, quoted], "a list has one way of writing its texts"
    assert [row["mixed"] for row in world.output()] == [bare, quoted], "each row by its own gen, whatever others did"


def test_its_columns_are_text(tmp_path: Path, smollm2_dir: Path) -> None:
    world = _Quoting(folder=tmp_path, model=smollm2_dir)
    world.write_template(TEMPLATE)
    world.write_rows([{"q": "a"}, {"q": "free"}])
    world.run(output=tmp_path / "out.parquet")
    schema = pq.read_table(tmp_path / "out.parquet").schema
    kinds = {"name": "string", "mixed": "string", "several": "list<element: string>", "either": "list<element: string>"}
    assert {name: str(schema.field(name).type) for name in kinds} == kinds
