"""Offline batch inference of language-model programs: ``import sglbatch as sgl``.

Importing this loads no model library; ``Runtime`` and ``load_tokenizer`` do when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglbatch.errors import CallError, ConstraintError, ModelError, SglbatchError
from sglbatch.lang.function import SglFunction, call, function, set_default_backend
from sglbatch.lang.primitives import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from sglbatch.lang.state import ProgramState
from sglbatch.version import __version__

if TYPE_CHECKING:
    from sglbatch.engine.engine import LocalEngine
    from sglbatch.tokenizer import Tokenizer

__all__ = [
    "CallError",
    "ConstraintError",
    "Engine",
    "ModelError",
    "ProgramState",
    "Runtime",
    "SglFunction",
    "SglbatchError",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "call",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "load_tokenizer",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
]


def Runtime(model_path: str, **options: Any) -> LocalEngine:
    """A local backend for ``set_default_backend``: a built-in name, a folder, a GGUF file or a hub id.

    Args:
        options: as ``sglbatch.engine.load_engine`` takes them (``dtype``, ``kv_tokens``, ...).

    Raises:
        ModelError: the model cannot be had or run.
    """
    from sglbatch.engine import load_engine
    from sglbatch.models import resolve_model
    from sglbatch.tokenizer import Tokenizer

    model = resolve_model(model_path)
    backend: LocalEngine = load_engine(model, Tokenizer.load(model.path), **options)
    return backend


Engine = Runtime


def load_tokenizer(model_path: str) -> Tokenizer:
    """The tokenizer of a model, without its weights' library.

    Raises:
        ModelError: the model cannot be had.
    """
    from sglbatch.models import resolve_model
    from sglbatch.tokenizer import Tokenizer

    return Tokenizer.load(resolve_model(model_path).path)
