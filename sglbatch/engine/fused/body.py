"""The body of a plain decoder-only model (Llama's shape) with fused layers.

It takes the weights of a loaded transformers model: q, k, v become one matrix, and gate, up one whose rows alternate.
The model's own parameters become views of them, so that nothing is held twice and the unfused layers still work for the
check.

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
from sglbatch.engine.fused.gated_product import gated_product, is_supported
from sglbatch.engine.fused.kernels import add_rms_norm_kernel, rope_and_write_kernel, silu_and_mul_kernel
from sglbatch.engine.layer_pool import LayerPool
from sglbatch.engine.row_step import ROW_STEP, rounded_up

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


def _interleave(gate: nn.Linear, up: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight (and bias) whose rows are gate, up, gate, up, ...; theirs become views of it."""
    weight = torch.stack([gate.weight.data, up.weight.data], dim=1).flatten(0, 1)
    gate.weight.data, up.weight.data = weight[0::2], weight[1::2]
    bias = torch.stack([gate.bias.data, up.bias.data], dim=1).flatten() if gate.bias is not None else None
    return weight, bias


def rope_and_write(
    qkv_TC: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], pool: LayerPool, write_slots_T: torch.Tensor
) -> None:
    """Rotates the queries in place and puts rotated keys, and values, into the pool.

    Args:
        qkv_TC: queries, keys and values of each row, C = (Q + 2 K) D.
        rope: cosines and sines, [T, D] each.
    """
    K, D = pool.k_NKD.shape[1:]
    Q = qkv_TC.shape[1] // D - 2 * K
    rope_and_write_kernel[(len(qkv_TC),)](
        qkv_TC,
        *rope,
        pool.k_NKD,
        pool.v_NKD,
        write_slots_T,
        Q=Q,
        K=K,
        D=D,
        HALF=triton.next_power_of_2(D // 2),
        QK_PAD=triton.next_power_of_2(Q + K),
        K_PAD=triton.next_power_of_2(K),
        D_PAD=triton.next_power_of_2(D),
        enable_fp_fusion=False,  # modules round each product before they add
    )


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
        self.gate_up, self.gate_up_bias = _interleave(mlp.gate_proj, mlp.up_proj)
        self.may_gate = self.gate_up_bias is None and is_supported(self.gate_up)
        """Whether activation and product can be one kernel."""
        self.down = mlp.down_proj
        self.input_norm = layer.input_layernorm
        self.post_norm = layer.post_attention_layernorm

    def attend(
        self, x_TH: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: TritonAttention
    ) -> torch.Tensor:
        """Attention's output before its projection, [T, Q * D]."""
        Q, K, D = self.num_heads, self.num_kv_heads, self.head_size
        qkv_TC = linear(x_TH, self.qkv, self.qkv_bias)
        rope_and_write(qkv_TC, rope, self.pool, attention.write_slots_T)
        q_TQD = qkv_TC.view(len(x_TH), Q + 2 * K, D)[:, :Q]
        return attention(q_TQD, self.pool.k_NKD, self.pool.v_NKD, self.kind).view(len(x_TH), Q * D)

    def mlp(self, x_TH: torch.Tensor, *, num_programs: int | None) -> torch.Tensor:
        """The gated MLP, [T, H].

        Args:
            num_programs: of ``gated_product``; None for a product and the activation behind it.
        """
        if num_programs is not None:
            active_TI = gated_product(x_TH, self.gate_up, num_programs=num_programs)
        else:
            gate_up_T2I = linear(x_TH, self.gate_up, self.gate_up_bias)
            size = gate_up_T2I.shape[1] // 2
            active_TI = gate_up_T2I.new_empty(len(x_TH), size)
            block = min(2048, triton.next_power_of_2(size))
            silu_and_mul_kernel[(len(x_TH), triton.cdiv(size, block))](gate_up_T2I, active_TI, size, BLOCK=block)
        hidden: torch.Tensor = self.down(active_TI)
        return hidden

    def __call__(
        self,
        x_TH: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attention: TritonAttention,
        num_programs: int | None,
    ) -> torch.Tensor:
        """The whole layer by itself, as transformers' layers compute it; for the check."""
        normed, residual = add_rms_norm(x_TH, None, self.input_norm)
        normed, residual = add_rms_norm(self.out(self.attend(normed, rope, attention)), residual, self.post_norm)
        return residual + self.mlp(normed, num_programs=num_programs)


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
        self._num_programs: int | None = None
        self._ungated: set[int] = set()
        if all(layer.may_gate for layer in self._layers):
            device = self._embed.weight.device
            self._num_programs = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: TritonAttention,
        rows_R: torch.Tensor | None,
    ) -> torch.Tensor:
        """Final hidden states [R, H] of some rows (None: of all); the last layer's MLP is computed for them only."""
        hidden_TH: torch.Tensor = self._embed(input_ids_T)
        num_programs = self._programs(len(input_ids_T))
        rope = self._rope(hidden_TH, positions_T)
        residual: torch.Tensor | None = None
        for i, layer in enumerate(self._layers):
            normed, residual = add_rms_norm(hidden_TH, residual, layer.input_norm)
            attended = layer.attend(normed, rope, attention)
            if rows_R is not None and i == len(self._layers) - 1:
                attended, residual = attended[rows_R], residual[rows_R]
            normed, residual = add_rms_norm(layer.out(attended), residual, layer.post_norm)
            hidden_TH = layer.mlp(normed, num_programs=num_programs)
        return add_rms_norm(hidden_TH, residual, self._norm)[0]

    def _programs(self, num_rows: int) -> int | None:
        """What a layer's MLP gets as ``num_programs``."""
        return None if rounded_up(num_rows) in self._ungated else self._num_programs

    @torch.inference_mode()
    def load_products(self, max_rows: int) -> None:
        """Has the driver load cuBLAS's kernels for up to so many rows, so that no step of a job waits for it."""
        layer, weight = self._layers[0], self._embed.weight
        for matrix_OI in (layer.qkv, layer.out.weight, layer.down.weight):
            x_TI = torch.zeros(max_rows, matrix_OI.shape[1], device=weight.device, dtype=weight.dtype)
            for num_rows in range(ROW_STEP, max_rows + 1, ROW_STEP):
                linear(x_TI[:num_rows], matrix_OI)

    def products_s(self, num_rows: int) -> float:
        """Seconds that the products of one layer, activation included, take for so many rows.

        The quicker of the ways to do them is what rows up to this number, from ROW_STEP fewer on, take from now on.
        """
        apart = self._products_s(num_rows, None)
        together = apart if self._num_programs is None else self._products_s(num_rows, self._num_programs)
        if together > apart:
            self._ungated.add(rounded_up(num_rows))
        return min(apart, together)

    @torch.inference_mode()
    def _products_s(self, num_rows: int, num_programs: int | None) -> float:
        """The least of some layers' times.

        Values matter: a device that multiplies zeros draws less power and is quicker.
        """
        layers = self._layers[:PRODUCT_REPEATS]
        weight = self._embed.weight
        x_RH, attended_RC = (
            torch.randn(num_rows, size, device=weight.device, dtype=weight.dtype)
            for size in (layers[0].qkv.shape[1], layers[0].out.weight.shape[1])
        )
        times: list[float] = []
        for layer in layers:
            begin, end = (torch.Event(weight.device, enable_timing=True) for _ in range(2))
            begin.record()
            linear(x_RH, layer.qkv)
            layer.out(attended_RC)
            layer.mlp(x_RH, num_programs=num_programs)
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
        """For each layer, and each way to compute it, how far it is from the unfused one, relative to what it adds.

        Args:
            inputs, outputs: of the model's own layers on the attention's batch, [T, H] each.
        """
        errors = []
        for layer, x_TH, y_TH in zip(self._layers, inputs, outputs, strict=True):
            rope, added = self._rope(x_TH, attention.positions_T), (y_TH - x_TH).float().norm()
            for num_programs in {None, self._num_programs}:
                got = layer(x_TH.clone(), rope, attention, num_programs)
                errors.append(float((got - y_TH).float().norm() / added))
        return errors
