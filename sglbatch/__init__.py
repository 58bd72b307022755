"""Offline batch inference of language-model programs: ``import sglbatch as sgl``.

Importing this loads no model library; ``Runtime`` and ``load_tokenizer`` do when they are called.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from sglbatch.errors import CallError, ConstraintError, ModelError, SglbatchError, UnsupportedSchemaError
from sglbatch.lang.choices_methods import (
    exact,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sglbatch.lang.function import SglFunction, call, function
from sglbatch.lang.global_config import global_config, set_default_backend
from sglbatch.lang.primitives import (
    any_order,
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
    from sglbatch.api_spec.backend import ApiBackend
    from sglbatch.engine.engine import LocalEngine
    from sglbatch.engine.fsm.public import CompiledConstraint
    from sglbatch.tokenizer import Tokenizer

__all__ = [
    "CallError",
    "ConstraintError",
    "Engine",
    "ModelError",
    "OpenAI",
    "ProgramState",
    "Runtime",
    "RuntimeEndpoint",
    "SglFunction",
    "SglbatchError",
    "UnsupportedSchemaError",
    "__version__",
    "any_order",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "call",
    "constraint_for_regex",
    "constraint_for_schema",
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
    from sglbatch.engine.automaton_cache import AutomatonCache
    from sglbatch.engine.fsm import Compiler
    from sglbatch.models import resolve_model
    from sglbatch.tokenizer import Tokenizer

    model = resolve_model(model_path)
    backend: LocalEngine = load_engine(model, Tokenizer.load(model.path), **{"retain": True, **options})
    backend.compiler = Compiler(AutomatonCache())
    return backend


Engine = Runtime


def OpenAI(
    model: str,
    *,
    base_url: str | None = None,
    api_key_env: str | None = None,
    concurrency: int = 32,
    timeout_s: float = 120.0,
) -> ApiBackend:
    """An API model as a backend: OpenAI's own, or of any endpoint that speaks its protocol.

    Args:
        model: as the endpoint knows it.
        base_url: of another endpoint, with its ``/v1``.
        api_key_env: the environment variable with its key; for OpenAI's own it is OPENAI_API_KEY.
        concurrency: calls under way at a time.
        timeout_s: for one try of a call.

    Raises:
        SglbatchError: ``unknown-api-model``, ``key-over-http``, ``no-api-key``.
    """
    from sglbatch.api_spec import resolve_api_model
    from sglbatch.api_spec.backend import ApiBackend
    from sglbatch.api_spec.client import Endpoint
    from sglbatch.api_spec.limits import Limits
    from sglbatch.api_spec.tokens import counter_for

    found = resolve_api_model(model, base_url=base_url, key_env=api_key_env)
    endpoint = Endpoint(model=found, limits=Limits(), timeout_s=timeout_s)
    return ApiBackend(endpoint, counter_for(None, found.family), concurrency=concurrency)


def RuntimeEndpoint(base_url: str, *, model: str | None = None, api_key_env: str | None = None) -> ApiBackend:
    """A running server as a backend; ``base_url`` is its address without ``/v1``.

    Args:
        model: as the server knows it; None asks the server which one it has.

    Raises:
        SglbatchError: as ``OpenAI``; ``no-endpoint``.
    """
    from sglbatch.api_spec import resolve_api_model
    from sglbatch.api_spec.served import served_model

    url = base_url.rstrip("/") + "/v1"
    if model is None:
        model = served_model(resolve_api_model("any", base_url=url, key_env=api_key_env))
    return OpenAI(model, base_url=url, api_key_env=api_key_env)


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


def constraint_for_schema(
    schema: Any,
    tokenizer: Tokenizer,
    *,
    separators: Literal["json", "compact"] = "json",
    allow_unenforced: bool = False,
) -> CompiledConstraint:
    """What ``gen(json_schema=schema)`` holds a text to: ``.accepts(text)``, ``.forced(text)``, ``.stats``.

    Args:
        schema: a dict, JSON text, a pydantic model or a type.
        separators: "json" writes ", " and ": " as json.dumps does; "compact" no blanks.
        allow_unenforced: leave to validation what cannot be enforced; ``stats`` names it.

    Raises:
        ConstraintError: the schema is no schema, or nothing satisfies it, or it is too large.
        UnsupportedSchemaError: a keyword cannot be enforced; it has ``keyword`` and ``path``.
    """
    from sglbatch.engine.automaton_cache import AutomatonCache
    from sglbatch.engine.fsm.compiled import parse_schema
    from sglbatch.engine.fsm.public import compiled_schema
    from sglbatch.lang.schemas import schema_text

    value = parse_schema(schema_text(schema))
    return compiled_schema(value, tokenizer, AutomatonCache(), separators=separators, allow_unenforced=allow_unenforced)


def constraint_for_regex(pattern: str, tokenizer: Tokenizer) -> CompiledConstraint:
    """What ``gen(regex=pattern)`` holds a text to.

    Raises:
        ConstraintError: the pattern is no regex, matches nothing, is too large, or has a part that cannot be enforced.
        SglbatchError: ``invalid-argument``: it is not even text.
    """
    if not isinstance(pattern, str):
        raise SglbatchError("invalid-argument", f"a regex is text, not {pattern!r}", hint='for example r"[0-9]{4}"')
    from sglbatch.engine.automaton_cache import AutomatonCache
    from sglbatch.engine.fsm.public import compiled_regex

    return compiled_regex(pattern, tokenizer, AutomatonCache())
