"""Generating under schemas: forced runs, healing, completion, limits; on a model made of a hash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from sglbatch.engine.fsm import Forced, SchemaConstraint, TokenMasks
from sglbatch.engine.fsm.bitmask import allowed_ids
from sglbatch.engine.fsm.guide import Guide, forced_bytes, shortest_completion, whole_characters
from sglbatch.engine.generation import MAX_FREE_TEXT_BYTES
from sglbatch.tokenizer import Tokenizer
from tests.schema_runner import generate

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "job": {"enum": ["engineer", "teacher", "nurse"]},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "job", "active"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"enum": [1, 2]}, "left": {"$ref": "#/$defs/node"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[Any] = [
    PERSON,
    TREE,
    {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2},
    {"type": "string", "format": "date-time"},
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "uniqueItems": True, "minItems": 2},
    {
        "anyOf": [
            {"const": {"kind": "none"}},
            {
                "type": "object",
                "properties": {"kind": {"const": "some"}, "n": {"type": "integer"}},
                "required": ["kind", "n"],
                "additionalProperties": False,
            },
        ]
    },
    {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,3}$": {"type": "null"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    {"type": "number", "minimum": 0.5, "maximum": 3, "multipleOf": 0.25},
    {
        "type": "array",
        "contains": {"const": 7},
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxItems": 4,
    },
    {
        "type": "object",
        "properties": {'é"\n': {"enum": ["ü", "ö", "\u0001"]}},
        "required": ['é"\n'],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module")
def masks(smollm2_tokenizer: Tokenizer) -> TokenMasks:
    tokenizer = smollm2_tokenizer
    return TokenMasks(tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.vocab_size)


def test_jump_forward_gives_the_same_tokens_as_one_a_step(smollm2_tokenizer: Tokenizer) -> None:
    schemas = [json.dumps(schema) for schema in SCHEMAS] * 6
    jumped, few_steps = generate(smollm2_tokenizer, schemas)
    one_by_one, many_steps = generate(smollm2_tokenizer, schemas, jump_forward=False)
    for fast, slow in zip(jumped, one_by_one, strict=True):
        assert (fast.text, fast.output_ids, fast.finish_reason) == (slow.text, slow.output_ids, slow.finish_reason)
        assert fast.usage == slow.usage
    assert few_steps < many_steps
    num_valid = 0
    for text, result in zip(schemas, jumped, strict=True):
        if result.error is None:
            num_valid += 1
            validator = Draft202012Validator(json.loads(text), format_checker=Draft202012Validator.FORMAT_CHECKER)
            validator.validate(json.loads(result.text))
        else:
            assert result.error.code == "constraint-incomplete" and result.finish_reason == "length"
    assert num_valid >= 50


def test_a_text_cut_inside_its_constraint_is_an_error_that_keeps_it(smollm2_tokenizer: Tokenizer) -> None:
    (result,), _ = generate(smollm2_tokenizer, [json.dumps(PERSON)], max_tokens=5)
    assert result.error is not None and result.error.code == "constraint-incomplete"
    assert result.text in result.error.message and result.text.startswith('{"name"')


def test_a_stop_string_inside_a_constraint_is_an_error_too(smollm2_tokenizer: Tokenizer) -> None:
    (result,), _ = generate(smollm2_tokenizer, [json.dumps(PERSON)], stop=('"age"',))
    assert result.error is not None and "stop string" in result.error.message
    assert '"age"' not in result.text


@pytest.mark.parametrize("jump_forward", [True, False])
def test_complete_ends_every_text_validly_whatever_max_tokens(
    smollm2_tokenizer: Tokenizer, masks: TokenMasks, jump_forward: bool
) -> None:
    for schema in SCHEMAS:
        guide = masks.guide(SchemaConstraint(schema))
        needed = len(Forced(guide, smollm2_tokenizer.encode).completion(guide.start))
        for max_tokens in (needed, needed + 1, needed + 7):
            (result,), _ = generate(
                smollm2_tokenizer,
                [json.dumps(schema)],
                max_tokens=max_tokens,
                complete=True,
                jump_forward=jump_forward,
            )
            assert result.error is None, (schema, max_tokens, result.text)
            assert result.usage.generated_tokens <= max_tokens + 1
            Draft202012Validator(schema).validate(json.loads(result.text))


def test_a_string_without_a_bound_ends(smollm2_tokenizer: Tokenizer) -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]*$"}, "minItems": 1, "maxItems": 1}
    (result,), _ = generate(smollm2_tokenizer, [json.dumps(schema)], max_tokens=2000)
    assert result.error is None
    assert MAX_FREE_TEXT_BYTES <= len(result.text) < MAX_FREE_TEXT_BYTES + 200
    schema["items"]["pattern"] = "^[a-z]{1500}$"  # type: ignore[index]
    (result,), _ = generate(smollm2_tokenizer, [json.dumps(schema)], max_tokens=2000)
    assert result.error is None and len(json.loads(result.text)[0]) == 1500


def _states(guide: Guide, number: int) -> list[int]:
    """States reached by the first allowed tokens, breadth-first."""
    found = [guide.start]
    for state in found:
        for token in allowed_ids(guide.mask(state))[:3].tolist():
            if guide.bytes_of(token) and (after := guide.advance(state, token)) not in found:
                found.append(after)
        if len(found) > number:
            break
    return found


def test_forced_runs_are_canonical_and_healed(smollm2_tokenizer: Tokenizer, masks: TokenMasks) -> None:
    num_forced = 0
    for schema in SCHEMAS:
        guide = masks.guide(SchemaConstraint(schema))
        forced = Forced(guide, smollm2_tokenizer.encode)
        for state in _states(guide, 40):
            run = forced_bytes(guide, state)
            tokens = forced.tokens(state)
            data = b"".join(map(guide.bytes_of, tokens))
            assert run.startswith(data)
            canonical = smollm2_tokenizer.encode(whole_characters(run).decode())
            assert list(tokens) == canonical[: len(tokens)]
            num_forced += len(tokens)
            # Wherever a forced token begins, no legal token reaches over the run's end.
            at, left = state, len(run)
            for token in tokens:
                reach = max(len(guide.bytes_of(i)) for i in allowed_ids(guide.mask(at)).tolist())
                assert reach <= left
                at, left = guide.advance(at, token), left - len(guide.bytes_of(token))
    assert num_forced > 100


def test_the_shortest_completion_is_as_short_as_its_cost_and_valid(masks: TokenMasks) -> None:
    for schema in SCHEMAS:
        constraint = SchemaConstraint(schema)
        guide = masks.guide(constraint)
        for state in _states(guide, 30):
            data = shortest_completion(guide, state)
            assert len(data) == guide.cost(state)
            end = state
            for byte in data:
                end = int(guide.row(end)[byte])
            assert guide.may_end(end)
        Draft202012Validator(schema).validate(json.loads(constraint.shortest()))


def test_masks_are_those_of_a_loop_over_the_vocabulary(masks: TokenMasks, smollm2_tokenizer: Tokenizer) -> None:
    guide = masks.guide(SchemaConstraint(PERSON))
    for state in _states(guide, 6)[:6]:
        wanted = [
            i for i in range(len(smollm2_tokenizer.token_bytes)) if guide.bytes_of(i) and guide.advance(state, i) >= 0
        ]
        ends = sorted(smollm2_tokenizer.eos_token_ids) if guide.may_end(state) else []
        assert allowed_ids(guide.mask(state)).tolist() == sorted([*wanted, *ends])
        # Completing tokens lie on a shortest way.
        for i in allowed_ids(guide.completing_mask(state)).tolist():
            if guide.bytes_of(i):
                assert guide.cost(guide.advance(state, i)) == guide.cost(state) - len(guide.bytes_of(i))
