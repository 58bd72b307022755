"""The command line: options in, one call of ``job.commands`` out. No logic here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglbatch.version import __version__

app = typer.Typer(
    name="sglbatch",
    help="Runs a language-model program over a data set, planned as one prefix tree. "
    "Templates are code: `plan` and `run` execute them.",
    no_args_is_help=True,
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
OutOpt = Annotated[
    Path | None, typer.Option("--output", "-o", help=".parquet or .jsonl; default <data>.<template>.parquet.")
]
LimitOpt = Annotated[int | None, typer.Option("--limit", help="Only the first N rows.")]
ParamOpt = Annotated[list[str] | None, typer.Option("--param", help="NAME=VALUE: a constant of the template.")]
MapOpt = Annotated[list[str] | None, typer.Option("--map", help="PARAM=COLUMN: which column a parameter reads.")]
ProgramOpt = Annotated[str | None, typer.Option("--program", help="Which @function, when the file has several.")]
IdOpt = Annotated[str | None, typer.Option("--id", help="Column that names the rows; default: their content.")]
TemperatureOpt = Annotated[float | None, typer.Option("--temperature", help="For calls that set none.")]
MaxTokensOpt = Annotated[int | None, typer.Option("--max-tokens", help="For calls that set none.")]
SeedOpt = Annotated[int, typer.Option("--seed", help="Of all random numbers.")]
KeepOpt = Annotated[str, typer.Option("--keep", help="Input columns to carry over: all, or a,b,c.")]
KeepPrefixOpt = Annotated[str, typer.Option("--keep-prefix", help="Put before the names of kept columns.")]
SaveOpt = Annotated[str, typer.Option("--save", help="More output columns: transcript.")]
FailuresOpt = Annotated[str, typer.Option("--max-failures", help="Failed rows that still exit 0: N or P%.")]
SpecialOpt = Annotated[bool, typer.Option("--parse-special", help="Let row values make special tokens.")]
KvOpt = Annotated[int | None, typer.Option("--kv-tokens", help="Size of the KV memory in tokens.")]
DeviceOpt = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
DtypeOpt = Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")]
BatchOpt = Annotated[int | None, typer.Option("--max-batch-tokens", help="Tokens of one step.")]
CallsOpt = Annotated[int, typer.Option("--max-calls-per-row", help="A row that wants more calls fails.")]
ReorderOpt = Annotated[str, typer.Option("--reorder", help="Order-free columns that come first: a,b,c.")]
ReserveOpt = Annotated[str, typer.Option("--reserve", help="soft, or full: never pause a request.")]
BaseUrlOpt = Annotated[str | None, typer.Option("--base-url", help="Of an API model: http://HOST:PORT/v1.")]
KeyEnvOpt = Annotated[str | None, typer.Option("--api-key-env", help="Variable with the API key.")]
TokenizerOpt = Annotated[
    str | None, typer.Option("--tokenizer", help="Folder or model whose tokenizer an API model has.")
]
PriceOpt = Annotated[
    str | None, typer.Option("--price", help="Dollars for a million tokens: input=..,output=..[,cached=..].")
]
SchemaOpt = Annotated[
    Path | None, typer.Option("--schema", help="JSON Schema file for the template's last gen, the record.")
]
CompleteOpt = Annotated[
    bool, typer.Option("--complete", help="Where max_tokens gets scarce, end constrained texts the shortest way.")
]
UnenforcedOpt = Annotated[
    bool, typer.Option("--allow-unenforced", help="Only validate afterwards what a schema cannot enforce.")
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Machine-readable, on stdout.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    if version:
        typer.echo(f"sglbatch {__version__}")
        raise typer.Exit


@app.command()
def run(  # noqa: PLR0917 - typer calls it by name
    template: TemplateArg,
    data: DataArg,
    model: ModelOpt,
    output: OutOpt = None,
    limit: LimitOpt = None,
    show: Annotated[
        int | None, typer.Option("--show", help="Print N prompts with their answers; keeps no job.")
    ] = None,
    param: ParamOpt = None,
    map_: MapOpt = None,
    program: ProgramOpt = None,
    id_: IdOpt = None,
    temperature: TemperatureOpt = None,
    max_tokens: MaxTokensOpt = None,
    seed: SeedOpt = 0,
    keep: KeepOpt = "",
    keep_prefix: KeepPrefixOpt = "",
    save: SaveOpt = "",
    max_failures: FailuresOpt = "0",
    restart: Annotated[bool, typer.Option("--restart", help="Start over; the old job is moved aside.")] = False,
    kv_tokens: KvOpt = None,
    device: DeviceOpt = "auto",
    dtype: DtypeOpt = "auto",
    max_batch_tokens: BatchOpt = None,
    reserve: ReserveOpt = "soft",
    parse_special: SpecialOpt = False,
    max_calls_per_row: CallsOpt = 1000,
    reorder: ReorderOpt = "",
    time_limit: Annotated[float | None, typer.Option("--time-limit", help="Stop, resumable, after S seconds.")] = None,
    base_url: BaseUrlOpt = None,
    api_key_env: KeyEnvOpt = None,
    tokenizer: TokenizerOpt = None,
    price: PriceOpt = None,
    max_cost: Annotated[float | None, typer.Option("--max-cost", help="Stop, resumable, before D dollars.")] = None,
    batch_api: Annotated[bool, typer.Option("--batch-api", help="Through the provider's Batch API.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="With --batch-api: submit, and collect at the next run.")
    ] = False,
    concurrency: Annotated[int, typer.Option("--concurrency", help="API calls under way at a time.")] = 32,
    requests_per_min: Annotated[float | None, typer.Option("--requests-per-min", help="API calls a minute.")] = None,
    tokens_per_min: Annotated[float | None, typer.Option("--tokens-per-min", help="API tokens a minute.")] = None,
    request_timeout: Annotated[float, typer.Option("--request-timeout", help="Seconds for one try of a call.")] = 120,
    schema: SchemaOpt = None,
    complete: CompleteOpt = False,
    allow_unenforced: UnenforcedOpt = False,
    json_: JsonOpt = False,
) -> None:
    """Run a program over every row. The same command continues a job that was stopped."""
    from sglbatch.job import commands
    from sglbatch.job.config import MaxFailures, RunConfig, parse_list, parse_pairs, read_schema

    config = RunConfig(
        template=template,
        data=tuple(data),
        model=model,
        output=output,
        limit=limit,
        params=parse_pairs("--param", param or ()),
        mapping=parse_pairs("--map", map_ or ()),
        program=program,
        id_column=id_,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        keep=parse_list(keep),
        keep_prefix=keep_prefix,
        save=parse_list(save),
        parse_special=parse_special,
        max_calls_per_row=max_calls_per_row,
        reorder=parse_list(reorder),
        max_failures=MaxFailures.parse(max_failures),
        device=device,
        dtype=dtype,
        kv_tokens=kv_tokens,
        max_batch_tokens=max_batch_tokens,
        reserve=reserve,
        schema=read_schema(schema) if schema else None,
        complete=complete,
        allow_unenforced=allow_unenforced,
        time_limit_s=time_limit,
        base_url=base_url,
        api_key_env=api_key_env,
        tokenizer=tokenizer,
        concurrency=concurrency,
        requests_per_min=requests_per_min,
        tokens_per_min=tokens_per_min,
        request_timeout_s=request_timeout,
        price=price,
        max_cost=max_cost,
        batch_api=batch_api,
        detach=detach,
    )
    if show is not None:
        raise typer.Exit(commands.show(config, count=show))
    raise typer.Exit(commands.run(config, restart=restart, as_json=json_))


@app.command()
def plan(  # noqa: PLR0917 - typer calls it by name
    template: TemplateArg,
    data: DataArg,
    model: ModelOpt,
    output: OutOpt = None,
    limit: LimitOpt = None,
    param: ParamOpt = None,
    map_: MapOpt = None,
    program: ProgramOpt = None,
    id_: IdOpt = None,
    temperature: TemperatureOpt = None,
    max_tokens: MaxTokensOpt = None,
    seed: SeedOpt = 0,
    parse_special: SpecialOpt = False,
    max_calls_per_row: CallsOpt = 1000,
    reorder: ReorderOpt = "",
    schema: SchemaOpt = None,
    complete: CompleteOpt = False,
    allow_unenforced: UnenforcedOpt = False,
    graph: Annotated[str | None, typer.Option("--graph", help="Print the program's graph: text, dot or json.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the plan to this .npz file.")] = None,
    base_url: BaseUrlOpt = None,
    api_key_env: KeyEnvOpt = None,
    tokenizer: TokenizerOpt = None,
    price: PriceOpt = None,
    json_: JsonOpt = False,
) -> None:
    """Show what a run would compute and share, and what an existing job has answered. Loads no model."""
    from sglbatch.job import commands
    from sglbatch.job.config import RunConfig, parse_list, parse_pairs, read_schema

    config = RunConfig(
        template=template,
        data=tuple(data),
        model=model,
        output=output,
        limit=limit,
        params=parse_pairs("--param", param or ()),
        mapping=parse_pairs("--map", map_ or ()),
        program=program,
        id_column=id_,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        parse_special=parse_special,
        max_calls_per_row=max_calls_per_row,
        reorder=parse_list(reorder),
        schema=read_schema(schema) if schema else None,
        complete=complete,
        allow_unenforced=allow_unenforced,
        base_url=base_url,
        api_key_env=api_key_env,
        tokenizer=tokenizer,
        price=price,
    )
    raise typer.Exit(commands.plan(config, save=save, as_json=json_, graph=graph))


@app.command("run-batch")
def run_batch(  # noqa: PLR0917 - typer calls it by name
    requests: Annotated[Path, typer.Argument(help="An input file of OpenAI's Batch API.", show_default=False)],
    model: ModelOpt,
    output: Annotated[Path, typer.Option("--output", "-o", help="The answers, in its output format.")],
    limit: LimitOpt = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="For requests that set none: 1024.")] = None,
    seed: SeedOpt = 0,
    max_failures: FailuresOpt = "0",
    restart: Annotated[bool, typer.Option("--restart", help="Start over; the old job is moved aside.")] = False,
    kv_tokens: KvOpt = None,
    device: DeviceOpt = "auto",
    dtype: DtypeOpt = "auto",
    time_limit: Annotated[float | None, typer.Option("--time-limit", help="Stop, resumable, after S seconds.")] = None,
) -> None:
    """Answer a Batch API file with a local model. The same command continues a run that was stopped."""
    from sglbatch.job import commands
    from sglbatch.job.config import MaxFailures, RunConfig

    config = RunConfig(
        template=requests,
        data=(str(requests),),
        model=model,
        output=output,
        limit=limit,
        max_tokens=max_tokens,
        seed=seed,
        max_failures=MaxFailures.parse(max_failures),
        kv_tokens=kv_tokens,
        device=device,
        dtype=dtype,
        time_limit_s=time_limit,
    )
    raise typer.Exit(commands.run_batch(config, restart=restart))


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
def retry_failed(
    output: OutputArg,
    max_failures: Annotated[str | None, typer.Option("--max-failures", help="As for run; default: as before.")] = None,
    json_: JsonOpt = False,
) -> None:
    """Run the failed rows of a finished job again, with the options it was run with."""
    from sglbatch.job import commands

    raise typer.Exit(commands.retry_failed(output, max_failures=max_failures, as_json=json_))


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

    guarded(app)
