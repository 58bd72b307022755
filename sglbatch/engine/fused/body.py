"""The body of a plain decoder-only model (Llama's shape) with fused layers.

It takes the weights of a loaded transformers model: q, k, v and gate, up become one matrix each, and the model's own
parameters become views of them, so that nothing is held twice and the unfused layers still work for the check.

Shape suffixes: T flat tokens, R rows whose states are needed, H hidden, C = (Q + 2K) * D, Q query heads, K key/value
heads, D head size, N slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import nn
from torch.nn.functional import linear

from sglbatch.engine.attention.torch import AttentionKind
from sglbatch.engine.attention.triton import TritonAttention
from sglbatch.engine.fused.kernels import add_rms_norm_kernel, rope_and_write_kernel, silu_and_mul_kernel
from sglbatch.engine.layer_pool import LayerPool

FUSABLE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
"""Architectures whose layers are: norm, q/k/v, full rotary embedding, attention, o, norm, SiLU-gated MLP."""

PRODUCT_REPEATS = 6
"""Layers on which products are timed."""


def is_fusable(model: nn.Module, body: Any) -> bool:
    """Whether the layers of a model's body have the shape that ``FusedBody`` computes."""
    config: Any = model.config
    return (
        type(model).__name__ in FUSABLE
        and config.hidden_act == "silu"
        and not getattr(config, "sliding_window", None)
        and all(hasattr(layer.mlp, "gate_proj") for layer in body.layers)
    )


def _fuse(parts: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight (and bias) for several projections of the same input; theirs become views of it."""
    weight = torch.cat([p.weight.data for p in parts])
    for p, view in zip(parts, torch.split(weight, [p.out_features for p in parts]), strict=True):
        p.weight.data = view
    bias = torch.cat([p.bias.data for p in parts]) if parts[0].bias is not None else None
    return weight, bias


class FusedLayer:
    """One decoder layer's fused weights."""

    def __init__(self, layer: Any, pool: LayerPool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.pool = pool
        self.head_size: int = attention.head_dim
        self.num_heads: int = attention.q_proj.out_features // self.head_size
        self.num_kv_heads: int = attention.k_proj.out_features // self.head_size
        self.kind = AttentionKind(scaling=float(attention.scaling))
        self.qkv, self.qkv_bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = attention.o_proj
        self.gate_up, self.gate_up_bias = _fuse([mlp.gate_proj, mlp.up_proj])
        self.down = mlp.down_proj
        self.input_norm = layer.input_layernorm
        self.post_norm = layer.post_attention_layernorm

    def attend(
        self, x_TH: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: TritonAttention
    ) -> torch.Tensor:
        """Attention's output before its projection, [T, Q * D]."""
        Q, K, D = self.num_heads, self.num_kv_heads, self.head_size
        qkv_TC = linear(x_TH, self.qkv, self.qkv_bias)
        rope_and_write_kernel[(len(x_TH),)](
            qkv_TC,
            *rope,
            self.pool.k_NKD,
            self.pool.v_NKD,
            attention.write_slots_T,
            Q=Q,
            K=K,
            D=D,
            HALF=triton.next_power_of_2(D // 2),
            QK_PAD=triton.next_power_of_2(Q + K),
            K_PAD=triton.next_power_of_2(K),
            D_PAD=triton.next_power_of_2(D),
        )
        q_TQD = qkv_TC.view(len(x_TH), Q + 2 * K, D)[:, :Q]
        return attention(q_TQD, self.pool.k_NKD, self.pool.v_NKD, self.kind).view(len(x_TH), Q * D)

    def mlp(self, x_TH: torch.Tensor) -> torch.Tensor:
        gate_up = linear(x_TH, self.gate_up, self.gate_up_bias)
        size = gate_up.shape[1] // 2
        out = gate_up.new_empty(len(x_TH), size)
        block = min(2048, triton.next_power_of_2(size))
        silu_and_mul_kernel[(len(x_TH), triton.cdiv(size, block))](gate_up, out, size, BLOCK=block)
        hidden: torch.Tensor = self.down(out)
        return hidden

    def __call__(
        self, x_TH: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: TritonAttention
    ) -> torch.Tensor:
        """The whole layer by itself, as transformers' layers compute it; for the check."""
        normed, residual = add_rms_norm(x_TH, None, self.input_norm)
        normed, residual = add_rms_norm(self.out(self.attend(normed, rope, attention)), residual, self.post_norm)
        return residual + self.mlp(normed)


def add_rms_norm(x_TH: torch.Tensor, residual_TH: torch.Tensor | None, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(residual + x), residual + x); the residual is changed in place. Without one, (norm(x), x)."""
    out = torch.empty_like(x_TH)
    H = x_TH.shape[1]
    add_rms_norm_kernel[(len(x_TH),)](
        x_TH,
        x_TH if residual_TH is None else residual_TH,
        norm.weight,
        out,
        norm.variance_epsilon,
        H,
        BLOCK=triton.next_power_of_2(H),
        HAS_RESIDUAL=residual_TH is not None,
        num_warps=8,
    )
    return out, x_TH if residual_TH is None else residual_TH


class FusedBody:
    """Embedding to final norm."""

    def __init__(self, body: Any, pools: dict[int, LayerPool]) -> None:
        self._embed = body.embed_tokens
        self._rotary = body.rotary_emb
        self._norm = body.norm
        self._layers = [FusedLayer(layer, pools[i]) for i, layer in enumerate(body.layers)]

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: TritonAttention,
        rows_R: torch.Tensor | None,
    ) -> torch.Tensor:
        """Final hidden states [R, H] of some rows (None: of all); the last layer's MLP is computed for them only."""
        hidden_TH: torch.Tensor = self._embed(input_ids_T)
        rope = self._rope(hidden_TH, positions_T)
        residual: torch.Tensor | None = None
        for i, layer in enumerate(self._layers):
            normed, residual = add_rms_norm(hidden_TH, residual, layer.input_norm)
            attended = layer.attend(normed, rope, attention)
            if rows_R is not None and i == len(self._layers) - 1:
                attended, residual = attended[rows_R], residual[rows_R]
            normed, residual = add_rms_norm(layer.out(attended), residual, layer.post_norm)
            hidden_TH = layer.mlp(normed)
        return add_rms_norm(hidden_TH, residual, self._norm)[0]

    @torch.inference_mode()
    def products_s(self, num_rows: int) -> float:
        """Seconds that the matrix products of one layer take for so many rows: the least of some layers' times.

        Values matter: a device that multiplies zeros draws less power and is quicker.
        """
        layers = self._layers[:PRODUCT_REPEATS]
        weights = [(layer.qkv, layer.out.weight, layer.gate_up, layer.down.weight) for layer in layers]
        inputs = [torch.randn(num_rows, w.shape[1], device=w.device, dtype=w.dtype) for w in weights[0]]
        times: list[float] = []
        for matrices in weights:
            begin, end = (torch.Event(self._embed.weight.device, enable_timing=True) for _ in range(2))
            begin.record()
            for x_RI, weight_OI in zip(inputs, matrices, strict=True):
                linear(x_RI, weight_OI)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return min(times)

    def _rope(self, hidden_TH: torch.Tensor, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(hidden_TH[None], positions_T[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def errors(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], attention: TritonAttention
    ) -> list[float]:
        """For each layer how far it is from the unfused one, relative to what the layer adds.

        Args:
            inputs, outputs: of the model's own layers on the attention's batch, [T, H] each.
        """
        errors = []
        for layer, x_TH, y_TH in zip(self._layers, inputs, outputs, strict=True):
            got = layer(x_TH.clone(), self._rope(x_TH, attention.positions_T), attention)
            added = (y_TH - x_TH).float().norm()
            errors.append(float((got - y_TH).float().norm() / added))
        return errors
