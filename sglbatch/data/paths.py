"""Which files the user means: globs, formats, compression, standard input."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from sglbatch.errors import SglbatchError

Format: TypeAlias = Literal["jsonl", "csv", "tsv", "parquet"]
Codec: TypeAlias = Literal["gzip", "zstd"]

STDIN: Final = "-"
_FORMATS: Final[dict[str, Format]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_CODECS: Final[dict[str, Codec]] = {".gz": "gzip", ".zst": "zstd"}
SUPPORTED: Final = (
    "supported: .jsonl .ndjson .json (one object a line) .csv .tsv .parquet, each also .gz or .zst; "
    "- is JSONL on standard input"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One input as the user named it. ``name`` is ``-`` for standard input, whose ``path`` is None."""

    name: str
    path: Path | None
    format: Format
    codec: Codec | None


def expand_paths(names: Sequence[str]) -> list[InputFile]:
    """The files behind the user's arguments, in the given order; the matches of a glob are sorted.

    Raises:
        SglbatchError: no-input, missing-file, not-a-file, unknown-format, repeated-stdin.
    """
    if not names:
        raise SglbatchError("no-input", "no data set was given", hint=SUPPORTED)
    if list(names).count(STDIN) > 1:
        raise SglbatchError("repeated-stdin", "standard input (-) can be read only once", hint="give - only once")
    return [_input_file(path) for name in names for path in _matches(name)]


def _matches(name: str) -> list[str]:
    if name == STDIN or Path(name).exists() or not glob.has_magic(name):
        return [name]
    found = sorted(path for path in glob.glob(name, recursive=True) if not Path(path).is_dir())
    if not found:
        raise SglbatchError(
            "missing-file",
            f"no file matches {name}",
            hint="check the pattern; quote it if the shell is not to expand it",
        )
    return found


def _input_file(name: str) -> InputFile:
    if name == STDIN:
        return InputFile(name=name, path=None, format="jsonl", codec=None)
    path = Path(name)
    if path.is_dir():
        raise SglbatchError(
            "not-a-file", f"{name} is a directory", hint=f"name the files in it, such as '{path}/*.parquet'"
        )
    if not path.exists():
        raise SglbatchError("missing-file", f"there is no file {name}", hint="check the path")
    if not path.is_file():
        raise SglbatchError(
            "not-a-file", f"{name} is not a regular file", hint="the input is read more than once; pipe it in as -"
        )
    suffixes = [suffix.lower() for suffix in path.suffixes]
    codec = _CODECS.get(suffixes[-1]) if suffixes else None
    if codec:
        suffixes.pop()
    file_format = _FORMATS.get(suffixes[-1]) if suffixes else None
    if file_format is None:
        raise SglbatchError("unknown-format", f"{name} has a format that is not known", hint=SUPPORTED)
    return InputFile(name=name, path=path, format=file_format, codec=codec)
