"""The command line: options in, one call of ``job.commands`` out. No logic here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from sglbatch.errors import EXIT_USAGE, SglbatchError
from sglbatch.version import __version__

app = typer.Typer(
    name="sglbatch",
    help="Runs a language-model program over a data set, planned as one prefix tree. "
    "Templates are code: `plan` and `run` execute them.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

TemplateArg = Annotated[Path, typer.Argument(help="The program: a Python file with one @function.", show_default=False)]
DataArg = Annotated[
    list[str],
    typer.Argument(help="JSONL, Parquet or CSV (.gz, .zst); globs; - reads JSONL from stdin.", show_default=False),
]
OutputArg = Annotated[Path, typer.Argument(metavar="OUT", help="The output of an earlier run.", show_default=False)]
ModelOpt = Annotated[
    str, typer.Option("--model", "-m", help="Built-in name, folder, GGUF file or hub id.", show_default=False)
]
RestartOpt = Annotated[bool, typer.Option("--restart", help="Start over; the old job is moved aside.")]
UnenforcedOpt = Annotated[
    bool, typer.Option("--allow-unenforced", help="Only validate afterwards what a schema cannot enforce.")
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Machine-readable, on stdout.")]


# --- options that several commands share -------------------------------------------------------


def _shared(  # noqa: PLR0917 - a table, never called
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=".parquet or .jsonl; default <data>.<template>.parquet.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first N rows.")] = None,
    params: Annotated[list[str] | None, typer.Option("--param", help="NAME=VALUE: a constant of the template.")] = None,
    mapping: Annotated[
        list[str] | None, typer.Option("--map", help="PARAM=COLUMN: which column a parameter reads.")
    ] = None,
    program: Annotated[
        str | None, typer.Option("--program", help="Which @function, when the file has several.")
    ] = None,
    id_column: Annotated[
        str | None, typer.Option("--id", help="Column that names the rows; default: their content.")
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="For calls that set none.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="For calls that set none.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of all random numbers.")] = 0,
    keep: Annotated[str, typer.Option("--keep", help="Input columns to carry over: all, or a,b,c.")] = "",
    keep_prefix: Annotated[str, typer.Option("--keep-prefix", help="Put before the names of kept columns.")] = "",
    save: Annotated[str, typer.Option("--save", help="More output columns: transcript,logprobs.")] = "",
    max_failures: Annotated[str, typer.Option("--max-failures", help="Failed rows that still exit 0: N or P%.")] = "0",
    kv_tokens: Annotated[int | None, typer.Option("--kv-tokens", help="Size of the KV memory in tokens.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto (bfloat16 on a GPU, float32 on a CPU), float32 or bfloat16.")
    ] = "auto",
    max_batch_tokens: Annotated[int | None, typer.Option("--max-batch-tokens", help="Tokens of one step.")] = None,
    reserve: Annotated[str, typer.Option("--reserve", help="soft, or full: never pause a request.")] = "soft",
    parse_special: Annotated[bool, typer.Option("--parse-special", help="Let row values make special tokens.")] = False,
    max_calls_per_row: Annotated[
        int, typer.Option("--max-calls-per-row", help="A row that wants more calls fails.")
    ] = 1000,
    reorder: Annotated[str, typer.Option("--reorder", help="Order-free columns that come first: a,b,c.")] = "",
    time_limit_s: Annotated[
        float | None, typer.Option("--time-limit", help="Stop, resumable, after S seconds.")
    ] = None,
    base_url: Annotated[str | None, typer.Option("--base-url", help="Of an API model: http://HOST:PORT/v1.")] = None,
    api_key_env: Annotated[str | None, typer.Option("--api-key-env", help="Variable with the API key.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Folder or model whose tokenizer an API model has.")
    ] = None,
    price: Annotated[
        str | None, typer.Option("--price", help="Dollars for a million tokens: input=..,output=..[,cached=..].")
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option("--max-cost", help="Stop, resumable, before all runs of the job cost D dollars.")
    ] = None,
    batch_api: Annotated[bool, typer.Option("--batch-api", help="Through the provider's Batch API.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="With --batch-api: submit, and collect at the next run.")
    ] = False,
    concurrency: Annotated[int, typer.Option("--concurrency", help="API calls under way at a time.")] = 32,
    requests_per_min: Annotated[float | None, typer.Option("--requests-per-min", help="API calls a minute.")] = None,
    tokens_per_min: Annotated[float | None, typer.Option("--tokens-per-min", help="API tokens a minute.")] = None,
    request_timeout_s: Annotated[float, typer.Option("--request-timeout", help="Seconds for one try of a call.")] = 120,
    schema: Annotated[
        Path | None, typer.Option("--schema", help="JSON Schema file for the template's last gen, the record.")
    ] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Where max_tokens gets scarce, end constrained texts the shortest way.")
    ] = False,
    allow_unenforced: UnenforcedOpt = False,
    choice_decoding: Annotated[
        str, typer.Option("--choice-decoding", help="Enums and booleans in constraints: exact (whole texts) or token.")
    ] = "exact",
) -> None:
    """Each by the field of ``RunConfig`` that it sets."""


TABLE: Final = {
    parameter.name: parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY)
    for parameter, annotation in zip(
        inspect.signature(_shared).parameters.values(),
        get_type_hints(_shared, include_extras=True).values(),
        strict=False,
    )
}
PROGRAM: Final = (
    *("output", "limit", "params", "mapping", "program", "id_column", "temperature", "max_tokens", "seed"),
    *("parse_special", "max_calls_per_row", "reorder", "schema", "complete", "allow_unenforced", "choice_decoding"),
    *("base_url", "api_key_env", "tokenizer", "price", "batch_api"),
)
"""What decides which calls there are, and what they cost."""
MENDING: Final = (
    *("kv_tokens", "device", "dtype", "max_batch_tokens", "reserve", "allow_unenforced", "base_url", "api_key_env"),
    *("tokenizer", "concurrency", "requests_per_min", "tokens_per_min", "request_timeout_s"),
)
"""What may differ when failed rows are tried again: ``job.config.MAY_MEND``."""


def takes(*names: str, unset: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds shared options to a command, which gets them in its ``**options``.

    Args:
        unset: what is not given is None, whatever its default.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [TABLE[name].replace(default=None) if unset else TABLE[name] for name in names]
        command.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        return command

    return decorate


# --- commands ----------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    if version:
        typer.echo(f"sglbatch {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(EXIT_USAGE)


@app.command()
@takes(*TABLE)
def run(
    *,
    template: TemplateArg,
    data: DataArg,
    model: ModelOpt,
    show: Annotated[
        int | None, typer.Option("--show", help="Print N prompts with their answers; keeps no job.")
    ] = None,
    restart: RestartOpt = False,
    shard: Annotated[str | None, typer.Option("--shard", help="I/N: only piece I of N of a saved plan.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="What `plan --save` has written.")] = None,
    json_: JsonOpt = False,
    **options: Any,
) -> None:
    """Run a program over every row. The same command continues a job that was stopped."""
    from sglbatch.job import commands
    from sglbatch.job.config import config_of

    config = config_of(template=template, data=data, model=model, shard=shard, plan=plan, **options)
    if show is not None:
        raise typer.Exit(commands.show(config, count=show))
    raise typer.Exit(commands.run(config, restart=restart, as_json=json_))


@app.command()
@takes(*PROGRAM)
def plan(
    *,
    template: TemplateArg,
    data: DataArg,
    model: ModelOpt,
    graph: Annotated[str | None, typer.Option("--graph", help="Print the program's graph: text, dot or json.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the plan to this .npz file.")] = None,
    json_: JsonOpt = False,
    **options: Any,
) -> None:
    """Show what a run would compute and share, and what an existing job has answered. Loads no model."""
    from sglbatch.job import commands
    from sglbatch.job.config import config_of

    config = config_of(template=template, data=data, model=model, **options)
    raise typer.Exit(commands.plan(config, save=save, as_json=json_, graph=graph))


@app.command("run-batch")
@takes("limit", "seed", "max_failures", "kv_tokens", "device", "dtype", "time_limit_s")
def run_batch(
    requests: Annotated[Path, typer.Argument(help="An input file of OpenAI's Batch API.", show_default=False)],
    model: ModelOpt,
    output: Annotated[Path, typer.Option("--output", "-o", help="The answers, in its output format.")],
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="For requests that set none: 1024.")] = None,
    restart: RestartOpt = False,
    **options: Any,
) -> None:
    """Answer a Batch API file with a local model. The same command continues a run that was stopped."""
    from sglbatch.job import commands
    from sglbatch.job.config import config_of

    data = [str(requests)]
    config = config_of(template=requests, data=data, model=model, output=output, max_tokens=max_tokens, **options)
    raise typer.Exit(commands.run_batch(config, restart=restart))


@app.command()
def merge(output: OutputArg, restart: RestartOpt = False, json_: JsonOpt = False) -> None:
    """Make one output of all pieces that ran with --shard, once they are finished."""
    from sglbatch.job import commands

    raise typer.Exit(commands.merge(output, restart=restart, as_json=json_))


@app.command()
def status(output: OutputArg, json_: JsonOpt = False) -> None:
    """How far a job is; works while it runs."""
    from sglbatch.job import commands

    raise typer.Exit(commands.status(output, as_json=json_))


@app.command()
def export(
    output: OutputArg,
    target: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write: .parquet or .jsonl.", show_default=False)
    ],
) -> None:
    """Write the rows finished so far to another file; works while the job runs."""
    from sglbatch.job import commands

    raise typer.Exit(commands.export(output, target=target))


@app.command("retry-failed")
@takes(*MENDING, unset=True)
def retry_failed(
    output: OutputArg,
    max_failures: Annotated[str | None, typer.Option("--max-failures", help="As for run; default: as before.")] = None,
    json_: JsonOpt = False,
    **options: Any,
) -> None:
    """Run the failed rows of a finished job again. What is not given here is as it was when the job was run."""
    from sglbatch.job import commands

    changed = {name: value for name, value in options.items() if value is not None}
    raise typer.Exit(commands.retry_failed(output, changed=changed, max_failures=max_failures, as_json=json_))


@app.command()
def report(output: OutputArg, json_: JsonOpt = False) -> None:
    """What the latest run of a job did."""
    from sglbatch.job import commands

    raise typer.Exit(commands.report(output, as_json=json_))


@app.command()
def init(name: Annotated[str, typer.Argument(help="A shipped template.", show_default=False)]) -> None:
    """Copy a shipped template and its sample data into the current folder."""
    from sglbatch.job import shipped

    raise typer.Exit(shipped.init(name, Path.cwd()))


@app.command()
def check(
    schema: Annotated[Path, typer.Argument(help="A JSON Schema.", show_default=False)],
    instances: Annotated[Path | None, typer.Argument(help="JSON values, one a line.", show_default=False)] = None,
    compact: Annotated[bool, typer.Option("--compact", help="Values are written without blanks.")] = False,
    allow_unenforced: UnenforcedOpt = False,
    json_: JsonOpt = False,
) -> None:
    """Whether a schema can be enforced while generating, and which values it accepts."""
    from sglbatch.job.check import check

    raise typer.Exit(check(schema, instances, compact=compact, allow_unenforced=allow_unenforced, as_json=json_))


@app.command()
def models() -> None:
    """The model names, what they stand for and what is cached."""
    from sglbatch.job import commands

    raise typer.Exit(commands.models())


@app.command()
def doctor() -> None:
    """What this machine has for running models, and what a run would use."""
    from sglbatch.job import commands

    raise typer.Exit(commands.doctor())


def main() -> None:
    """The console script: exit codes and error texts for everything that can happen."""
    from sglbatch.job.exits import guarded

    guarded(_run_app)


_UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]
"""What every mistake in options is; typer names only this one kind of it."""


def _run_app() -> int:
    """The exit status.

    Raises:
        SglbatchError: ``usage``.
        BrokenPipeError: typer would make any, also one of a network's, a silent exit 1 and put wrappers around streams.
    """
    streams = sys.stdout, sys.stderr
    try:
        code: int | None = app(standalone_mode=False)
    except SystemExit as ended:
        sys.stdout, sys.stderr = streams
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        raise
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        raise SglbatchError(
            "usage",
            error.format_message(),  # type: ignore[attr-defined]
            hint=f"`{context.command_path if context else 'sglbatch'} --help` lists what it takes",
        ) from error
    return code or 0
