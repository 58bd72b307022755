"""Imports point downward only, and heavy libraries stay where they belong: see docs/design.md, Layers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sglbatch"

# The layers from the top; the parts of one line do not import each other, except in the last.
LAYERS = [
    ["sglbatch", "sglbatch.__main__"],
    ["sglbatch.cli"],
    ["sglbatch.job"],
    ["sglbatch.planner"],
    ["sglbatch.engine", "sglbatch.api_spec"],
    ["sglbatch.engine.radix", "sglbatch.engine.fsm", "sglbatch.lang", "sglbatch.data", "sglbatch.models"],
    [
        "sglbatch.types",
        "sglbatch.tokenizer",
        "sglbatch.tokenizer_files",
        "sglbatch.run_encoder",
        "sglbatch.shared_text",
        "sglbatch.token_bytes",
        "sglbatch.errors",
        "sglbatch.json_places",
        "sglbatch.version",
    ],
]
RANK = {part: rank for rank, parts in enumerate(reversed(LAYERS)) for part in parts}

# Library -> the only modules that may import it. A part stands for everything in it that is no part of its own.
HEAVY = {
    "torch": {"sglbatch.engine", "sglbatch.models.convert"},
    "transformers": {"sglbatch.engine", "sglbatch.models.convert"},
    "accelerate": {"sglbatch.engine"},
    "gguf": {"sglbatch.models.convert"},
    "huggingface_hub": {"sglbatch.models"},
    "pyarrow": {"sglbatch.data"},
    "interegular": {"sglbatch.engine.fsm"},
    "greenlet": {"sglbatch.lang"},
    "openai": {"sglbatch.api_spec"},
    "httpx2": {"sglbatch.api_spec"},
    "genai_prices": {"sglbatch.api_spec"},
    "bpe_openai": {"sglbatch.api_spec"},
    "typer": {"sglbatch.cli"},
}


def _part_of(module: str) -> str | None:
    """The longest part that a module lies in; the package's own __init__ holds nothing but itself."""
    inside = [part for part in RANK if part != "sglbatch" and (module + ".").startswith(part + ".")]
    return max(inside, key=len, default="sglbatch" if module == "sglbatch" else None)


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _imports(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """Every module that is imported anywhere in a file, with its line; ``from a import b`` is a.b where that is one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the whole name"
            source = node.module or ""
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield (full if full in MODULES else source), node.lineno


@pytest.mark.parametrize("module", MODULES)
def test_every_module_belongs_to_a_layer(module: str) -> None:
    assert _part_of(module), f"say in LAYERS where {module} stands"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module: str) -> None:
    mine = _part_of(module)
    assert mine
    for name, line in _imports(module, MODULES[module]):
        if name.split(".")[0] != "sglbatch":
            continue
        other = _part_of(name)
        assert other, f"{module}:{line} imports {name}, which is in no layer"
        below = RANK[other] < RANK[mine] or RANK[mine] == RANK[other] == 0
        assert other == mine or below, f"{module}:{line} imports {name}: {mine} is not above {other}"


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_stay_in_their_place(module: str) -> None:
    for name, line in _imports(module, MODULES[module]):
        allowed = HEAVY.get(name.split(".")[0])
        if allowed is not None:
            assert {module, _part_of(module)} & allowed, f"{module}:{line} imports {name}"


@pytest.mark.parametrize("module", ["sglbatch", "sglbatch.planner", "sglbatch.lang", "sglbatch.models", "sglbatch.cli"])
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_rules_notice_a_breach(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text("def f():\n    from sglbatch.engine import radix\n    import torch\n")
    assert list(_imports("sglbatch.lang.x", source)) == [("sglbatch.engine.radix", 2), ("torch", 3)]
    assert _part_of("sglbatch.lang.x") == "sglbatch.lang"
    assert _part_of("sglbatch.engine.radix.tree") == "sglbatch.engine.radix"
    assert _part_of("sglbatch.engine.runner") == "sglbatch.engine"
    assert _part_of("sglbatch.something") is None
    assert RANK["sglbatch.lang"] == RANK["sglbatch.engine.radix"] < RANK["sglbatch.engine"] < RANK["sglbatch.cli"]
