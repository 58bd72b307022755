"""Parquet rows. On first read the used columns are decoded once, row group by row group, into an uncompressed Arrow
file on disk, which is mapped: any row is then a cheap read in any order, and memory is the page cache's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sglbatch.data.arrow_values import converter, plain_type
from sglbatch.data.row import BadRow, Values
from sglbatch.data.spool import OpenFiles, Spool, cannot_spool, unreadable
from sglbatch.errors import SglbatchError
from sglbatch.types import ErrorInfo

_BATCH_BYTES: Final = 32 << 20
_MAX_BATCH_ROWS: Final = 4096
_SLICE_ROWS: Final = 64


class ParquetRows:
    """RowSource over a Parquet file.

    Dates, times and durations are ISO 8601 text, decimals text, bytes UTF-8 text or the row's error.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        schema: pa.Schema,
        num_rows: int,
        row_bytes: int,
        spool: Spool,
        files: OpenFiles,
    ) -> None:
        self._name = name
        self._path = path
        self._schema = schema
        self._num_rows = num_rows
        self._row_bytes = row_bytes
        self._spool = spool
        self._files = files
        self._converters = {field.name: convert for field in schema if (convert := converter(field.type)) is not None}

    @property
    def columns(self) -> list[str]:
        return list(self._schema.names)

    def __len__(self) -> int:
        return self._num_rows

    def where(self, index: int) -> str:
        return f"{self._name}:row {index + 1}"

    def use(self, columns: Collection[str]) -> ParquetRows:
        schema = pa.schema([field for field in self._schema if field.name in columns])
        return ParquetRows(
            self._name,
            self._path,
            schema=schema,
            num_rows=self._num_rows,
            row_bytes=self._row_bytes,
            spool=self._spool,
            files=self._files,
        )

    def read(self, index: int) -> Values | ErrorInfo:
        if not self._schema.names:
            return {}
        batch_index = int(np.searchsorted(self._decoded.ends, index, side="right"))
        batch = self._batch(batch_index)
        offset = index - int(self._decoded.ends[batch_index]) + batch.num_rows
        return self._slice(batch, offset, 1)[0]

    def __iter__(self) -> Iterator[Values | ErrorInfo]:
        if not self._schema.names:
            yield from ({} for _ in range(self._num_rows))
            return
        for batch_index in range(len(self._decoded.ends)):
            batch = self._batch(batch_index)
            for offset in range(0, batch.num_rows, _SLICE_ROWS):
                yield from self._slice(batch, offset, _SLICE_ROWS)

    def _slice(self, batch: pa.RecordBatch, offset: int, num_rows: int) -> list[Values | ErrorInfo]:
        """Up to ``num_rows`` rows; when one has a value Python cannot hold, that row alone becomes an error."""
        piece = batch.slice(offset, num_rows)
        try:
            columns: list[list[Any]] = [column.to_pylist() for column in piece.columns]
        except UnicodeDecodeError:
            if piece.num_rows == 1:
                return [ErrorInfo(code="bad-utf8", message="a text value is not UTF-8")]
        except (ValueError, OverflowError) as error:
            if piece.num_rows == 1:
                return [ErrorInfo(code="bad-value", message=f"a value cannot be read: {error}")]
        else:
            names = self._schema.names
            return [self._values(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
        return [self._slice(piece, i, 1)[0] for i in range(piece.num_rows)]

    def _values(self, values: Values) -> Values | ErrorInfo:
        for name, convert in self._converters.items():
            try:
                values[name] = convert(values[name])
            except BadRow as error:
                return ErrorInfo(code=error.info.code, message=f"column {name!r}: {error.info.message}")
        return values

    def _batch(self, batch_index: int) -> pa.RecordBatch:
        path = self._decoded.path
        reader: _ArrowFile = self._files.get(path, lambda: _ArrowFile(path))
        return reader.batch(batch_index)

    @cached_property
    def _decoded(self) -> _Decoded:
        """The used columns of the first ``num_rows`` rows, decoded to an Arrow file.

        Raises:
            SglbatchError: bad-parquet, cannot-spool.
        """
        schema = pa.schema([pa.field(field.name, plain_type(field.type)) for field in self._schema])
        ends: list[int] = [0]
        try:
            path = self._spool.new_path()
            sink = pa.OSFile(str(path), "wb")
        except OSError as error:
            raise cannot_spool(self._name, error) from error
        with sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in self._stored_batches(schema):
                try:
                    writer.write_batch(batch)
                except OSError as error:
                    raise cannot_spool(self._name, error) from error
                ends.append(ends[-1] + batch.num_rows)
        assert ends[-1] == self._num_rows
        return _Decoded(path=path, ends=np.array(ends[1:], dtype=np.int64))

    def _stored_batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        left = self._num_rows
        batch_rows = max(1, min(_MAX_BATCH_ROWS, left, _BATCH_BYTES // max(1, self._row_bytes)))
        try:
            with pq.ParquetFile(self._path, page_checksum_verification=True) as file:
                for batch in file.iter_batches(batch_size=batch_rows, columns=self.columns):
                    piece = batch.slice(0, left)
                    columns = [_plain(piece.column(field.name)).cast(field.type) for field in schema]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)
                    left -= piece.num_rows
                    if left == 0:
                        return
        except (pa.ArrowException, OSError) as error:
            raise _bad_parquet(self._name, error) from error


@dataclass(frozen=True, kw_only=True)
class _Decoded:
    """``ends``: int64 [num_batches], the rows up to the end of each batch."""

    path: Path
    ends: npt.NDArray[np.int64]


class _ArrowFile:
    """A mapped Arrow file and its last batch."""

    def __init__(self, path: Path) -> None:
        self._map = pa.memory_map(str(path))
        self._reader = pa.ipc.open_file(self._map)
        self._last: tuple[int, pa.RecordBatch] | None = None

    def batch(self, index: int) -> pa.RecordBatch:
        if self._last is None or self._last[0] != index:
            self._last = (index, self._reader.get_batch(index))
        return self._last[1]

    def close(self) -> None:
        self._last = None
        self._map.close()


def open_parquet(name: str, path: Path, *, spool: Spool, files: OpenFiles, limit: int | None) -> ParquetRows:
    """Read a Parquet file's footer; the rows are read later.

    Raises:
        SglbatchError: bad-parquet, bad-header (two columns of one name), unreadable-file.
    """
    try:
        with path.open("rb") as file:
            metadata = pq.read_metadata(file)
            schema = metadata.schema.to_arrow_schema()
    except pa.ArrowException as error:
        raise _bad_parquet(name, error) from error
    except OSError as error:
        raise unreadable(name, error) from error
    repeated = sorted({column for column in schema.names if schema.names.count(column) > 1})
    if repeated:
        raise SglbatchError(
            "bad-header",
            f"column {repeated[0]!r} occurs more than once",
            where=name,
            hint="give every column its own name",
        )
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    num_rows = metadata.num_rows if limit is None else min(limit, metadata.num_rows)
    return ParquetRows(name, path, schema=schema, num_rows=num_rows, row_bytes=row_bytes, spool=spool, files=files)


def _plain(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _bad_parquet(name: str, error: Exception) -> SglbatchError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return SglbatchError(
        "bad-parquet",
        f"{name} is not a Parquet file that can be read: {reason}",
        hint="the file is damaged or not what its name says; make it again",
    )
