"""Runs a step through a transformers model whose attention is ours.

The model's own code computes everything but attention: its layers call the function registered under the name
``sglbatch``, which writes the batch's keys and values into the layer's pool and attends over pool slots.

Shape suffixes: T flat tokens, R state rows, H hidden, V vocabulary, N slots (the last one is scratch), K key/value
heads, Q query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sglbatch.engine.attention.torch import AttentionKind, TorchAttention
from sglbatch.engine.batch import flatten
from sglbatch.engine.sampler import Sampling, sample, score
from sglbatch.engine.sequence import StateRow, Step

ATTENTION_NAME = "sglbatch"
MAX_LOGIT_ROWS = 256
"""Rows of logits computed at once."""


class LayerPool:
    """Keys and values of one layer, and the attention of the step that is running."""

    def __init__(self) -> None:
        self.k_NKD: torch.Tensor = torch.empty(0)
        self.v_NKD: torch.Tensor = torch.empty(0)
        self.attention: TorchAttention | None = None
        self.head_shapes: tuple[tuple[int, int], tuple[int, int]] | None = None
        """(K, D) of keys and of values, seen by the probe."""

    def allocate(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        assert self.head_shapes is not None
        k_shape, v_shape = self.head_shapes
        self.k_NKD = torch.empty(num_slots + 1, *k_shape, dtype=dtype, device=device)
        self.v_NKD = torch.empty(num_slots + 1, *v_shape, dtype=dtype, device=device)


def attention_hook(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers: query [1, Q, T, D], key and value [1, K, T, D] -> [1, T, Q, D]."""
    pool: LayerPool = module.sglbatch_pool  # type: ignore[assignment]
    k_TKD, v_TKD = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if pool.attention is None:
        pool.head_shapes = (tuple(k_TKD.shape[1:]), tuple(v_TKD.shape[1:]))  # type: ignore[assignment]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    kind = AttentionKind(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    pool.attention.write(pool.k_NKD, pool.v_NKD, k_TKD, v_TKD)
    q_TQD = query[0].transpose(0, 1).contiguous()
    return pool.attention(q_TQD, pool.k_NKD, pool.v_NKD, kind, s_aux).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention_hook)


class _Body(nn.Module):
    """Stands where a causal model keeps its body, so that body and head can be run apart.

    The head's own code (logit scaling, soft caps) then works on states that were kept from earlier steps too.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.states_1RH: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.states_1RH is not None:
            return BaseModelOutputWithPast(last_hidden_state=self.states_1RH)
        return self.body(*args, **kwargs)


class ModelRunner:
    """A loaded model with its KV pool.

    Args:
        model: a transformers causal model in eval mode, loaded with ``attn_implementation="sglbatch"``.
        vocab_size: token ids that exist; logits beyond it are padding.
    """

    def __init__(self, model: nn.Module, *, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._pools: dict[int, LayerPool] = {}
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        for module in model.modules():
            layer_idx = getattr(module, "layer_idx", None)
            if isinstance(layer_idx, int):
                module.sglbatch_pool = self._pools.setdefault(layer_idx, LayerPool())  # type: ignore[assignment]
        name: str = model.base_model_prefix  # type: ignore[assignment]
        self.body = _Body(getattr(model, name))
        setattr(model, name, self.body)

    def probe(self) -> list[int]:
        """Runs two tokens to learn each layer's head shapes; returns the layers that called our attention."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self.body(input_ids=ids, position_ids=torch.arange(2, device=self.device)[None], use_cache=False)
        return sorted(i for i, pool in self._pools.items() if pool.head_shapes is not None)

    @property
    def bytes_per_slot(self) -> int:
        """KV bytes of one token over all layers; after ``probe``."""
        shapes = [shape for pool in self._pools.values() if pool.head_shapes for shape in pool.head_shapes]
        return sum(heads * size for heads, size in shapes) * self.dtype.itemsize

    def allocate(self, num_slots: int) -> None:
        """Makes the pool of ``num_slots`` slots and one scratch slot. Owned until the runner is dropped."""
        for pool in self._pools.values():
            if pool.head_shapes is not None:
                pool.allocate(num_slots, self.dtype, self.device)

    @torch.inference_mode()
    def run(self, step: Step, samplings: Sequence[Sampling | None]) -> list[int | list[float]]:
        """Puts the step through the model.

        Args:
            samplings: for each action of the step, how to draw its token; None where it has targets to score.

        Returns:
            For each action its token id, or the log-probabilities of its targets.
        """
        rows = list({id(row): row for row in (*(a.row for a in step.actions), *step.new_states)}.values())
        states_RH = self._states(step, rows)
        index = {id(row): i for i, row in enumerate(rows)}
        action_rows = [index[id(a.row)] for a in step.actions]
        outputs: list[int | list[float]] = []
        for begin in range(0, len(action_rows), MAX_LOGIT_ROWS):
            part = slice(begin, begin + MAX_LOGIT_ROWS)
            logits_RV = self._logits(states_RH[action_rows[part]])
            outputs += _decide(logits_RV, [a.targets for a in step.actions[part]], samplings[part])
        return outputs

    def _states(self, step: Step, rows: list[StateRow]) -> torch.Tensor:
        """The final hidden state of each row [R, H]; those that the tree keeps are stored."""
        if not step.pieces:
            return torch.stack([row.stored for row in rows])
        batch, offsets = flatten(step)
        attention = TorchAttention(batch, self.device)
        for pool in self._pools.values():
            pool.attention = attention
        output = self.body(
            input_ids=torch.from_numpy(batch.input_ids).to(self.device)[None],
            position_ids=torch.from_numpy(batch.positions).to(self.device)[None],
            use_cache=False,
        )
        hidden_TH = output.last_hidden_state[0]
        new = [row for row in rows if row.piece is not None]
        flat = [offsets[id(row.piece)] + row.offset for row in new]
        states = iter(hidden_TH[flat])
        for row in new:
            row.stored, row.piece = next(states), None
        return torch.stack([row.stored for row in rows]) if rows else hidden_TH[:0]

    def _logits(self, states_RH: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, V] through the model's own head."""
        self.body.states_1RH = states_RH[None]
        try:
            dummy = torch.zeros(1, states_RH.shape[0], dtype=torch.long, device=self.device)
            output = self._model(input_ids=dummy, use_cache=False)
        finally:
            self.body.states_1RH = None
        logits: torch.Tensor = output.logits[0, :, : self._vocab_size]
        return logits.float()


def _decide(
    logits_RV: torch.Tensor, targets: Sequence[tuple[int, ...]], samplings: Sequence[Sampling | None]
) -> list[int | list[float]]:
    """Scores first, since sampling changes the logits."""
    outputs: list[int | list[float]] = [0] * len(targets)
    scored = [i for i, s in enumerate(samplings) if s is None]
    for i, logprobs in zip(scored, score(logits_RV[scored], [targets[i] for i in scored]), strict=True):
        outputs[i] = logprobs
    drawn = [(i, s) for i, s in enumerate(samplings) if s is not None]
    tokens = sample(logits_RV[[i for i, _ in drawn]], [s for _, s in drawn]) if drawn else []
    for (i, _), token in zip(drawn, tokens, strict=True):
        outputs[i] = token
    return outputs
