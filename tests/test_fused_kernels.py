"""The fused layers' kernels against plain torch: under Triton's interpreter here, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

pytest.importorskip("triton", reason="triton has no build for this platform")

import triton

from sglbatch.engine.fused.body import add_rms_norm, rope_and_write
from sglbatch.engine.fused.gated_product import gated_product, is_supported
from sglbatch.engine.fused.kernels import silu_and_mul_kernel
from sglbatch.engine.layer_pool import LayerPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gated(product_T2I: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of columns gate, up, gate, up, ..., rounded to the product's type where modules round."""
    return silu(product_T2I[:, 0::2]) * product_T2I[:, 1::2]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("size", [48, 300])
def test_activation_of_alternating_columns(size: int) -> None:
    torch.manual_seed(0)
    product = torch.randn(5, 2 * size, device=DEVICE)
    out = torch.full((5, size), torch.nan, device=DEVICE)
    block = min(128, triton.next_power_of_2(size))
    silu_and_mul_kernel[(5, triton.cdiv(size, block))](product, out, size, BLOCK=block)
    assert relative_error(out, gated(product)) < 1e-6


def rotated(num_rows: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries, keys and values after the kernel, and after transformers' function."""
    Q, K, D = 6, 2, 24
    torch.manual_seed(0)
    qkv = torch.randn(num_rows, Q + 2 * K, D, device=DEVICE).to(dtype)
    angles = torch.rand(num_rows, D // 2, device=DEVICE).mul(6).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k = apply_rotary_pos_emb(qkv[None, :, :Q], qkv[None, :, Q : Q + K], cos[None], sin[None], unsqueeze_dim=2)
    expected = [q[0], k[0], qkv[:, Q + K :].clone()]
    pool = LayerPool()
    pool.head_shapes = ((K, D), (K, D))
    pool.allocate(2 * num_rows, dtype, DEVICE)
    slots = torch.randperm(2 * num_rows, device=DEVICE)[:num_rows].int()
    rope_and_write(qkv.view(num_rows, -1), (cos, sin), pool, slots)
    return [qkv[:, :Q], pool.k_NKD[slots.long()], pool.v_NKD[slots.long()]], expected


def test_rotary_embedding() -> None:
    for got, expected in zip(*rotated(7, torch.float32), strict=True):
        assert relative_error(got, expected) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_kernels_round_where_modules_do(dtype: torch.dtype) -> None:
    """Another order of sums or a quicker division flips a last bit now and then, rounding elsewhere many."""
    for got, expected in zip(*rotated(500, dtype), strict=True):
        assert torch.equal(got, expected)
    x, residual = torch.randn(2, 500, 576, device=DEVICE).to(dtype)
    norm = LlamaRMSNorm(576, eps=1e-5).to(DEVICE, dtype)
    torch.nn.init.uniform_(norm.weight)
    product = torch.randn(500, 3072, device=DEVICE).to(dtype)
    active = torch.empty(500, 1536, device=DEVICE, dtype=dtype)
    silu_and_mul_kernel[(500, 12)](product, active, 1536, BLOCK=128)
    with torch.no_grad():
        expected_norm = norm(x + residual)
        got_norm, _ = add_rms_norm(x, residual, norm)
    for got, expected in ((got_norm, expected_norm), (active, gated(product))):
        assert (got != expected).float().mean() < 0.005


@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_of_a_sum(has_residual: bool) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, 96, device=DEVICE)
    norm = torch.nn.RMSNorm(96, eps=1e-5, device=DEVICE)
    norm.variance_epsilon = 1e-5
    torch.nn.init.uniform_(norm.weight)
    total = x + residual if has_residual else x.clone()
    with torch.no_grad():
        got, after = add_rms_norm(x, residual if has_residual else None, norm)
        assert relative_error(got, norm(total)) < 1e-6
    assert torch.equal(after, total)


# The interpreter computes in numpy, which has no bfloat16.
@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernel is tested below")
@pytest.mark.parametrize(("rows", "hidden", "size"), [(3, 64, 8), (130, 96, 200), (300, 40, 136)])
def test_gated_product(rows: int, hidden: int, size: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, hidden), torch.randn(2 * size, hidden) / hidden**0.5
    got = gated_product(x, weight, num_programs=3)
    assert relative_error(got, gated(x @ weight.T)) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "hidden", "size"), [(1, 64, 8), (130, 96, 200), (8448, 4096, 14336), (3000, 576, 1536)]
)
def test_compiled_gated_product(rows: int, hidden: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, device=DEVICE).to(dtype)
    weight = (torch.randn(2 * size, hidden, device=DEVICE) / hidden**0.5).to(dtype)
    if not is_supported(weight):
        pytest.skip("the kernel is for Hopper GPUs")
    num_programs = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    got = gated_product(x, weight, num_programs=num_programs)
    assert relative_error(got, gated((x @ weight.T).float())) < 1e-2


def test_what_the_kernel_is_not_made_for() -> None:
    assert not is_supported(torch.zeros(64, 64, dtype=torch.bfloat16)), "a CPU has no tensor copy engine"
