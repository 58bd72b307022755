"""What compiled schemas accept: keyword by keyword, against jsonschema, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sglbatch.engine.fsm import SchemaConstraint
from sglbatch.errors import ConstraintError, UnsupportedSchemaError

CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, ["-3", "0", "11", "4.0"], ["-4", "12", "1.5", '"1"']),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, ["0.1", "1.5", "1e-3"], ["0", "-0.0", "1.51", "2"]),
    ({"multipleOf": 0.25}, ["0.75", "-2", '"a"'], ["0.3", "0.125"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"äöü"', r'"a\n"'], ['"a"', '"abcd"', "1"]),
    ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['""', '"ab"']),
    ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
    ({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}, ['"abc"'], ['"a"', '"abcd"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-13-01"', '"24-01-01"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    ({"enum": [1, "a", None, {"x": [1]}, [True]]}, ["1.0", '"a"', "null", '{"x": [1]}', "[true]"], ["2", "[1]", "{}"]),
    ({"const": False}, ["false"], ["0", "null"]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[]", "[1]"], ['["a"]', "[1, 2]"]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        ["[1]", "[1, 2]"],
        ["[]", "[1,2,3]"],
    ),
    ({"contains": {"type": "integer"}, "maxContains": 1}, ["[1]", '["a", 2, "b"]'], ["[]", "[1, 2]"]),
    ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}, ["[]", "[2, 1]"], ["[1, 1]", "[1, 2, 2]"]),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]},
        ['{"b": 1}', '{"c": [], "b": 0, "a": 1}'],
        ["{}", '{"a": "x", "b": 1}', '{"b": 1, "b": 2}'],
    ),
    (
        {"properties": {"a": {}}, "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
        ['{"a": 1, "xy": null}', "3"],
        ['{"xy": 1}', '{"b": 1}'],
    ),
    ({"propertyNames": {"maxLength": 2}}, ['{"ab": 1}'], ['{"abc": 1}']),
    ({"minProperties": 1, "maxProperties": 2}, ['{"a": 1}', '{"a": 1, "b": 2}'], ["{}", '{"a":1,"b":2,"c":3}']),
    ({"dependentRequired": {"a": ["b"]}}, ["{}", '{"a": 1, "b": 1}', '{"b": 1}'], ['{"a": 1}']),
    ({"anyOf": [{"type": "string"}, {"minimum": 5}]}, ['"a"', "5", "null"], ["4"]),
    ({"oneOf": [{"minimum": 5}, {"multipleOf": 2}]}, ["6.5", "2"], ["6", "1", '"a"']),
    ({"allOf": [{"minLength": 2}, {"pattern": "^a"}]}, ['"ab"', "1"], ['"a"', '"ba"']),
    ({"not": {"type": ["integer", "object"]}}, ["1.5", "[]"], ["1", "{}"]),
    ({"not": {"required": ["a"], "properties": {"b": {"const": 1}}}}, ['{"b": 1}', '{"a": 1, "b": 2}'], ['{"a": 1}']),
    ({"not": {"additionalProperties": {"type": "string"}}}, ['{"a": 1}'], ["{}", '{"a": "x"}', "1"]),
    ({"not": {"const": {"a": [1]}}}, ['{"a": [2]}', "{}", '{"a": [1], "b": 0}'], ['{"a": [1]}']),
    (
        {"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["a"]}},
        ['{"k": 2}', '{"k": 1, "a": 0}', "1"],
        ['{"k": 1}'],
    ),
    (
        {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
        ["[]", "[[[]], []]"],
        ["[1]", "{}"],
    ),
    ({"type": "string", "nullable": True}, ["null", '"a"'], ["1"]),
    ({"exclusiveMinimum": True, "minimum": 3}, ["4"], ["3"]),
    (True, ["1", "{}", "[[[]]]"], ["x", "[1,]"]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=lambda case: json.dumps(case)[:60])
def test_keywords(schema: Any, valid: list[str], invalid: list[str]) -> None:
    compiled = SchemaConstraint(schema)
    assert [text for text in valid if not compiled.accepts(text)] == []
    assert [text for text in invalid if compiled.accepts(text)] == []


_scalars = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "number", "minimum": 0},
        {"type": "string", "maxLength": 2},
        {"enum": ["a", 1, None]},
        {"const": "b"},
        {"type": ["null", "boolean"]},
        {"minLength": 1},
        {"pattern": "^a"},
        {"maximum": 2, "multipleOf": 2},
        {"type": "object"},
        {},
        False,
    ]
)


def _composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "c"])
    branches = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(
            lambda props, required, extra: {"properties": props, "required": required, **extra},
            st.dictionaries(names, inner, max_size=3),
            st.lists(names, max_size=2, unique=True),
            st.sampled_from([{}, {"additionalProperties": False}, {"maxProperties": 2}, {"minProperties": 1}]),
        ),
        st.builds(lambda items, least: {"items": items, "minItems": least}, inner, st.integers(0, 2)),
        st.builds(lambda value: {"contains": value}, inner),
        st.builds(lambda value: {"additionalProperties": value}, inner),
        st.builds(lambda kind, values: {kind: values}, st.sampled_from(["anyOf", "allOf", "oneOf"]), branches),
        st.builds(lambda value: {"not": value}, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
    )


SCHEMAS = st.recursive(_scalars, _composed, max_leaves=6)
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 2, -1, 0.5, "", "a", "b", "ab", "abc"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=8, max_size=8))
def test_random_schemas_agree_with_jsonschema(schema: Any, values: list[Any]) -> None:
    """Whatever is compiled is right on every value, and a schema that is called unsatisfiable has none."""
    validator = Draft202012Validator(schema)
    try:
        compiled = SchemaConstraint(schema)
    except UnsupportedSchemaError:
        return
    except ConstraintError as error:
        assert error.code in ("unsatisfiable-schema", "constraint-too-large")
        assert error.code != "unsatisfiable-schema" or not any(map(validator.is_valid, values))
        return
    for value in values:
        assert compiled.accepts(json.dumps(value)) == validator.is_valid(value), value
    assert validator.is_valid(json.loads(compiled.shortest()))


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"items": {"type": "array", "uniqueItems": True}}, "uniqueItems", "#/items"),
        ({"$ref": "http://example.com/s.json"}, "$ref", "#"),
        ({"type": "string", "format": "regex"}, "format", "#"),
        ({"properties": {"a/b": {"$dynamicRef": "#x"}}}, "$dynamicRef", "#/properties/a~1b"),
        ({"pattern": r"(a)\1"}, "pattern", "#"),
        ({"allOf": [{"properties": {}}], "unevaluatedProperties": False}, "unevaluatedProperties", "#"),
        ({"$schema": "http://example.com/mine"}, "$schema", "#"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: Any, keyword: str, path: str) -> None:
    with pytest.raises(UnsupportedSchemaError) as caught:
        SchemaConstraint(schema)
    assert (caught.value.keyword, caught.value.path) == (keyword, path)
    assert keyword in caught.value.message and path in caught.value.message


@pytest.mark.parametrize(
    ("schema", "code"),
    [
        ({"enum": []}, "unsatisfiable-schema"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "unsatisfiable-schema"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "unsatisfiable-schema"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}},
            "unsatisfiable-schema",
        ),
        ({"type": "text"}, "invalid-schema"),
        ([], "invalid-schema"),
        ({"pattern": "a("}, "invalid-schema"),
        ({"$ref": "#/$defs/none"}, "invalid-schema"),
        ({"$ref": "#"}, "invalid-schema"),
        ({"pattern": "(a|b)*a(a|b){16}"}, "constraint-too-large"),
    ],
)
def test_bad_schemas_are_refused(schema: Any, code: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        SchemaConstraint(schema)
    assert caught.value.code == code


def test_unenforced_keywords_can_be_left_to_validation() -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    compiled = SchemaConstraint(schema, allow_unenforced=True)
    assert compiled.unenforced == ["uniqueItems at #"]
    assert compiled.accepts('["a", "a"]')


def test_a_pattern_that_cannot_be_held_can_be_left_to_validation_too() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+(?!b)c$", "maxLength": 4}}}
    with pytest.raises(UnsupportedSchemaError) as caught:
        SchemaConstraint(schema)
    assert (caught.value.keyword, caught.value.path) == ("pattern", "#/properties/a")
    assert caught.value.hint is not None and "--allow-unenforced" in caught.value.hint
    compiled = SchemaConstraint(schema, allow_unenforced=True)
    assert compiled.unenforced == ["pattern at #/properties/a"]
    assert compiled.accepts('{"a": "xyz"}') and not compiled.accepts('{"a": "aaaac"}'), "the length is still held"
    # What must not hold cannot simply be left out: all of the "not" is.
    negative = SchemaConstraint({"type": "string", "not": {"pattern": "^a+(?!b)c$"}}, allow_unenforced=True)
    assert negative.unenforced == ["not at # (pattern)"] and negative.accepts('"aac"')


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"type": "string", "pattern": r"^\p{L}+$"}}}, "#/properties/a"),
        ({"type": "array", "items": {"pattern": r"^\u{61}$"}, "uniqueItems": True}, "#/items"),
        ({"type": "array", "items": {"patternProperties": {r"\cA": True}}, "uniqueItems": True}, "#/items"),
    ],
)
def test_what_validation_cannot_read_is_not_left_to_it(schema: Any, path: str) -> None:
    with pytest.raises(UnsupportedSchemaError) as caught:
        SchemaConstraint(schema, allow_unenforced=True)
    assert caught.value.path == path


def test_the_dialect_decides_what_stands_beside_a_reference() -> None:
    schema: dict[str, Any] = {"$ref": "#/definitions/a", "minimum": 3, "definitions": {"a": {"type": "integer"}}}
    assert not SchemaConstraint(schema).accepts("1")
    assert SchemaConstraint(schema, draft="7").accepts("1")
    assert SchemaConstraint({**schema, "$schema": "http://json-schema.org/draft-07/schema#"}).accepts("1")


def test_an_integer_without_bounds_fits_64_bits() -> None:
    longest = 10**18 - 1
    for schema in ({"type": "integer"}, {"type": "integer", "minimum": -5}, {"type": "integer", "multipleOf": 3}):
        compiled = SchemaConstraint(schema)
        assert compiled.accepts(str(longest)) and not compiled.accepts(str(3 * 10**18))
    assert SchemaConstraint({"type": "integer", "maximum": 10**19}).accepts(str(10**19)), "its own bounds count more"
    assert SchemaConstraint({"type": "number", "minimum": 0}).accepts(str(3 * 10**18))


def test_up_to_draft_4_an_integer_has_no_fraction() -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"}
    assert SchemaConstraint(schema).accepts("3") and not SchemaConstraint(schema).accepts("3.0")
    assert SchemaConstraint({**schema, "type": "number"}).accepts("3.0")
    assert SchemaConstraint({"type": "integer"}).accepts("3.0")


def test_keywords_of_later_drafts_say_nothing() -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "if": {}, "then": {"const": 1}}
    assert SchemaConstraint(schema).accepts("2")
    assert not SchemaConstraint({**schema, "$schema": "http://json-schema.org/draft-07/schema#"}).accepts("2")


def test_formats_describe_only_where_that_is_wanted() -> None:
    assert SchemaConstraint({"type": "string", "format": "date"}, formats=False).accepts('"x"')
    assert SchemaConstraint({"type": "string", "format": "no-such-format"}).accepts('"x"')
