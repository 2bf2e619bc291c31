"""Time of one compute kernel: matmul, fused attention, anything bound by memory.

* matmul: the output is cut into tiles, the tiles run in waves over the SMs; a wave takes the time
  of one tile at the SM's share of the sustained peak. The best tile of a short list is taken, as
  cuBLAS does. Small tiles reuse less of what they load and reach less of the peak.
* attention: the FLOPs of the fused kernels (a causal mask halves them) over a share of the peak;
  the backward pass recomputes the scores: five products where the forward pass has two.
* memory: bytes over the share of device-memory bandwidth that a copy reaches.

Each is at least the time its bytes need, plus the fixed time of a kernel. Formats without a peak
in the profile run at the next wider format's. Refused: dtypes that are no numbers to multiply
(``ValueError``).

Sources: tile and wave quantisation
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/ ; attention
FLOPs https://arxiv.org/abs/2307.08691 section 4.1; efficiencies: ``profiles/gpus.toml``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

_NAMES: Final[dict[torch.dtype, str]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2fnuz: "fp8",
    torch.int8: "fp8",
    torch.uint8: "fp8",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
}
_ALIASES: Final[dict[str, str]] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "tfloat32": "tf32",
    "float64": "fp64",
    "double": "fp64",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "mxfp8": "fp8",
    "int8": "fp8",
}
ITEM_BYTES: Final[dict[str, int]] = {
    "fp8": 1,
    "bf16": 2,
    "fp16": 2,
    "tf32": 4,
    "fp32": 4,
    "fp64": 8,
}
# Output tiles that cuBLAS and CUTLASS use, with the share of the peak each can reach: the wider
# the tile, the more often a loaded operand is used (CUTLASS "efficient GEMM" documentation).
_TILES: Final[tuple[tuple[int, int, float], ...]] = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.92),
    (128, 64, 0.78),
    (64, 128, 0.78),
    (64, 64, 0.6),
)


@dataclass(frozen=True, slots=True)
class ComputeConstants:
    """What a kernel sees of a device; peaks are dense.

    Attributes:
        num_sms: streaming multiprocessors (CPU: cores) that share the tiles of a kernel.
        matmul_efficiency: share of the peak that large matmuls sustain.
        attention_efficiency: the same for the forward pass of fused attention.
        attention_backward_efficiency: the same for its backward pass.
        hbm_efficiency: share of ``hbm_gb_per_s`` that a copy reaches.
        kernel_us: shortest time of any kernel.
    """

    bf16_tflop_per_s: float
    fp16_tflop_per_s: float
    fp8_tflop_per_s: float
    tf32_tflop_per_s: float
    fp32_tflop_per_s: float
    fp64_tflop_per_s: float
    num_sms: float
    matmul_efficiency: float
    attention_efficiency: float
    attention_backward_efficiency: float
    hbm_gb_per_s: float
    hbm_efficiency: float
    kernel_us: float

    def peak_flop_per_us(self, dtype: str) -> float:
        """Dense peak of a format in FLOP per microsecond."""
        return getattr(self, f"{dtype}_tflop_per_s") * 1e6


def dtype_name(dtype: str | torch.dtype) -> str:
    """One of ``ITEM_BYTES``: "bf16", "fp16", "fp8", "tf32", "fp32", "fp64".

    Raises:
        ValueError: a dtype no matrix unit multiplies.
    """
    name = _NAMES.get(dtype) if isinstance(dtype, torch.dtype) else _from_text(dtype)
    if name is None:
        raise ValueError(
            f"no FLOP rate is known for dtype {dtype}; expected one of "
            f"{', '.join(ITEM_BYTES)} or the torch.dtype it stands for"
        )
    return name


def _from_text(text: str) -> str | None:
    bare = text.removeprefix("torch.")
    return bare if bare in ITEM_BYTES else _ALIASES.get(bare)


def matmul_us(batch: int, m: int, n: int, k: int, dtype: str, constants: ComputeConstants) -> float:
    """Time (us) of ``batch`` products (m, k) x (k, n) in one kernel; 0 if nothing is computed."""
    if min(batch, m, n, k) <= 0:
        return 0.0
    rate = constants.peak_flop_per_us(dtype) * constants.matmul_efficiency / constants.num_sms
    compute_us = min(
        _waves(batch, m, n, rows, columns, constants.num_sms)
        * (2.0 * rows * columns * k / (rate * share))
        for rows, columns, share in _TILES
    )
    moved = batch * (m * k + k * n + m * n) * ITEM_BYTES[dtype]
    return max(compute_us, _transfer_us(moved, constants)) + constants.kernel_us


@cache
def _waves(batch: int, m: int, n: int, rows: int, columns: int, num_sms: float) -> float:
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    return math.ceil(tiles / num_sms)


def attention_flops(
    batch: int,
    q_heads: int,
    seq_q: int,
    seq_kv: int,
    head_dim: int,
    head_dim_v: int,
    *,
    causal: bool,
    backward: bool,
) -> float:
    """FLOPs of fused attention; a causal mask keeps the pairs on and below the diagonal."""
    pairs = float(batch * q_heads) * _pairs(seq_q, seq_kv, causal)
    if not backward:
        return 2.0 * pairs * (head_dim + head_dim_v)
    # Q K^T again, dS Q, dS^T K over head_dim; dO V^T, P^T dO over head_dim_v.
    return 2.0 * pairs * (3 * head_dim + 2 * head_dim_v)


def _pairs(seq_q: int, seq_kv: int, causal: bool) -> float:
    if not causal:
        return float(seq_q) * seq_kv
    rows = min(seq_q, seq_kv)
    return rows * seq_kv - rows * rows / 2.0


def attention_us(
    batch: int,
    q_heads: int,
    kv_heads: int,
    seq_q: int,
    seq_kv: int,
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    *,
    causal: bool,
    backward: bool,
    constants: ComputeConstants,
) -> float:
    """Time (us) of one fused attention kernel, forward or backward."""
    if min(batch, q_heads, seq_q, seq_kv, head_dim) <= 0:
        return 0.0
    flops = attention_flops(
        batch, q_heads, seq_q, seq_kv, head_dim, head_dim_v, causal=causal, backward=backward
    )
    share = constants.attention_backward_efficiency if backward else constants.attention_efficiency
    compute_us = flops / (constants.peak_flop_per_us(dtype) * share)
    queries = q_heads * seq_q * (head_dim + head_dim_v)
    keys = kv_heads * seq_kv * (head_dim + head_dim_v)
    # Backward reads and writes what forward does, once more for the gradients.
    moved = batch * (queries + keys) * ITEM_BYTES[dtype] * (2 if backward else 1)
    return max(compute_us, _transfer_us(moved, constants)) + constants.kernel_us


def memory_us(size_bytes: float, constants: ComputeConstants) -> float:
    """Time (us) of a kernel that reads and writes ``size_bytes`` in all; 0 if it moves nothing."""
    if size_bytes <= 0:
        return 0.0
    return _transfer_us(size_bytes, constants) + constants.kernel_us


def _transfer_us(size_bytes: float, constants: ComputeConstants) -> float:
    return size_bytes / (constants.hbm_gb_per_s * constants.hbm_efficiency * 1e3)
