"""What a run was asked to do, as one value that the manifest can keep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Final

from sglbatch.errors import EXIT_DONE, EXIT_FAILED_ROWS, SglbatchError
from sglbatch.json_places import check_finite
from sglbatch.lang.sampling import CHOICE_DECODING

SAVEABLE: Final = ("transcript", "logprobs")
RESERVE: Final = ("soft", "full")
DTYPES: Final = ("auto", "float32", "bfloat16")
DEVICES: Final = ("auto", "cpu", "cuda")

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

    def exit_code(self, num_failed: int, num_rows: int) -> int:
        """Of a job that has come to its end."""
        return EXIT_DONE if self.allows(num_failed, num_rows) else EXIT_FAILED_ROWS

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
        max_calls_per_row: a row that wants more fails.
        reorder: names of the template's ``any_order`` texts that come first, in this order.
        temperature, max_tokens: defaults for calls that name none; None leaves the template's.
        schema: JSON text of the schema for the template's last gen; schema_file: where it was read, for errors.
        complete: constrained texts end the shortest way where max_tokens gets scarce.
        allow_unenforced: what a schema cannot enforce is only validated, and counted.
        choice_decoding: of ``CHOICE_DECODING``; how a constraint's choice among few texts is decided.
        base_url, api_key_env, tokenizer: an API model's address, the variable with its key, whose tokenizer it has.
        concurrency, requests_per_min, tokens_per_min, request_timeout_s: how hard an API is asked.
        price: an API model's, as ``api_spec.prices.parse_price`` reads it; max_cost: dollars that the job
            may spend, all of its runs together.
        batch_api: an API's calls go in batches; detach: stop once they are submitted.
        shard: which piece of the plan to run, as ``shards.Shard.parse`` reads it; plan: the saved plan's file.
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
    max_calls_per_row: int = 1000
    reorder: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "auto"
    kv_tokens: int | None = None
    max_batch_tokens: int | None = None
    reserve: str = "soft"
    schema: str | None = None
    schema_file: Path | None = None
    complete: bool = False
    allow_unenforced: bool = False
    choice_decoding: str = "exact"
    time_limit_s: float | None = None
    base_url: str | None = None
    api_key_env: str | None = None
    tokenizer: str | None = None
    concurrency: int = 32
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    request_timeout_s: float = 120.0
    price: str | None = None
    max_cost: float | None = None
    batch_api: bool = False
    detach: bool = False
    shard: str | None = None
    plan: Path | None = None

    def __post_init__(self) -> None:
        _one_of("--save", self.save, SAVEABLE)
        _one_of("--reserve", (self.reserve,), RESERVE)
        _one_of("--choice-decoding", (self.choice_decoding,), CHOICE_DECODING)
        _one_of("--device", (self.device,), DEVICES)
        _one_of("--dtype", (self.dtype,), DTYPES)
        _at_least("--limit", self.limit, 1)
        _at_least("--max-tokens", self.max_tokens, 1)
        _at_least("--kv-tokens", self.kv_tokens, 1)
        _at_least("--max-batch-tokens", self.max_batch_tokens, 1)
        _at_least("--temperature", self.temperature, 0)
        _at_least("--max-calls-per-row", self.max_calls_per_row, 1)
        _at_least("--concurrency", self.concurrency, 1)
        _at_least("--requests-per-min", self.requests_per_min, 1)
        _at_least("--tokens-per-min", self.tokens_per_min, 1)
        if self.detach and not self.batch_api:
            raise SglbatchError("bad-option", "--detach goes with --batch-api", hint="add --batch-api")
        if (self.shard is None) != (self.plan is None):
            raise SglbatchError(
                "bad-option",
                "--shard and --plan go together",
                hint="make a plan that all pieces share: sglbatch plan TEMPLATE DATA --model M --save FILE",
            )
        _at_least("--max-cost", self.max_cost, 0)
        _at_least("--request-timeout", self.request_timeout_s, 1)
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
            "schema_file": self.schema_file and str(self.schema_file.absolute()),
            "plan": self.plan and str(self.plan.absolute()),
            "max_failures": str(self.max_failures),
            "keep": list(self.keep),
            "save": list(self.save),
            "reorder": list(self.reorder),
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
                "schema_file": Path(value["schema_file"]) if value.get("schema_file") else None,
                "plan": Path(value["plan"]) if value.get("plan") else None,
                "max_failures": MaxFailures.parse(value["max_failures"]),
                "keep": tuple(value["keep"]),
                "save": tuple(value["save"]),
                "reorder": tuple(value.get("reorder", ())),
            }
        )


NOT_IDENTITY: Final = frozenset(
    {
        "template",
        "output",
        "schema_file",
        "device",
        "dtype",
        "kv_tokens",
        "max_batch_tokens",
        "reserve",
        "time_limit_s",
        "max_failures",
        "base_url",
        "api_key_env",
        "tokenizer",
        "concurrency",
        "requests_per_min",
        "tokens_per_min",
        "request_timeout_s",
        "price",
        "max_cost",
        "batch_api",
        "detach",
        "allow_unenforced",
        "shard",
        "plan",
    }
)
"""Options that change how or where a job runs and nothing of what it computes. (``template`` counts by its
content, as ``schema_file`` does, ``base_url`` by the model's identity, ``shard`` and ``plan`` by the manifest's
piece.)"""

MAY_MEND: Final = NOT_IDENTITY - {
    "template",
    "output",
    "schema_file",
    "time_limit_s",
    "max_failures",
    "price",
    "max_cost",
    "batch_api",
    "detach",
    "shard",
    "plan",
}
"""Those of them under which a row that failed may succeed."""


def config_of(**options: Any) -> RunConfig:
    """From the command line's values, by field; those that are lists or have a syntax of their own as they were given.

    Raises:
        SglbatchError: ``bad-option``; as ``read_schema``.
    """
    readers: dict[str, Callable[[Any], Any]] = {
        "data": tuple,
        "params": lambda pairs: parse_pairs("--param", pairs or ()),
        "mapping": lambda pairs: parse_pairs("--map", pairs or ()),
        **dict.fromkeys(("keep", "save", "reorder"), parse_list),
        "max_failures": MaxFailures.parse,
        "schema": lambda path: read_schema(path) if path else None,
    }
    values = {name: readers[name](value) if name in readers else value for name, value in options.items()}
    return RunConfig(**values, schema_file=options.get("schema"))


def read_schema(path: Path) -> str:
    """The text of a schema file, the order of its properties kept.

    Raises:
        SglbatchError: ``cannot-read``, ``invalid-schema``.
    """
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise SglbatchError("cannot-read", f"the file cannot be read: {error}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise SglbatchError(
            "invalid-schema", f"this is no JSON: {error}", where=str(path), hint="give a JSON Schema as a JSON object"
        ) from error
    if not isinstance(schema, dict | bool):
        raise SglbatchError(
            "invalid-schema",
            "this is JSON but no schema, which is an object, true or false",
            where=str(path),
            hint="give a JSON Schema as a JSON object",
        )
    check_finite(schema, where=str(path))
    return json.dumps(schema, ensure_ascii=False)


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
    path = Path(data[0]) if len(data) == 1 else Path()
    pattern = any(c in data[0] for c in "*?[") and not path.exists()
    if not path.name or data[0] == "-" or "://" in data[0] or pattern:
        raise SglbatchError(
            "output-needed",
            "the output's name can only be made up for a single local data file",
            hint="add -o results.parquet",
        )
    stem = Path(path.stem).stem if path.suffix in _COMPRESSIONS else path.stem
    return path.with_name(f"{stem}.{template.stem}{_DEFAULT_SUFFIX}")


def _absolute(path: str) -> str:
    return path if path == "-" or "://" in path else str(Path(path).absolute())


def _one_of(option: str, values: Iterable[str], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise SglbatchError("bad-option", f"{option} knows no {value!r}", hint=f"choose from: {', '.join(allowed)}")


def _at_least(option: str, value: float | None, least: float) -> None:
    if value is not None and not (value >= least and isfinite(value)):
        raise SglbatchError(
            "bad-option",
            f"{option} must be {'finite' if value > least else f'at least {least:g}'}, not {value:g}",
            hint=f"give {option} {least:g} or more",
        )
