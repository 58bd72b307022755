"""Columns of variables that no row could set, because every row failed at them or before."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sglbatch.job.paths import JobPaths
from tests.job_world import World

TEMPLATE = """
import sglbatch as sgl

@sgl.function(temperature=0)
def two(s, q):
    s += "Say: " + q + sgl.gen("thought")
    s += "FAIL" + sgl.gen("year", dtype=int) + sgl.gen("score", dtype=float, n=2)
    f = s.fork(2)
    f += sgl.gen("ok", dtype=bool)
    f.join()
    s += sgl.gen("rec", json_schema={"type": "integer"}) + sgl.select("kind", ["x", "y"])
"""
NAMES = ["thought", "year", "score", "ok", "rec", "kind"]
TYPES = [
    *("string", "int64", "list<element: double>", "list<element: bool>", "int64"),
    "dictionary<values=string, indices=int32, ordered=0>",
]


@pytest.fixture
def world(tmp_path: Path, smollm2_dir: Path) -> World:
    made = World(folder=tmp_path, model=smollm2_dir, failing=("FAIL",))
    made.write_template(TEMPLATE)
    made.questions([1, 2])
    return made


def test_a_column_that_every_row_failed_at_is_there_with_nulls(world: World) -> None:
    world.run()
    for row in world.output():
        assert row["_error"]["call"] == "year"
        assert [name for name in row if name in NAMES] == NAMES
        assert row["thought"] is not None and [row[name] for name in NAMES[1:]] == [None] * 5
        assert list(row["_finish"]) == NAMES and row["_finish"]["year"] is None


def test_it_has_the_type_that_it_would_have_had(world: World) -> None:
    output = world.folder / "out.parquet"
    world.run(output=output)
    schema = pq.read_table(JobPaths(output=output).output).schema
    assert [str(schema.field(name).type) for name in NAMES] == TYPES
    assert [field.name for field in schema.field("_finish").type] == NAMES
