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
DtypeOpt = Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")]
BatchOpt = Annotated[int | None, typer.Option("--max-batch-tokens", help="Tokens of one step.")]
ReserveOpt = Annotated[str, typer.Option("--reserve", help="soft, or full: never pause a request.")]
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
    dtype: DtypeOpt = "auto",
    max_batch_tokens: BatchOpt = None,
    reserve: ReserveOpt = "soft",
    parse_special: SpecialOpt = False,
    time_limit: Annotated[float | None, typer.Option("--time-limit", help="Stop, resumable, after S seconds.")] = None,
    json_: JsonOpt = False,
) -> None:
    """Run a program over every row. The same command continues a job that was stopped."""
    from sglbatch.job import commands
    from sglbatch.job.config import MaxFailures, RunConfig, parse_list, parse_pairs

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
        max_failures=MaxFailures.parse(max_failures),
        dtype=dtype,
        kv_tokens=kv_tokens,
        max_batch_tokens=max_batch_tokens,
        reserve=reserve,
        time_limit_s=time_limit,
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
    save: Annotated[Path | None, typer.Option("--save", help="Write the plan to this .npz file.")] = None,
    json_: JsonOpt = False,
) -> None:
    """Show what a run would compute and share, and what an existing job has answered. Loads no model."""
    from sglbatch.job import commands
    from sglbatch.job.config import RunConfig, parse_pairs

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
    )
    raise typer.Exit(commands.plan(config, save=save, as_json=json_))


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
def models() -> None:
    """The model names, what they stand for and what is cached."""
    from sglbatch.job import commands

    raise typer.Exit(commands.models())


def main() -> None:
    """The console script: exit codes and error texts for everything that can happen."""
    from sglbatch.job.exits import guarded

    guarded(app)
