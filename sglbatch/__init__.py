"""Offline batch inference of language-model programs: ``import sglbatch as sgl``.

Importing this loads no model library; ``Runtime`` and ``load_tokenizer`` do when they are called.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglbatch.errors import CallError, ConstraintError, ModelError, SglbatchError
from sglbatch.lang.choices_methods import (
    exact,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sglbatch.lang.function import SglFunction, call, function
from sglbatch.lang.global_config import global_config, set_default_backend
from sglbatch.lang.primitives import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
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
    "exact",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "load_tokenizer",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]


def Runtime(model_path: str, **options: Any) -> LocalEngine:
    """A local backend for ``set_default_backend``: a built-in name, a folder, a GGUF file or a hub id.

    Args:
        options: as ``sglbatch.engine.load_engine`` takes them (``dtype``, ``kv_tokens``, ...). ``retain`` is on unless
            it is given: what one run has computed stays for the next until its memory is needed.

    Raises:
        ModelError: the model cannot be had or run.
    """
    from sglbatch.engine import load_engine
    from sglbatch.models import resolve_model
    from sglbatch.tokenizer import Tokenizer

    model = resolve_model(model_path)
    backend: LocalEngine = load_engine(model, Tokenizer.load(model.path), **{"retain": True, **options})
    return backend


Engine = Runtime


def flush_cache(backend: Any = None) -> bool:
    """Make a backend forget the prefixes that it keeps for later; False where it keeps none."""
    chosen = global_config.backend(backend)
    if not hasattr(chosen, "flush_cache"):
        return False
    chosen.flush_cache()
    return True


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """What a backend is and has done: its identity, its context length in tokens, its counters."""
    chosen = global_config.backend(backend)
    return {
        "model_identity": chosen.identity,
        "context_len": chosen.context_len,
        **asdict(chosen.stats()),
        "version": __version__,
    }


def load_tokenizer(model_path: str) -> Tokenizer:
    """The tokenizer of a model, without its weights' library.

    Raises:
        ModelError: the model cannot be had.
    """
    from sglbatch.models import resolve_model
    from sglbatch.tokenizer import Tokenizer

    return Tokenizer.load(resolve_model(model_path).path)
