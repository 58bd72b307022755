"""The templates and samples that come with the package."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from sglbatch.errors import SglbatchError


def shipped_folder() -> Path:
    """The folder with ``templates/`` and ``samples/``: inside an installed package, or the root of a source tree."""
    package = Path(__file__).resolve().parent.parent
    return package if (package / "templates").is_dir() else package.parent


def template_names() -> list[str]:
    return sorted(path.stem for path in (shipped_folder() / "templates").glob("*.py"))


def init(name: str, folder: Path) -> int:
    """Copies a template and the sample its header names into ``folder``; returns the exit code.

    Raises:
        SglbatchError: ``unknown-template``, or ``file-exists`` (nothing is copied then).
    """
    names = template_names()
    if name not in names:
        raise SglbatchError(
            "unknown-template", f"there is no template {name!r}", hint=f"choose from: {', '.join(names)}"
        )
    sources = _files_of(shipped_folder() / "templates" / f"{name}.py")
    targets = [folder / source.name for source in sources]
    for target in targets:
        if target.exists():
            raise SglbatchError(
                "file-exists",
                "this file is there already, and nothing is overwritten",
                where=str(target),
                hint="move it away, or run this in another folder",
            )
    for source, target in zip(sources, targets, strict=True):
        shutil.copyfile(source, target)
        print(f"wrote {target.name}")
    if len(targets) > 1:
        print(f"try: sglbatch run {targets[0].name} {targets[1].name} --model smollm2-135m --show 2")
    return 0


def _files_of(template: Path) -> list[Path]:
    """The template, and the file under ``samples/`` that its docstring's "Sample:" line begins with."""
    header = ast.get_docstring(ast.parse(template.read_text(encoding="utf-8"))) or ""
    lines = [line.partition(":")[2].strip() for line in header.splitlines() if line.startswith("Sample:")]
    return [template, *(shipped_folder() / line.split(";")[0].strip() for line in lines)]
