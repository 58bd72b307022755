"""Loading a template file and binding its parameters to the columns of the data."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from sglbatch.errors import SglbatchError
from sglbatch.lang.function import SglFunction
from sglbatch.lang.program import NO_OVERRIDE, Program
from sglbatch.lang.sampling import Sampling, SamplingOverride
from sglbatch.lang.schemas import Record
from sglbatch.types import ErrorInfo

_MINIMAL: Final = """a minimal template:
    import sglbatch as sgl

    @sgl.function
    def answer(s, question):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer"))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a template. ``nullable``: None may arrive (annotated so, or the default is None)."""

    name: str
    required: bool
    default: Any
    nullable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A loaded template.

    Args:
        parameters: what the data must give; those fixed by ``--param`` are left out.
        source_hash: changes with the file and the modules it imports from its own folder.
    """

    name: str
    path: Path
    function: SglFunction
    parameters: tuple[Parameter, ...]
    source_hash: str

    def bind(self, columns: Sequence[str], mapping: Mapping[str, str]) -> Binding:
        """Find a column for every parameter.

        Args:
            mapping: parameter -> column, where they differ (``--map``).

        Raises:
            SglbatchError: ``unknown-parameter``, ``unknown-column``.
        """
        names = [parameter.name for parameter in self.parameters]
        for name, column in mapping.items():
            if name not in names:
                raise _unknown("parameter", name, names, self, "--map {}=" + column)
            if column not in columns:
                raise _unknown("column", column, columns, self, f"--map {name}={{}}")
        sources: dict[str, str] = {}
        for parameter in self.parameters:
            column = mapping.get(parameter.name, parameter.name)
            if column in columns:
                sources[parameter.name] = column
            elif parameter.required:
                raise self._no_column(parameter.name, columns)
        return Binding(template=self, sources=sources)

    def record(self, schema: str) -> Record:
        """The schema for the last gen of the function.

        Raises:
            SglbatchError: ``no-record``, ``invalid-argument``.
        """
        return Record.of(schema, textwrap.dedent(inspect.getsource(self.function.function)))

    def _no_column(self, name: str, columns: Sequence[str]) -> SglbatchError:
        near = _nearest(name, columns)
        listed = ", ".join(columns) or "none"
        return SglbatchError(
            "unknown-column",
            f"the parameter {name!r} has no column in the data, which has: {listed}",
            hint=f"--map {name}={near}" if near else f"--map {name}=COLUMN, or --param {name}=VALUE",
            where=str(self.path),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """A template over data with certain columns. ``sources``: parameter -> column; the others have defaults."""

    template: Template
    sources: Mapping[str, str]

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments a row gives, as its values are; a column the row lacks falls back to the default."""
        required = {parameter.name for parameter in self.template.parameters if parameter.required}
        return {
            name: values.get(column) for name, column in self.sources.items() if column in values or name in required
        }

    def null_error(self, arguments: Mapping[str, Any]) -> ErrorInfo | None:
        """The row's error where null arrives for a parameter that does not expect it."""
        for parameter in self.template.parameters:
            if arguments.get(parameter.name, "") is None and not parameter.nullable:
                column = self.sources[parameter.name]
                return ErrorInfo(
                    code="null-value",
                    message=f"the column {column!r} is null (annotate the parameter as `{parameter.name}: str | None` "
                    "to receive None)",
                )
        return None

    def program(
        self,
        values: Mapping[str, Any],
        *,
        program_id: int,
        row_key: str,
        sampling: Sampling | None = None,
        forced: SamplingOverride = NO_OVERRIDE,
        record: Record | None = None,
    ) -> Program:
        """The program of one row; a row with an unexpected null ends with that error at once."""
        arguments = self.arguments(values)
        return Program(
            self.template.function,
            arguments,
            program_id=program_id,
            row_key=row_key,
            sampling=sampling,
            forced=forced,
            record=record,
            error=self.null_error(arguments),
        )


def load_template(path: Path, *, program: str | None = None, params: Mapping[str, str] | None = None) -> Template:
    """Import a template file and find its program. Templates are code: this runs it.

    Args:
        program: which ``@function``, where there are several.
        params: parameter -> text of a constant, read as JSON where it is JSON.

    Raises:
        SglbatchError: ``template-not-found``, ``template-import``, ``no-function``, ``several-functions``,
            ``unknown-function``, ``unknown-parameter``, ``bad-function``.
    """
    path = path.resolve()
    if not path.is_file():
        raise SglbatchError("template-not-found", "there is no such template", where=str(path))
    module = _import(path)
    found = _choose(_functions(module), program, path)
    files = _local_files(module, path.parent)
    constants = {name: _constant(text) for name, text in (params or {}).items()}
    names = [parameter.name for parameter in found.parameters]
    function = SglFunction(
        found.function,
        defaults=found.defaults,
        bound=found.bound,
        source_files=files,
        num_api_spec_tokens=found.num_api_spec_tokens,
    )
    template = Template(
        name=found.__name__,
        path=path,
        function=function.bind(**{name: value for name, value in constants.items() if name in names}),
        parameters=tuple(_parameter(p) for p in found.parameters if p.name not in constants),
        source_hash=_hash(files, path.parent),
    )
    for name, text in (params or {}).items():
        if name not in names:
            raise _unknown("parameter", name, names, template, "--param {}=" + text)
    return template


def _import(path: Path) -> ModuleType:
    name = f"_sglbatch_template_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SglbatchError("template-import", "a template is a Python file (.py)", where=str(path))
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SglbatchError as error:
        raise SglbatchError(
            error.code, error.message, hint=error.hint, where=error.where or _place(error, path)
        ) from error
    except (Exception, SystemExit) as error:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise SglbatchError(
            "template-import",
            f"the template does not import: {type(error).__name__}: {text}",
            where=_place(error, path),
        ) from error
    return module


def _place(error: BaseException, path: Path) -> str:
    """``file:line`` of the innermost frame in the template's folder."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if Path(frame.f_code.co_filename).parent == path.parent
    ]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else str(path)


def _functions(module: ModuleType) -> dict[str, SglFunction]:
    """The programs that the file itself defines, by name."""
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, SglFunction) and value.function.__module__ == module.__name__
    ]
    return {function.__name__: function for function in own}


def _choose(functions: dict[str, SglFunction], program: str | None, path: Path) -> SglFunction:
    listed = ", ".join(functions)
    if not functions:
        raise SglbatchError("no-function", "the template has no @function", hint=_MINIMAL, where=str(path))
    if program is not None:
        if program not in functions:
            raise SglbatchError(
                "unknown-function",
                f"the template has no @function {program!r}; it has: {listed}",
                hint=f"--program {_nearest(program, list(functions)) or next(iter(functions))}",
                where=str(path),
            )
        return functions[program]
    if len(functions) > 1:
        raise SglbatchError(
            "several-functions",
            f"the template has several @functions: {listed}",
            hint=f"--program {next(iter(functions))}",
            where=str(path),
        )
    return next(iter(functions.values()))


def _parameter(parameter: inspect.Parameter) -> Parameter:
    required = parameter.default is parameter.empty
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return Parameter(
        name=parameter.name,
        required=required,
        default=None if required else parameter.default,
        nullable=(not required and parameter.default is None) or "None" in text or "Optional" in text,
    )


def _constant(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _local_files(module: ModuleType, folder: Path) -> tuple[Path, ...]:
    """The template's file and those of the modules it reaches in its own folder, sorted."""
    files: dict[str, Path] = {}
    todo = [module]
    while todo:
        current = todo.pop()
        file = getattr(current, "__file__", None)
        if file is None or current.__name__ in files or not Path(file).resolve().is_relative_to(folder):
            continue
        files[current.__name__] = Path(file).resolve()
        for value in list(vars(current).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            found = sys.modules.get(name) if isinstance(name, str) else None
            if found is not None:
                todo.append(found)
    return tuple(sorted(file for file in files.values() if file.suffix == ".py"))


def _hash(files: Sequence[Path], folder: Path) -> str:
    digest = blake2b(digest_size=16)
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _nearest(name: str, names: Sequence[str]) -> str | None:
    lowered = {other.lower(): other for other in names}
    close = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.5)
    return lowered[close[0]] if close else None


def _unknown(what: str, name: str, names: Sequence[str], template: Template, flag: str) -> SglbatchError:
    near = _nearest(name, names)
    listed = ", ".join(names) or "none"
    return SglbatchError(
        f"unknown-{what}",
        f"there is no {what} {name!r}; there are: {listed}",
        hint=flag.format(near) if near else None,
        where=str(template.path),
    )
