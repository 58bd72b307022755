"""Local execution. torch is imported by ``sglbatch.engine.loader`` and what lies below it, not by this package.

The pure parts (radix, fsm, scheduler) are imported by planning, which must stay light.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "load_engine":
        from sglbatch.engine.loader import load_engine

        return load_engine
    raise AttributeError(name)
