"""Everything that is checked before weights are loaded: template, data, columns, output, model, tokenizer."""

from __future__ import annotations

import glob
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from sglbatch.api_spec import ApiDialect, ApiModel, resolve_api_model
from sglbatch.api_spec.model import is_api_model
from sglbatch.api_spec.tokens import counter_for
from sglbatch.data import Row, Rows, check_writable, open_rows
from sglbatch.engine.automaton_cache import AutomatonCache
from sglbatch.engine.fsm import Compiler
from sglbatch.errors import SglbatchError
from sglbatch.job.config import RunConfig
from sglbatch.job.manifest import Manifest
from sglbatch.job.shards import Piece, SavedPlan, Shard
from sglbatch.job.writing import kept_columns
from sglbatch.lang.calls import CallMemo
from sglbatch.lang.dialect import Dialect, TokenDialect
from sglbatch.lang.driver import Driver
from sglbatch.lang.environment import Environment
from sglbatch.lang.guard import Guard
from sglbatch.lang.program import Program
from sglbatch.lang.row_program import RowKey, RowProgram, made
from sglbatch.lang.sampling import SamplingOverride
from sglbatch.lang.schemas import Record
from sglbatch.lang.scripts import Scripts
from sglbatch.lang.template import Binding, Template
from sglbatch.lang.template_file import load_template
from sglbatch.models import LocalModel, resolve_model
from sglbatch.planner.foresight import spread
from sglbatch.planner.made_up import VARIANTS, MadeUpAnswers
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import ErrorInfo


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job that can start.

    Args:
        inputs: the data with all its columns, for the kept ones.
        rows: the same rows with only the columns that the program and the row keys read.
        tokenizer: None where an API model's is not known.
        record: the schema of ``--schema`` for the template's last gen.
        compiler: of the constraints that are looked at before the engine is loaded.
        piece: where the job is a piece of another one; ``inputs`` and ``rows`` are its own rows then.
    """

    config: RunConfig
    template: Template
    binding: Binding
    inputs: Rows
    rows: Rows
    model: LocalModel | ApiModel
    tokenizer: Tokenizer | None
    record: Record | None = None
    compiler: Compiler = field(default_factory=lambda: Compiler(AutomatonCache()))
    piece: Piece | None = None

    def manifest(self) -> Manifest:
        """Of a run that is about to start."""
        now = time.time()
        return Manifest(
            config=self.config,
            template_hash=self.template.source_hash,
            model_identity=self.model.identity,
            data=self.inputs.identity,
            num_rows=len(self.rows),
            created=now,
            updated=now,
            piece=None if self.piece is None else self.piece.to_json(),
        )

    def keyed_rows(self) -> Iterator[tuple[Row, RowKey | None]]:
        """The rows, with their keys where these depend on rows that are not here."""
        for row in self.rows:
            yield row, None if self.piece is None else self.piece.key(row, self.binding)

    @property
    def dialect(self) -> Dialect:
        if isinstance(self.model, ApiModel):
            return ApiDialect(self.model, counter_for(self.tokenizer, self.model.family))
        assert self.tokenizer is not None
        return TokenDialect(self.tokenizer, context_len=self.model.context_len)

    def driver(self, *, memo: CallMemo | None = None, max_outside_calls: int = 8) -> Driver:
        """A driver for the job's programs, its backend still to come. ``max_outside_calls`` 0 makes none."""
        return Driver(
            dialect=self.dialect,
            model_identity=self.model.identity,
            context_len=self.model.context_len,
            memo=memo,
            seed=self.config.seed,
            parse_special=self.config.parse_special,
            max_outside_calls=max_outside_calls,
            max_calls_per_row=self.config.max_calls_per_row,
            reorder=self.config.reorder,
        )

    @cached_property
    def environment(self) -> Environment:
        """What the job's programs share; the same as their driver's."""
        config = self.config
        environment = self.dialect.environment(
            seed=config.seed, parse_special=config.parse_special, max_calls=config.max_calls_per_row
        )
        return replace(environment, reorder=config.reorder)

    @cached_property
    def scripts(self) -> Scripts:
        """What is known of the program from its trace, held to the function itself on rows spread over the data."""
        function, environment = self.template.function, self.environment
        guard = Guard.of_template(function.strings(), environment)
        scripts = Scripts(function, self._function_of, environment=environment, guard=guard)
        found = (self.arguments(index) for index in spread(len(self.rows)))
        answers = [MadeUpAnswers(variant, self.compiler) for variant in range(VARIANTS)]
        scripts.learn([arguments for arguments in found if arguments is not None], answers)
        return scripts

    def arguments(self, index: int) -> Mapping[str, Any] | None:
        """A row's arguments; None where it cannot run."""
        values = self.rows.get(index).values
        if values is None:
            return None
        arguments = self.binding.arguments(values)
        return arguments if self.binding.null_error(arguments) is None else None

    def program(self, values: dict[str, Any], *, program_id: int, row_key: RowKey) -> RowProgram:
        """The program of one row; a row with an unexpected null ends with that error at once."""
        arguments = self.binding.arguments(values)
        error = self.binding.null_error(arguments)
        if error is None:
            return self.scripts.program(arguments, program_id, row_key)
        return self._function_of(arguments, program_id, made(row_key), error)

    def _function_of(
        self, arguments: Mapping[str, Any], program_id: int, row_key: str, error: ErrorInfo | None = None
    ) -> Program:
        """The program of one row that runs the function."""
        return Program(
            self.template.function,
            arguments,
            program_id=program_id,
            row_key=row_key,
            forced=self._forced,
            record=self.record,
            error=error,
        )

    @cached_property
    def _forced(self) -> SamplingOverride:
        """What the command line says of all gens."""
        config = self.config
        return SamplingOverride(
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            complete=config.complete or None,
            allow_unenforced=config.allow_unenforced or None,
            choice_decoding=None if config.choice_decoding == "exact" else config.choice_decoding,
            return_logprob="logprobs" in config.save or None,
        )


@contextmanager
def prepared(config: RunConfig, *, tell: Any) -> Iterator[Prepared]:
    """Opens the data and checks what can be checked; closes the data on leaving.

    Args:
        tell: is given a line at a time what takes long.

    Raises:
        SglbatchError: whatever is wrong with the options, the template, the data or the model.
    """
    template = load_template(config.template, program=config.program, params=config.params)
    if config.output is not None:
        check_output(config.output, config)
    if config.shard is not None and config.keep and "-" in config.data:
        raise SglbatchError(
            "bad-option",
            "--keep cannot have columns of standard input here: `merge`, which writes them, cannot read it again",
            hint="put the data into a file, or leave --keep out",
        )
    with open_rows(config.data, limit=config.limit) as inputs:
        columns = inputs.columns
        if not columns:
            raise _nothing_readable(inputs)
        binding = template.bind(columns, config.mapping)
        kept_columns(config, columns)
        if config.id_column is not None and config.id_column not in columns:
            raise SglbatchError(
                "unknown-column",
                f"--id names no column {config.id_column!r}",
                hint=f"choose from: {', '.join(columns)}",
            )
        model, tokenizer = _model_of(config, tell)
        used = {*binding.sources.values(), *([config.id_column] if config.id_column else [])}
        whole = Prepared(
            config=config,
            template=template,
            binding=binding,
            inputs=inputs,
            rows=inputs.use(used),
            model=model,
            tokenizer=tokenizer,
            record=None if config.schema is None else template.record(config.schema),
        )
        yield whole if config.shard is None else _piece_of(whole, Shard.parse(config.shard))


def _piece_of(whole: Prepared, shard: Shard) -> Prepared:
    path = whole.config.plan
    assert path is not None
    piece = SavedPlan.load(path).piece(shard, whole.manifest(), where=path)
    indices = piece.rows.tolist()
    return replace(whole, piece=piece, inputs=whole.inputs.select(indices), rows=whole.rows.select(indices))


_OF_API_MODELS: Final = (
    *("base_url", "api_key_env", "tokenizer", "price", "max_cost", "batch_api"),
    *("requests_per_min", "tokens_per_min"),
)


def _model_of(config: RunConfig, tell: Any) -> tuple[LocalModel | ApiModel, Tokenizer | None]:
    if is_api_model(config.model):
        api = resolve_api_model(config.model, base_url=config.base_url, key_env=config.api_key_env)
        return api, None if config.tokenizer is None else _tokenizer_of(config.tokenizer, tell)
    for option in _OF_API_MODELS:
        value = getattr(config, option)
        if value is not None and value is not False:
            raise SglbatchError(
                "bad-option",
                f"--{option.replace('_', '-')} goes with an API model only, and {config.model} is none",
                hint="--model openai/NAME names an API model",
            )
    model = resolve_model(config.model, report=tell)
    return model, Tokenizer.load(model.path)


def _tokenizer_of(name: str, tell: Any) -> Tokenizer:
    """A folder with a tokenizer.json, or that of a local model by name."""
    folder = Path(name).expanduser()
    return Tokenizer.load(folder if folder.is_dir() else resolve_model(name, report=tell).path)


def _nothing_readable(inputs: Rows) -> SglbatchError:
    """Without a column there is no row with values: the first row's own error says most."""
    first = inputs.get(0)
    reason = first.error.message if first.error is not None else "it has no column"
    return SglbatchError(
        "unreadable-data",
        f"no row of the data can be read; the first: {reason}",
        where=first.where,
        hint="check the file's format: JSONL is one JSON object a line, CSV has a header line",
    )


def check_output(output: Path, config: RunConfig) -> None:
    """Raises SglbatchError: as ``check_writable``, ``check_no_input``."""
    check_writable(output)
    check_no_input(output, config)


def check_no_input(output: Path, config: RunConfig, *, hint: str = "choose another output with -o") -> None:
    """Raises SglbatchError: ``output-is-input``."""
    if not output.exists():
        return
    for source in (str(config.template), *config.data):
        found = [source] if Path(source).exists() else glob.glob(source, recursive=True)
        if any(output.samefile(path) for path in found):
            raise SglbatchError(
                "output-is-input",
                "the output would overwrite this input",
                where=str(output),
                hint=hint,
            )
