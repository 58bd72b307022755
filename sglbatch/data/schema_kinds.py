"""The column type of a JSON Schema, and a value put into it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from sglbatch.data.kinds import BOOL, FLOAT, INT, NULL, TEXT, Kind, merge

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
def kind_of_schema(text: str) -> Kind | None:
    """The kind of every value of a schema (JSON text); None where it has none.

    Objects become structs where the schema names all their properties and has no others; an absent property is null.
    Texts of an enum are a dictionary.
    """
    schema = json.loads(text)
    kind = _kind(schema, schema, 0)
    return None if _has_json(kind) or kind.tag == "null" else kind


def _kind(schema: Any, root: Any, depth: int) -> Kind:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return _JSON
    if "$ref" in schema:
        return _kind(_target(schema["$ref"], root), root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return _merged([_kind(branch, root, depth + 1) for branch in schema[keyword]])
    if "allOf" in schema:
        return _kind(schema["allOf"][0], root, depth + 1) if len(schema["allOf"]) == 1 else _JSON
    if "enum" in schema or "const" in schema:
        return _kind_of_values(schema.get("enum", [schema.get("const")]))
    types = schema.get("type")
    found = [_kind_of_type(name, schema, root, depth) for name in ([types] if isinstance(types, str) else types or ())]
    if schema.get("nullable") is True:
        found.append(NULL)
    return _merged(found) if found else _JSON


def _merged(kinds: list[Kind]) -> Kind:
    found = NULL
    for kind in kinds:
        found = merge(found, kind)
    return found


def _kind_of_values(values: list[Any]) -> Kind:
    texts = [value for value in values if isinstance(value, str)]
    if texts and all(value is None or isinstance(value, str) for value in values):
        return Kind(tag="text", is_enum=True)
    plain = [value for value in values if not isinstance(value, list | dict)]
    return _merged([_of_plain(value) for value in plain]) if len(plain) == len(values) else _JSON


def _of_plain(value: Any) -> Kind:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return _PLAIN[names[type(value)]]


def _kind_of_type(name: str, schema: dict[str, Any], root: Any, depth: int) -> Kind:
    if name == "array":
        item = _kind(schema.get("items"), root, depth + 1)
        return _JSON if "prefixItems" in schema or item.tag == "json" else Kind(tag="list", item=item)
    if name != "object":
        return _PLAIN.get(name, _JSON)
    properties = schema.get("properties")
    if not properties or schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return _JSON
    fields = {key: _kind(value, root, depth + 1) for key, value in properties.items()}
    if any(kind.tag == "json" for kind in fields.values()):
        return _JSON
    return Kind(tag="struct", fields=tuple(fields.items()))


def _target(reference: Any, root: Any) -> Any:
    """What a reference inside the document points at; None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _has_json(kind: Kind) -> bool:
    inner = [kind.item] if kind.item is not None else [field for _, field in kind.fields]
    return kind.tag == "json" or any(map(_has_json, inner))


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


def fits(kind: Kind, declared: Kind) -> bool:
    """Whether values found to be of ``kind`` can stand in a column of the declared kind."""
    if kind.tag == "null":
        return True
    if kind.tag != declared.tag:
        return False
    if kind.tag == "list":
        return kind.item is None or declared.item is None or fits(kind.item, declared.item)
    if kind.tag == "struct":
        wanted = dict(declared.fields)
        return [n for n, _ in kind.fields] == list(wanted) and all(fits(k, wanted[n]) for n, k in kind.fields)
    return True
