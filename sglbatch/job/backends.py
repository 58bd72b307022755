"""The backend of a job."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from sglbatch.api_spec import ApiModel
from sglbatch.job.config import RunConfig
from sglbatch.job.paths import JobPaths
from sglbatch.job.spending import Spending
from sglbatch.models import LocalModel
from sglbatch.tokenizer import Tokenizer
from sglbatch.types import Backend

if TYPE_CHECKING:
    from sglbatch.engine.engine import LocalEngine

MAX_BATCHED_CALLS: Final = 1_000_000
"""Calls that may wait for their batches at a time. All of a wave speculates: the next wave may be a day away."""


def load_backend(model: LocalModel | ApiModel, tokenizer: Tokenizer | None, config: RunConfig) -> Backend:
    """What answers a job's calls; called only when there is something to compute."""
    if isinstance(model, ApiModel):
        return load_api(model, tokenizer, config)
    assert tokenizer is not None
    return load_local(model, tokenizer, config)


def load_local(model: LocalModel, tokenizer: Tokenizer, config: RunConfig) -> Backend:
    """The engine in this process. Imports torch."""
    from sglbatch.engine import load_engine
    from sglbatch.engine.automaton_cache import AutomatonCache
    from sglbatch.engine.fsm import Compiler

    sizes: dict[str, Any] = {"kv_tokens": config.kv_tokens, "max_batch_tokens": config.max_batch_tokens}
    given = {name: value for name, value in sizes.items() if value is not None}
    backend: LocalEngine = load_engine(
        model, tokenizer, device=config.device, dtype=config.dtype, reserve=config.reserve, **given
    )
    backend.compiler = Compiler(AutomatonCache())
    return backend


def load_api(model: ApiModel, tokenizer: Tokenizer | None, config: RunConfig) -> Backend:
    """A client of the model's endpoint. Imports the client library; reads the key.

    Raises:
        SglbatchError: ``no-api-key``, ``unknown-price``, ``bad-option``.
    """
    from sglbatch.api_spec.backend import ApiBackend
    from sglbatch.api_spec.batchstore import BatchStore
    from sglbatch.api_spec.budget import Budget
    from sglbatch.api_spec.client import Endpoint
    from sglbatch.api_spec.limits import Limits
    from sglbatch.api_spec.prices import output_weight, prices_for
    from sglbatch.api_spec.speculation import OUTPUT_WEIGHT, Speculation
    from sglbatch.api_spec.tokens import counter_for

    limits = Limits(requests_per_min=config.requests_per_min, tokens_per_min=config.tokens_per_min)
    prices = prices_for(model, config.price)
    cap = None if config.max_cost is None else Decimal(str(config.max_cost))
    ledger = None if config.output is None else Spending(JobPaths(output=config.output).spending)
    budget = Budget(prices, max_cost=cap, batch=config.batch_api, ledger=ledger)
    endpoint = Endpoint(model=model, limits=limits, budget=budget, timeout_s=config.request_timeout_s)
    weight = output_weight(prices) or OUTPUT_WEIGHT
    counter = counter_for(tokenizer, model.family)
    if not config.batch_api:
        return ApiBackend(endpoint, counter, concurrency=config.concurrency, speculation=Speculation(weight))
    path = None if config.output is None else JobPaths(output=config.output).batches
    return ApiBackend(
        endpoint,
        counter,
        concurrency=MAX_BATCHED_CALLS,
        speculation=Speculation(weight, probes=MAX_BATCHED_CALLS),
        batches=BatchStore(path=path, detach=config.detach),
    )
