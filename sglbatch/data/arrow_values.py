"""Arrow values as the Python values of a row: temporals become ISO 8601 text, decimals text, bytes UTF-8 text."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, TypeAlias
from zoneinfo import ZoneInfo

import pyarrow as pa

from sglbatch.data.row import BadRow

Converter: TypeAlias = Callable[[Any], Any]

_UNITS_PER_S: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EPOCH: Final = datetime(1970, 1, 1)


def plain_type(kind: pa.DataType) -> pa.DataType:  # noqa: PLR0911  one case a type
    """The type to cast to before ``to_pylist``.

    Dictionaries become their values. Timestamps, times and durations become their integers, because Python's own types
    have no nanoseconds and fewer years.
    """
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_time64(kind):
        return pa.int64()
    if pa.types.is_time32(kind):
        return pa.int32()
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind


def converter(kind: pa.DataType) -> Converter | None:
    """What turns a value of ``plain_type(kind)``, as ``to_pylist`` gives it, into a row's value; None if nothing.

    The converter raises BadRow: bad-utf8 (bytes), bad-value (a date out of range).
    """
    if pa.types.is_dictionary(kind):
        return converter(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return converter(kind.storage_type)
    if pa.types.is_map(kind):
        return _map_converter(converter(kind.key_type), converter(kind.item_type))
    if pa.types.is_struct(kind):
        return _struct_converter({field.name: converter(field.type) for field in kind})
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _list_converter(converter(kind.value_type))
    plain = _scalar_converter(kind)
    return None if plain is None else _keep_null(plain)


def _scalar_converter(kind: pa.DataType) -> Converter | None:  # noqa: PLR0911  one case a type
    if pa.types.is_timestamp(kind):
        zone = None if kind.tz is None else _zone(kind.tz)
        return lambda value: _timestamp(value, _UNITS_PER_S[kind.unit], zone)
    if pa.types.is_time(kind):
        return lambda value: _time(value, _UNITS_PER_S[kind.unit])
    if pa.types.is_duration(kind):
        return lambda value: _duration(value, _UNITS_PER_S[kind.unit])
    if pa.types.is_date(kind):
        return date.isoformat
    if pa.types.is_decimal(kind):
        return lambda value: format(value, "f")
    if any(is_binary(kind) for is_binary in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)):
        return _text
    if pa.types.is_fixed_size_binary(kind):
        return _text
    return None


def _keep_null(convert: Converter) -> Converter:
    return lambda value: None if value is None else convert(value)


def _list_converter(item: Converter | None) -> Converter | None:
    return None if item is None else _keep_null(lambda values: [item(value) for value in values])


def _struct_converter(fields: dict[str, Converter | None]) -> Converter | None:
    needed = {name: convert for name, convert in fields.items() if convert is not None}
    if not needed:
        return None

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        return value | {name: field(value[name]) for name, field in needed.items()}

    return _keep_null(convert)


def _map_converter(key: Converter | None, item: Converter | None) -> Converter:
    """A map with text keys is a dict, another map a list of [key, value]."""

    def convert(pairs: list[tuple[Any, Any]]) -> Any:
        plain = [[key(k) if key else k, item(v) if item else v] for k, v in pairs]
        return dict(plain) if all(isinstance(k, str) for k, _ in plain) else plain

    return _keep_null(convert)


def _zone(name: str) -> ZoneInfo | Any:
    if name[:1] in "+-":  # Arrow's fixed offsets: +05:30
        return datetime.fromisoformat(f"1970-01-01T00:00:00{name}").tzinfo
    return UTC if name.upper() == "UTC" else ZoneInfo(name)


def _timestamp(value: int, units: int, zone: Any) -> str:
    seconds, rest = divmod(value, units)
    try:
        moment = _EPOCH + timedelta(seconds=seconds)
        if zone is not None:
            moment = moment.replace(tzinfo=UTC).astimezone(zone)
    except OverflowError as error:
        raise BadRow("bad-value", "a timestamp outside the years 1 to 9999") from error
    text = moment.isoformat()
    return text[:19] + _fraction(rest, units) + text[19:]


def _time(value: int, units: int) -> str:
    seconds, rest = divmod(value, units)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return time(hour, minute, second).isoformat() + _fraction(rest, units)


def _duration(value: int, units: int) -> str:
    seconds, rest = divmod(abs(value), units)
    return f"{'-' if value < 0 else ''}PT{seconds}{_fraction(rest, units)}S"


def _fraction(rest: int, units: int) -> str:
    return f".{rest:0{len(str(units)) - 1}d}".rstrip("0") if rest else ""


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("bad-utf8", f"bytes that are not UTF-8 text (byte {error.start + 1} of the value)") from error
