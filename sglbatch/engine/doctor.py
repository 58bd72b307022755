"""What this machine has for the engine."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

from sglbatch.engine.loader import choose_device, default_batch_tokens


def examine() -> list[tuple[str, str]]:
    """(what, its state) of everything a run depends on."""
    device = choose_device("auto")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("processor", f"{os.cpu_count()} cores, {memory / 2**30:.1f} GiB of memory"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("transformers", _version("transformers")),
        ("triton", _version("triton")),
        ("gpu", _gpu()),
        ("a run uses", f"{device.type}, steps of {default_batch_tokens(device)} tokens"),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed; a GPU needs it (pip install 'sglbatch[cuda]')" if package == "triton" else "missing"


def _gpu() -> str:
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        return f"none that torch can use ({built})"
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, {memory}"
