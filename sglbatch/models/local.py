"""A model folder on disk: what it must hold, what is refused, and its identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sglbatch.errors import ModelError

_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len")
_UNIMPORTANT_KEYS: Final = frozenset({"_model_name_or_path", "_name_or_path", "transformers_version"})
_NUM_SAMPLES: Final = 64  # blocks of a weights file that go into the identity
_SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """A model that is ready to load.

    Args:
        name: what the user called it.
        path: folder in Hugging Face format with safetensors weights and tokenizer.json.
        identity: changes when results could; see ``folder_identity``.
        context_len: most tokens of prompt and answer together.
        config: config.json.
    """

    name: str
    path: Path
    identity: str
    context_len: int
    config: Mapping[str, Any]


def describe_folder(name: str, path: Path, *, identity: str | None = None) -> LocalModel:
    """Checks a folder and describes it. ``identity`` is known for hub snapshots, else it comes from the files.

    Raises:
        ModelError: for a folder that is not a model, holds pickled weights only, or wants its own code run.
    """
    config = check_metadata(path)
    weights_files(path)
    return LocalModel(
        name=name,
        path=path,
        identity=identity or folder_identity(path, config),
        context_len=_context_len(path, config),
        config=config,
    )


def check_metadata(path: Path) -> dict[str, Any]:
    """config.json of a folder whose small files are as they must be; says nothing of the weights."""
    config_path = path / "config.json"
    if not config_path.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"for the GGUF file write --model {ggufs[0]}" if ggufs else "give a folder in Hugging Face format"
        raise ModelError("not-a-model", f"{path} has no config.json", hint=hint)
    config = _read_object(config_path)
    if "auto_map" in config:
        raise ModelError(
            "remote-code",
            "this model wants Python code from its own folder run (auto_map); sglbatch never runs such code",
            hint="use a model that transformers has built in; if this is one, remove auto_map from config.json",
            where=str(config_path),
        )
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            "no-tokenizer",
            f"{path} has no tokenizer.json",
            hint=f"save it there: AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(path)!r})",
        )
    return config


def weights_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, all that its index names.

    Raises:
        ModelError: ``pickle-weights``, ``no-weights`` or ``missing-weights``.
    """
    index_path = path / "model.safetensors.index.json"
    if index_path.is_file():
        named = sorted(set(_read_object(index_path)["weight_map"].values()))
        missing = [file for file in named if not (path / file).is_file()]
        if missing:
            raise ModelError(
                "missing-weights",
                f"{len(missing)} of {len(named)} weights files are missing, first {missing[0]}",
                hint="download the model again",
                where=str(path),
            )
        return [path / file for file in named]
    files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if files:
        return files
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ModelError(
            "pickle-weights",
            f"the weights are pickled ({pickles[0]}): loading them could run any code, so they are refused",
            hint="use the model's safetensors files; if you trust it, save it again with save_pretrained",
            where=str(path),
        )
    raise ModelError("no-weights", f"{path} has no .safetensors weights", hint="download the model again")


def folder_identity(path: Path, config: Mapping[str, Any]) -> str:
    """Hash of config, tokenizer, chat template, and of every weights file its size, header and samples of its content.

    The samples tell apart two fine-tuned versions of one model, whose headers are equal.
    """
    digest = hashlib.sha256()
    relevant = {key: value for key, value in config.items() if key not in _UNIMPORTANT_KEYS}
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    for file_name in _TOKENIZER_FILES:
        file = path / file_name
        digest.update(f"\n{file_name}\n".encode())
        if file.is_file():
            digest.update(_without_unimportant(file))
    for file in weights_files(path):
        digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        for block in _samples(file):
            digest.update(block)
    return f"folder:{digest.hexdigest()[:32]}"


def _without_unimportant(file: Path) -> bytes:
    if file.name != "generation_config.json":
        return file.read_bytes()
    values = {key: value for key, value in _read_object(file).items() if key not in _UNIMPORTANT_KEYS}
    return json.dumps(values, sort_keys=True).encode()


def _samples(file: Path) -> Iterator[bytes]:
    """The header of a safetensors file, then blocks spread evenly over what follows it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_len = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + header_len > size:
            raise ModelError(
                "broken-weights",
                "is cut short or no safetensors file",
                hint="download the model again",
                where=str(file),
            )
        yield stream.read(header_len)
        body_start = 8 + header_len
        for i in range(_NUM_SAMPLES):
            stream.seek(body_start + (size - body_start) * i // _NUM_SAMPLES)
            yield stream.read(_SAMPLE_BYTES)


def _context_len(path: Path, config: Mapping[str, Any]) -> int:
    for source in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if source.get(key):
                return int(source[key])
    raise ModelError(
        "unknown-context",
        "config.json does not say how long the model's context is",
        hint="add max_position_embeddings to it",
        where=str(path / "config.json"),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            "broken-model", f"cannot be read: {error}", hint="download the model again", where=str(path)
        ) from error
    if not isinstance(value, dict):
        raise ModelError("broken-model", "is not a JSON object", hint="download the model again", where=str(path))
    return value
