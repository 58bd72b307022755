"""Rows in, typed columns out: JSONL, Parquet and CSV. pyarrow is imported only when Parquet is read or written."""

from sglbatch.data.output import (
    RESERVED_COLUMNS,
    Column,
    OutputRow,
    WriteReport,
    check_collisions,
    check_writable,
    suffix_of,
    write_output,
)
from sglbatch.data.row import Row
from sglbatch.data.rows import Rows, open_rows

__all__ = [
    "RESERVED_COLUMNS",
    "Column",
    "OutputRow",
    "Row",
    "Rows",
    "WriteReport",
    "check_collisions",
    "check_writable",
    "open_rows",
    "suffix_of",
    "write_output",
]
