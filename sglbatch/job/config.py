"""What a run was asked to do, as one value that the manifest can keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Final

from sglbatch.errors import SglbatchError

SAVEABLE: Final = ("transcript",)
RESERVE: Final = ("soft", "full")
DTYPES: Final = ("auto", "float32", "bfloat16")

_DEFAULT_SUFFIX: Final = ".parquet"
_COMPRESSIONS: Final = (".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class MaxFailures:
    """How many failed rows still count as done: a number of rows, or a percentage of them."""

    value: float
    percent: bool = False

    @staticmethod
    def parse(text: str) -> MaxFailures:
        """``5`` or ``2.5%``.

        Raises:
            SglbatchError: ``bad-option``.
        """
        number = text.strip().removesuffix("%")
        percent = text.strip().endswith("%")
        try:
            value = float(number) if percent else float(int(number))
        except ValueError:
            value = -1.0
        if not isfinite(value) or value < 0 or (percent and value > 100):
            raise SglbatchError(
                "bad-option",
                f"--max-failures takes a number of rows or a percentage, not {text!r}",
                hint="for example --max-failures 10 or --max-failures 0.5%",
            )
        return MaxFailures(value=value, percent=percent)

    def allows(self, num_failed: int, num_rows: int) -> bool:
        limit = self.value * num_rows / 100 if self.percent else self.value
        return num_failed <= limit

    def __str__(self) -> str:
        return f"{self.value:g}%" if self.percent else f"{self.value:g}"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One ``run``. Fields in ``NOT_IDENTITY`` may change between runs of a job without making any call new.

    Args:
        template: the program's file.
        data: files, globs, addresses or "-" as given.
        output: None where no job is kept (``plan``, ``--show``) and no default can be told.
        params: constants of the template, by name.
        mapping: template parameter -> column.
        keep: input columns to carry into the output; ("all",) for every one.
        save: extra output columns, of ``SAVEABLE``.
        temperature, max_tokens: defaults for calls that name none; None leaves the template's.
    """

    template: Path
    data: tuple[str, ...]
    model: str
    output: Path | None = None
    limit: int | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    mapping: Mapping[str, str] = field(default_factory=dict)
    program: str | None = None
    id_column: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    keep: tuple[str, ...] = ()
    keep_prefix: str = ""
    save: tuple[str, ...] = ()
    parse_special: bool = False
    max_failures: MaxFailures = MaxFailures(value=0)
    dtype: str = "auto"
    kv_tokens: int | None = None
    max_batch_tokens: int | None = None
    reserve: str = "soft"
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        _one_of("--save", self.save, SAVEABLE)
        _one_of("--reserve", (self.reserve,), RESERVE)
        _one_of("--dtype", (self.dtype,), DTYPES)
        _at_least("--limit", self.limit, 1)
        _at_least("--max-tokens", self.max_tokens, 1)
        _at_least("--kv-tokens", self.kv_tokens, 1)
        _at_least("--max-batch-tokens", self.max_batch_tokens, 1)
        _at_least("--temperature", self.temperature, 0)
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise SglbatchError(
                "bad-option", f"--time-limit must be positive, not {self.time_limit_s:g}", hint="give it in seconds"
            )

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "template": str(self.template.absolute()),
            "data": [_absolute(path) for path in self.data],
            "output": self.output and str(self.output.absolute()),
            "max_failures": str(self.max_failures),
            "keep": list(self.keep),
            "save": list(self.save),
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> RunConfig:
        """The inverse of ``to_json``; members that this version does not know are a version error of the manifest's."""
        known = {f.name for f in fields(RunConfig)}
        assert set(value) <= known, set(value) - known
        return RunConfig(
            **{
                **value,
                "template": Path(value["template"]),
                "data": tuple(value["data"]),
                "output": value["output"] and Path(value["output"]),
                "max_failures": MaxFailures.parse(value["max_failures"]),
                "keep": tuple(value["keep"]),
                "save": tuple(value["save"]),
            }
        )


NOT_IDENTITY: Final = frozenset(
    {"template", "output", "dtype", "kv_tokens", "max_batch_tokens", "reserve", "time_limit_s", "max_failures"}
)
"""Options that change how or where a job runs and nothing of what it computes. (``template`` counts by its content.)"""


def parse_pairs(option: str, pairs: Iterable[str]) -> dict[str, str]:
    """``["k=v", ...]`` as a dict.

    Raises:
        SglbatchError: ``bad-option`` for one without "=", or a name given twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise SglbatchError(
                "bad-option", f"{option} takes name=value, not {pair!r}", hint=f"for example {option} name=value"
            )
        if name.strip() in found:
            raise SglbatchError(
                "bad-option",
                f"{option} names {name.strip()!r} twice",
                hint=f"leave one {option} {name.strip()}=... out",
            )
        found[name.strip()] = value
    return found


def parse_list(text: str) -> tuple[str, ...]:
    """``a,b`` as its names; () for ""."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def default_output(template: Path, data: tuple[str, ...]) -> Path:
    """``<data>.<template>.parquet`` beside the data.

    Raises:
        SglbatchError: ``output-needed`` when the data is not one local file.
    """
    if len(data) != 1 or data[0] == "-" or "://" in data[0] or any(c in data[0] for c in "*?["):
        raise SglbatchError(
            "output-needed",
            "the output's name can only be made up for a single local data file",
            hint="add -o results.parquet",
        )
    path = Path(data[0])
    stem = Path(path.stem).stem if path.suffix in _COMPRESSIONS else path.stem
    return path.with_name(f"{stem}.{template.stem}{_DEFAULT_SUFFIX}")


def _absolute(path: str) -> str:
    return path if path == "-" or "://" in path else str(Path(path).absolute())


def _one_of(option: str, values: Iterable[str], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise SglbatchError("bad-option", f"{option} knows no {value!r}", hint=f"choose from: {', '.join(allowed)}")


def _at_least(option: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise SglbatchError(
            "bad-option", f"{option} must be at least {least:g}, not {value:g}", hint=f"give {option} {least:g} or more"
        )
