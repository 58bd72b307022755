"""The places of a schema document, and what its references point at."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from sglbatch.engine.fsm.schema_keywords import invalid
from sglbatch.engine.fsm.schema_node import Place
from sglbatch.errors import ConstraintError, UnsupportedSchemaError
from sglbatch.json_places import below

_INDEX: Final = re.compile("0|[1-9][0-9]{0,8}")
_DRAFTS: Final = {
    **{f"http://json-schema.org/draft-0{number}/schema": max(number, 4) for number in (3, 4, 6, 7)},
    **{f"http://json-schema.org/draft/{name}/schema": 2020 for name in ("2019-09", "2020-12")},
    "http://json-schema.org/schema": 7,
}
_LATER: Final = {
    6: ("const", "contains", "propertyNames"),
    7: ("if", "then", "else"),
    2020: (
        *("$anchor", "$defs", "$dynamicAnchor", "dependentRequired", "dependentSchemas", "maxContains", "minContains"),
        *("prefixItems", "unevaluatedItems", "unevaluatedProperties"),
    ),
}
"""Draft -> keywords that are none before it."""

_DATA_KEYWORDS: Final = frozenset({"enum", "const", "default", "examples", "example"})


class Documents:
    """One document and its embedded resources; nothing is ever fetched.

    Args:
        draft: of a document without ``$schema``.

    Raises ConstraintError (invalid-schema), UnsupportedSchemaError for a ``$schema`` that is no known draft.
    """

    def __init__(self, document: Any, *, draft: int) -> None:
        self._places: dict[tuple[int, str], Place] = {}
        self._resources: dict[str, Place] = {}
        self._anchors: dict[str, Place] = {}
        self._in_draft: dict[Place, Place] = {}
        self.root = self._place(document, "#", "", self._draft(document, "#", default=draft))
        self._index(self.root)
        self._resources.setdefault("", self.root)

    def child(self, place: Place, *steps: str | int) -> Place:
        """The schema below a keyword of ``place``."""
        for step in steps:
            schema = place.schema[step]
            place = self._place(schema, below(place.path, step), place.base, place.draft)
        return place

    def children(self, place: Place, keyword: str) -> list[Place]:
        """The schemas in the list below a keyword."""
        return [self.child(place, keyword, i) for i in range(len(place.schema[keyword]))]

    def in_its_draft(self, place: Place) -> Place:
        """The schema without keywords that came after its draft."""
        later = {keyword for since, words in _LATER.items() if place.draft < since for keyword in words}
        if not later or not isinstance(place.schema, dict) or not later & place.schema.keys():
            return place
        if place not in self._in_draft:
            known = {keyword: value for keyword, value in place.schema.items() if keyword not in later}
            self._in_draft[place] = replace(place, schema=known)
        return self._in_draft[place]

    def resolve(self, place: Place) -> Place:
        """What the place's ``$ref`` points at."""
        reference = place.schema["$ref"]
        url, fragment = urldefrag(_joined(place, "$ref", reference))
        if url not in self._resources:
            raise UnsupportedSchemaError("$ref", place.path, f"{reference!r} is outside the schema: nothing is fetched")
        target = self._resources[url]
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if f"{url}#{fragment}" not in self._anchors:
                raise _unknown(place, reference)
            return self._anchors[f"{url}#{fragment}"]
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            schema = target.schema
            if isinstance(schema, list) and _INDEX.fullmatch(name) and int(name) < len(schema):
                target = self.child(target, int(name))
            elif isinstance(schema, dict) and name in schema:
                target = self.child(target, name)
            else:
                raise _unknown(place, reference)
        return target

    def _place(self, schema: Any, path: str, base: str, draft: int) -> Place:
        key = (id(schema), path)
        if key not in self._places:
            if isinstance(schema, dict):
                draft = self._draft(schema, path, default=draft)
                identifier = schema.get("$id", schema.get("id"))
                if isinstance(identifier, str) and not (draft <= 7 and "$ref" in schema):
                    base = _joined(Place(schema, path, base, draft), "$id", identifier)
            self._places[key] = Place(schema, path, base, draft)
        return self._places[key]

    @staticmethod
    def _draft(schema: Any, path: str, *, default: int) -> int:
        dialect = schema.get("$schema") if isinstance(schema, dict) else None
        if not isinstance(dialect, str):
            return default
        name = dialect.rstrip("#").replace("https:", "http:")
        if name not in _DRAFTS:
            raise UnsupportedSchemaError("$schema", path, f"{dialect!r} is no draft that is known here")
        return _DRAFTS[name]

    def _index(self, place: Place) -> None:
        """Finds every identifier and anchor in the document."""
        stack = [place]
        while stack:
            place = stack.pop()
            schema = place.schema
            if isinstance(schema, dict):
                self._index_names(place)
                steps: list[str | int] = [k for k in schema if k not in _DATA_KEYWORDS]
            else:
                steps = list(range(len(schema))) if isinstance(schema, list) else []
            stack += [self.child(place, s) for s in steps if isinstance(schema[s], dict | list)]

    def _index_names(self, place: Place) -> None:
        schema = place.schema
        identifier = schema.get("$id", schema.get("id"))
        if isinstance(identifier, str) and not (place.old and "$ref" in schema):
            url, fragment = urldefrag(place.base)
            if fragment:
                self._anchors[place.base] = place
            else:
                self._resources.setdefault(url, place)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors[f"{urldefrag(place.base)[0]}#{schema[keyword]}"] = place


def _joined(place: Place, keyword: str, reference: str) -> str:
    """The URI that a reference is at its place."""
    try:
        urlsplit(reference)  # urljoin leaves it as it is where the base is empty
        return urljoin(urldefrag(place.base)[0], reference)
    except ValueError as error:
        raise invalid(place, keyword, f"{reference!r} is no URI: {error}") from error


def _unknown(place: Place, reference: str) -> ConstraintError:
    return ConstraintError(
        "invalid-schema", f"{place.path}/$ref: {reference!r} points at nothing", hint="correct the reference"
    )
