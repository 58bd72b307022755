"""The column type of a JSON Schema, and a value put into it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from sglbatch.data.kinds import BOOL, FLOAT, INT, NULL, TEXT, Kind, kind_of, merge

_MAX_DEPTH: Final = 24
_JSON: Final = Kind(tag="json", reason="has a schema without one type")
_PLAIN: Final[Mapping[str, Kind]] = {
    "string": TEXT,
    "integer": INT,
    "number": FLOAT,
    "boolean": BOOL,
    "null": NULL,
}


@lru_cache(maxsize=256)
def kind_of_schema(text: str) -> Kind:
    """The kind of every value of a schema (JSON text), whatever values there are.

    Objects become structs where the schema names all their properties and has no others; an absent property is null.
    Texts of an enum are a dictionary. A part that has no one type is ``json``, and its neighbours keep theirs.
    """
    schema = json.loads(text)
    return _kind(schema, schema, ())


def _kind(schema: Any, root: Any, steps: tuple[str, ...]) -> Kind:
    """Args: steps: from the root to here, a reference's text where one was followed."""
    if not isinstance(schema, dict) or len(steps) > _MAX_DEPTH:
        return _JSON
    if "$ref" in schema:
        reference = str(schema["$ref"])
        recurs = reference in steps or reference == "#"
        return _JSON if recurs else _kind(_target(reference, root), root, (*steps, reference))
    below = (*steps, "")
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return _merged([_kind(branch, root, below) for branch in schema[keyword]])
    if "allOf" in schema:
        return _kind(schema["allOf"][0], root, below) if len(schema["allOf"]) == 1 else _JSON
    if "enum" in schema or "const" in schema:
        return _kind_of_values(schema.get("enum", [schema.get("const")]))
    types = schema.get("type")
    found = [_kind_of_type(name, schema, root, below) for name in ([types] if isinstance(types, str) else types or ())]
    if schema.get("nullable") is True:
        found.append(NULL)
    return _merged(found) if found else _JSON


def _merged(kinds: list[Kind]) -> Kind:
    found = NULL
    for kind in kinds:
        found = _either(found, kind)
    return found


def _either(a: Kind, b: Kind) -> Kind:
    """The least kind for the values of both; as ``merge``, but inside a list or a struct only what differs is json."""
    if a.item is not None and b.item is not None:
        return Kind(tag="list", item=_either(a.item, b.item))
    left, right = dict(a.fields), dict(b.fields)
    if left and left.keys() == right.keys():
        return Kind(tag="struct", fields=tuple((name, _either(kind, right[name])) for name, kind in a.fields))
    return merge(a, b)


def _kind_of_values(values: list[Any]) -> Kind:
    texts = [value for value in values if isinstance(value, str)]
    if texts and all(value is None or isinstance(value, str) for value in values):
        return Kind(tag="text", is_enum=True)
    plain = [value for value in values if not isinstance(value, list | dict)]
    return _merged([_of_plain(value) for value in plain]) if len(plain) == len(values) else _JSON


def _of_plain(value: Any) -> Kind:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return _PLAIN[names[type(value)]]


def _kind_of_type(name: str, schema: dict[str, Any], root: Any, below: tuple[str, ...]) -> Kind:
    if name == "array":
        item = _kind(schema.get("items"), root, below)
        return _JSON if "prefixItems" in schema else Kind(tag="list", item=item)
    if name != "object":
        return _PLAIN.get(name, _JSON)
    properties = schema.get("properties")
    if not properties or schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return _JSON
    fields = {key: _kind(value, root, below) for key, value in properties.items()}
    return Kind(tag="struct", fields=tuple(fields.items()))


def _target(reference: str, root: Any) -> Any:
    """What a reference inside the document points at; None for any other."""
    if not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def json_parts(kind: Kind, place: str = "") -> list[str]:
    """Where inside a kind there is JSON text: ``.name`` of a struct, ``[]`` of a list."""
    if kind.tag == "json":
        return [place]
    inner = [("[]", kind.item)] if kind.item is not None else [(f".{name}", field) for name, field in kind.fields]
    return [part for step, item in inner for part in json_parts(item, place + step)]


def shaped(value: Any, kind: Kind) -> Any:
    """A value in its schema's kind: absent properties are null, whole numbers of a float column floats.

    Where it does not fit, it stays as it is.
    """
    if kind.tag == "struct" and isinstance(value, dict):
        names = [name for name, _ in kind.fields]
        if set(value) <= set(names):
            return {name: shaped(value.get(name), field) for name, field in kind.fields}
    if kind.tag == "list" and isinstance(value, list) and kind.item is not None:
        return [shaped(item, kind.item) for item in value]
    if kind.tag == "float" and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    return value


def fits(value: Any, kind: Kind) -> bool:
    """Whether a value, ``shaped`` before, can stand in a column of this kind."""
    if value is None or kind.tag == "json":
        return True
    if kind.tag == "list":
        return isinstance(value, list) and kind.item is not None and all(fits(item, kind.item) for item in value)
    if kind.tag == "struct":
        names = [name for name, _ in kind.fields]
        return (
            isinstance(value, dict)
            and list(value) == names
            and all(fits(value[name], field) for name, field in kind.fields)
        )
    return kind_of(value).tag == kind.tag


def with_json_text(value: Any, kind: Kind, as_text: Callable[[Any], str]) -> Any:
    """A value that fits, its ``json`` parts as JSON text; null stays null."""
    if value is None:
        return None
    if kind.tag == "json":
        return as_text(value)
    if kind.tag == "list" and kind.item is not None:
        return [with_json_text(item, kind.item, as_text) for item in value]
    if kind.tag == "struct":
        return {name: with_json_text(value[name], field, as_text) for name, field in kind.fields}
    return value
