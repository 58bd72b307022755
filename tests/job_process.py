"""Runs one scripted job as a process of its own, for tests that kill it: FOLDER MODEL.

Prints a line at every request.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.job_world import World


def main() -> int:
    world = World(folder=Path(sys.argv[1]), model=Path(sys.argv[2]), batch=3)

    def on_request(number: int) -> None:
        print(number, flush=True)
        time.sleep(0.02)

    world.on_request = on_request
    return world.run().exit_code


if __name__ == "__main__":
    sys.exit(main())
