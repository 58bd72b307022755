"""What a program may leave in a variable, made into null, bool, int, float, str, list and dict."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final

import numpy as np

from sglbatch.types import VarType

MAX_DEPTH: Final = 48
SURROGATE: Final = "lone surrogates replaced by U+FFFD"
FOREIGN: Final = "values of a type without a column type, written as str() gives them"
TOO_DEEP: Final = f"values nested deeper than {MAX_DEPTH} levels, written as str() gives them"
NOT_FINITE: Final = "values with NaN or infinity, which JSON has not: written as null"

_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_INT: Final = re.compile(r"[+-]?[0-9]{1,4000}")
_FLOAT: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|infinity|nan)", re.IGNORECASE)
_BOOLS: Final = {"True": True, "true": True, "False": False, "false": False}


def normalise(value: Any, notes: Counter[str], depth: int = 0) -> Any:  # noqa: PLR0911  one case a type
    """The JSON-like form of any Python value; what could not be kept as it was is counted in ``notes``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean_text(value, notes)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, np.generic | np.ndarray):
        return normalise(value.tolist(), notes, depth + 1) if depth < MAX_DEPTH else _as_text(value, notes, TOO_DEEP)
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f") if value.is_finite() else str(value)
    if isinstance(value, list | tuple | Mapping):
        return _normalise_nested(value, notes, depth)
    return _as_text(value, notes, FOREIGN)


def _normalise_nested(value: list[Any] | tuple[Any, ...] | Mapping[Any, Any], notes: Counter[str], depth: int) -> Any:
    if depth >= MAX_DEPTH:
        return _as_text(value, notes, TOO_DEEP)
    if not isinstance(value, Mapping):
        return [normalise(item, notes, depth + 1) for item in value]
    fields = {_key(key, notes): normalise(item, notes, depth + 1) for key, item in value.items()}
    return fields if len(fields) == len(value) else _as_text(value, notes, FOREIGN)


def _key(key: Any, notes: Counter[str]) -> str:
    """As json writes keys: true, null, 1."""
    if isinstance(key, str):
        return clean_text(key, notes)
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    return _as_text(key, notes, FOREIGN)


def clean_text(text: str, notes: Counter[str]) -> str:
    """Text that UTF-8 can hold."""
    if text.isascii():
        return str(text)
    clean, num_replaced = _SURROGATES.subn("\ufffd", text)
    if num_replaced:
        notes[SURROGATE] += num_replaced
    return clean


def _as_text(value: Any, notes: Counter[str], note: str) -> str:
    notes[note] += 1
    try:
        text = str(value)
    except Exception:  # noqa: BLE001  the class is the program's: its __str__ may raise anything, and the row is finished
        text = f"<{type(value).__name__}>"
    return clean_text(text, notes)


def convert(value: Any, declared: VarType | None) -> Any:
    """``value`` (JSON-like) in its declared type; unchanged where it does not fit.

    Program values are text: "12\\n" of an int is 12, "true" of a bool True, JSON text of a json its value.
    """
    if declared is None or value is None:
        return value
    if declared.is_list and isinstance(value, list):
        item = VarType(kind=declared.kind, choices=declared.choices, schema=declared.schema)
        return [convert(entry, item) for entry in value]
    if declared.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return _to_float(value)
    if declared.is_list or not isinstance(value, str):
        return value
    return _convert_text(value, declared)


def _convert_text(value: str, declared: VarType) -> Any:
    text = value.strip()
    if declared.kind == "int" and _INT.fullmatch(text):
        return int(text)
    if declared.kind == "float" and _FLOAT.fullmatch(text):
        return float(text)
    if declared.kind == "bool":
        return _BOOLS.get(text, value)
    if declared.kind == "json":
        return _parse_json(value)
    return value


def _to_float(value: int) -> Any:
    try:
        return float(value)
    except OverflowError:
        return value


def _parse_json(text: str) -> Any:
    try:
        return normalise(json.loads(text), Counter())
    except (ValueError, RecursionError):
        return text


def to_json(value: Any, notes: Counter[str]) -> str:
    """Strict JSON text of a JSON-like value."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        notes[NOT_FINITE] += 1
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


def text_bytes(value: Any) -> int:
    """An upper bound of the UTF-8 bytes of all text in a JSON-like value, plus 16 for each value."""
    if isinstance(value, str):
        return 16 + len(value) * (1 if value.isascii() else 4)
    if isinstance(value, list):
        return 16 + sum(map(text_bytes, value))
    if isinstance(value, dict):
        return 16 + sum(text_bytes(key) + text_bytes(item) for key, item in value.items())
    return 16
