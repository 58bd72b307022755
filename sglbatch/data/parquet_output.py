"""Records to Parquet, a bounded batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from sglbatch.data.columns import ColumnSet, OutputColumn
from sglbatch.data.kinds import Kind
from sglbatch.data.values import text_bytes

_BATCH_BYTES: Final = 64 << 20
_BATCH_ROWS: Final = 16384

_ERROR: Final = pa.struct([("code", pa.string()), ("message", pa.string()), ("call", pa.string())])


def write_parquet(file: BinaryIO, records: Iterable[dict[str, Any]], column_set: ColumnSet) -> None:
    """Write records, one row group a batch of about 64 MiB of text or 16,384 rows."""
    schema = _schema(column_set)
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in _batches(records):
            arrays = [pa.array([record[field.name] for record in batch], field.type) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _batches(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    num_bytes = 0
    for record in records:
        batch.append(record)
        num_bytes += text_bytes(record)
        if num_bytes > _BATCH_BYTES or len(batch) == _BATCH_ROWS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _schema(column_set: ColumnSet) -> pa.Schema:
    # A struct needs a field, so without any named call `_finish` is a column of nulls.
    names = column_set.finish_names
    finish = pa.struct([(name, pa.string()) for name in names]) if names else pa.string()
    fields = [pa.field(column.name, _column_type(column)) for column in column_set.columns]
    return pa.schema([*fields, pa.field("_error", _ERROR), pa.field("_finish", finish), _usage(column_set)])


def _usage(column_set: ColumnSet) -> pa.Field:
    counts = [("prompt_tokens", pa.int64()), ("generated_tokens", pa.int64())]
    names = column_set.means_names
    means = [("means", pa.struct([(name, pa.string()) for name in names]))] if names else []
    return pa.field("_usage", pa.struct([*counts, *means]))


def _column_type(column: OutputColumn) -> pa.DataType:
    text = pa.large_string() if column.is_large else pa.string()
    if column.is_enum:
        return pa.dictionary(pa.int32(), text)
    return _arrow_type(column.kind, text)


def _arrow_type(kind: Kind, text: pa.DataType) -> pa.DataType:
    if kind.is_enum:
        return pa.dictionary(pa.int32(), text)
    if kind.tag == "list":
        assert kind.item is not None
        return pa.list_(_arrow_type(kind.item, text))
    if kind.tag == "struct":
        return pa.struct([(name, _arrow_type(field, text)) for name, field in kind.fields])
    return {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}.get(kind.tag, text)
