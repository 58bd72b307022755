"""From a template's file to its program: import it, choose the function, know what its source depends on."""

from __future__ import annotations

import importlib.util
import inspect
import json
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from sglbatch.errors import SglbatchError
from sglbatch.lang.function import SglFunction
from sglbatch.lang.template import Parameter, Template, nearest, unknown_name

_MINIMAL: Final = """a minimal template:
    import sglbatch as sgl

    @sgl.function
    def answer(s, question):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer"))"""


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
        raise SglbatchError(
            "template-not-found",
            "there is no such template",
            hint="check the path; `sglbatch init classify` writes a template to start from",
            where=str(path),
        )
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
            raise unknown_name("parameter", name, names, template, "--param {}=" + text)
    return template


def _import(path: Path) -> ModuleType:
    name = f"_sglbatch_template_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SglbatchError(
            "template-import",
            "a template is a Python file (.py)",
            hint="the template comes first, then the data: sglbatch run TEMPLATE.py DATA",
            where=str(path),
        )
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
            hint=_import_hint(error, path),
            where=_place(error, path),
        ) from error
    return module


def _import_hint(error: BaseException, path: Path) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"install it beside sglbatch, or put {package}.py into the template's folder"
    return f"correct this line; python {shlex.quote(str(path))} shows the same error with its traceback"


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
                hint=f"--program {nearest(program, list(functions)) or next(iter(functions))}",
                where=str(path),
            )
        return functions[program]
    if len(functions) > 1:
        raise SglbatchError(
            "several-functions",
            f"the template has several @functions: {listed}",
            hint=f"--program {list(functions)[-1]}",  # helpers usually stand before what uses them
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
