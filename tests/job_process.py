"""Runs one scripted job as a process of its own, for tests that kill it: FOLDER MODEL REQUESTS_A_SECOND."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.job_world import World


def main() -> int:
    folder, model, rate = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    world = World(folder=folder, model=model, batch=3)
    world.on_request = lambda _: time.sleep(1 / rate)
    print("ready", flush=True)
    return world.run().exit_code


if __name__ == "__main__":
    sys.exit(main())
