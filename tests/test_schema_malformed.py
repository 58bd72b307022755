"""Schemas that are none: whatever a keyword holds and wherever it stands, it is compiled or refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglbatch as sgl
from sglbatch.engine.fsm import SchemaConstraint
from sglbatch.errors import ConstraintError, SglbatchError, UnsupportedSchemaError
from sglbatch.job.config import read_schema
from sglbatch.lang.schemas import schema_text
from tests.test_schema_accepts import CASES

NAN, INFINITY = float("nan"), float("inf")
NO_NUMBER = [None, True, "1", [1], {}, NAN, INFINITY, -INFINITY]
NO_LIMIT = [value for value in NO_NUMBER if value is not True]
NO_COUNT = [*NO_NUMBER, -1, 1.5]
NO_TEXT = [None, False, 5, [], ["a"], {}]
NO_NAMES = [None, True, 5, "a", {}, [5], ["a", None], [["a"]]]
NO_SCHEMA = [None, 5, "a", []]
NO_SCHEMAS = [None, True, 5, "a", {}, [], [5], [{}, None], [[]]]
NO_NAMED_SCHEMAS = [None, True, 5, "a", [], [{}], {"a": None}, {"a": 5}, {"a": []}]

WRONG: dict[str, list[Any]] = {
    "type": [None, True, 5, 1.5, {}, [], "text", ["text"], ["null", 5], [["null"]], [{}]],
    "enum": [None, True, 5, "a", {}, [INFINITY], [[1, {"a": NAN}]]],
    "const": [NAN, [INFINITY], {"a": -INFINITY}],
    "multipleOf": [*NO_NUMBER, 0, -2],
    "uniqueItems": [None, 1, "true", [], {}],
    "items": [None, 5, "a", [5], [{}, None]],
    "dependentRequired": [None, True, 5, "a", [], {"a": {}}, {"a": None}, {"a": "b"}, {"a": [5]}],
    "dependencies": [None, True, 5, "a", [], {"a": 5}, {"a": "b"}, {"a": [5]}, {"a": [["b"]]}],
    "prefixItems": [None, True, 5, "a", {}, [5], [{}, None], [[]]],
    "required": NO_NAMES,
    **dict.fromkeys(("minimum", "maximum"), NO_NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), NO_LIMIT),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), NO_COUNT),
    **dict.fromkeys(("minContains", "maxContains", "minProperties", "maxProperties"), NO_COUNT),
    **dict.fromkeys(("$schema", "$anchor", "$dynamicAnchor", "format"), NO_TEXT),
    **dict.fromkeys(("pattern", "$id", "$ref"), NO_TEXT),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), NO_SCHEMAS),
    **dict.fromkeys(("$defs", "definitions", "properties"), NO_NAMED_SCHEMAS),
    **dict.fromkeys(("patternProperties", "dependentSchemas"), NO_NAMED_SCHEMAS),
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames"), NO_SCHEMA),
    **dict.fromkeys(("additionalItems", "additionalProperties"), NO_SCHEMA),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), NO_SCHEMA),
}

PLACES: dict[str, Callable[[Any], Any]] = {
    "#": lambda schema: schema,
    "#/properties/a": lambda schema: {"type": "object", "properties": {"a": schema}},
    "#/patternProperties/^a": lambda schema: {"patternProperties": {"^a": schema}},
    "#/additionalProperties": lambda schema: {"additionalProperties": schema},
    "#/propertyNames": lambda schema: {"propertyNames": schema},
    "#/items": lambda schema: {"type": "array", "items": schema},
    "#/prefixItems/1": lambda schema: {"prefixItems": [{}, schema], "items": False},
    "#/contains": lambda schema: {"contains": schema},
    "#/not": lambda schema: {"not": schema},
    "#/not/not": lambda schema: {"not": {"not": schema}},
    "#/allOf/0": lambda schema: {"allOf": [schema]},
    "#/anyOf/1": lambda schema: {"anyOf": [{"type": "null"}, schema]},
    "#/oneOf/1": lambda schema: {"oneOf": [{"type": "null"}, schema]},
    "#/if": lambda schema: {"if": schema, "then": {"type": "string"}},
    "#/then": lambda schema: {"if": {"type": "string"}, "then": schema},
    "#/else": lambda schema: {"if": {"type": "string"}, "else": schema},
    "#/dependentSchemas/a": lambda schema: {"dependentSchemas": {"a": schema}},
    "#/$defs/a": lambda schema: {"$defs": {"a": schema}},  # nothing refers to it
    "#/$defs/b": lambda schema: {"$defs": {"b": schema}, "not": {"$ref": "#/$defs/b"}},
    "#/x-parts/0/a": lambda schema: {"x-parts": [{"a": schema}], "items": {"$ref": "#/x-parts/0/a"}},
    "#/anyOf/0": lambda schema: {"anyOf": [schema], "type": "null", "enum": [5]},  # nothing is left that it could allow
}


@pytest.mark.parametrize("place", PLACES)
def test_a_malformed_keyword_is_named_wherever_it_stands(place: str) -> None:
    for keyword, values in WRONG.items():
        for value in values:
            schema = PLACES[place]({keyword: value})
            for allow_unenforced in (False, True):
                with pytest.raises(ConstraintError) as caught:
                    SchemaConstraint(schema, allow_unenforced=allow_unenforced)
                assert caught.value.code == "invalid-schema", (schema, caught.value)
                assert caught.value.message.startswith(f"{place}/{keyword}"), (schema, caught.value)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "http://[a"}, "#/$ref"),
        ({"items": {"$id": "http://[a"}}, "#/items/$id"),
        ({"$ref": "#/allOf/" + "9" * 5000, "allOf": [{}]}, "#/$ref"),
        ({"prefixItems": [{}], "items": [{}]}, "#/items"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "items": {"id": 5}}, "#/items/id"),
        ({"properties": {"a/b": {"type": 5}}}, "#/properties/a~1b/type"),
        ({"default": {"a": [1, NAN]}}, "#/default/a/1"),
    ],
)
def test_other_malformed_schemas_are_named_too(schema: Any, place: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        SchemaConstraint(schema)
    assert caught.value.code == "invalid-schema" and caught.value.message.startswith(f"{place}: ")


@pytest.mark.parametrize(
    "schema",
    [
        {"id": 5, "description": None, "title": 5, "$comment": [], "x-mine": {"type": 5}, "required": ["a", "a"]},
        {"enum": [{"type": 5}], "default": {"type": 5}, "examples": 5},
        {"properties": {"type": {"const": 1}, "$ref": {"const": 1}, "required": True}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "if": 5, "const": 5, "contains": 5, "prefixItems": 5},
        {"$schema": "http://json-schema.org/draft-07/schema#", "minContains": "a", "dependentRequired": 5, "$defs": 5},
        {"exclusiveMinimum": True, "minimum": 3, "additionalItems": False, "items": [{}, {"type": "null"}]},
    ],
)
def test_what_says_nothing_may_hold_anything(schema: Any) -> None:
    SchemaConstraint(schema)


@pytest.mark.parametrize("text", ['{"minimum": NaN}', '{"enum": [1, [-Infinity]]}', '{"maximum": 1e400}'])
def test_a_number_that_json_does_not_have_is_refused_where_it_is_given(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    ways: list[Callable[[], Any]] = [
        lambda: schema_text(text),
        lambda: sgl.gen("x", json_schema=json.loads(text)),
        lambda: read_schema(tmp_path / "s.json"),
    ]
    for way in ways:
        with pytest.raises(SglbatchError) as caught:
            way()
        assert caught.value.code == "invalid-schema" and caught.value.message.startswith("#/")


_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats()
    | st.sampled_from(["", "a", "#", "#/$defs/a", "[", "("]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*WRONG, "a"]), inner, max_size=2),
    max_leaves=4,
)


def _places(value: Any, steps: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield steps
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in items:
        yield from _places(item, (*steps, step))


@st.composite
def _damaged(draw: st.DrawFn) -> Any:
    """A schema with every keyword somewhere, in which one or two places hold anything at all."""
    schema = copy.deepcopy(draw(st.sampled_from([case[0] for case in CASES])))
    schema = draw(st.sampled_from(list(PLACES.values())))(schema)
    for _ in range(draw(st.integers(1, 2))):
        steps = draw(st.sampled_from(list(_places(schema))))
        value = draw(_ANYTHING)
        if not steps:
            return value
        holder = schema
        for step in steps[:-1]:
            holder = holder[step]
        holder[steps[-1]] = value
    return schema


@settings(max_examples=600, deadline=None)
@given(schema=_damaged(), allow_unenforced=st.booleans(), draft=st.sampled_from(["7", "2020-12"]))
def test_a_damaged_schema_is_compiled_or_refused_by_name(schema: Any, allow_unenforced: bool, draft: Any) -> None:
    try:
        compiled = SchemaConstraint(schema, allow_unenforced=allow_unenforced, draft=draft)
    except UnsupportedSchemaError as error:
        assert error.code == "unsupported-schema" and error.path.startswith("#")
    except ConstraintError as error:
        assert error.code in ("invalid-schema", "unsatisfiable-schema", "constraint-too-large")
        assert error.code != "invalid-schema" or error.message.startswith("#")
    else:
        compiled.accepts("[1]")
        compiled.shortest()
