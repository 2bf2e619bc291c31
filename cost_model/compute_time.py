"""Time of one compute kernel: matmul, fused attention, anything bound by memory.

* matmul: the output is cut into tiles, the tiles run in waves over the SMs; a wave takes the time
  of one tile at the SM's share of the peak, plus a prologue worth a few K steps. The best tile of
  a short list is taken, as cuBLAS does; small tiles reuse less of what they load. A last partial
  wave costs part of a full one (split-K and stream-K kernels fill it).
* attention: the FLOPs of the fused kernels over a share of the peak, in waves of blocks of 128
  queries; a causal mask leaves the pairs up to the diagonal and half a block more; every block
  pays a prologue worth some keys. The backward pass recomputes the scores: five products where
  the forward pass has two.
* memory: bytes over the share of device-memory bandwidth that a copy reaches.

Each is at least the time its bytes need, plus the fixed time of a kernel. Clocks: a short burst
runs at boost clock, sustained work slower (power), approached over ``SUSTAINED_AFTER_US``;
``sustained=True`` is a kernel in the middle of a training step. Refused: dtypes that are no
numbers to multiply (``ValueError``).

Sources: tile and wave quantisation
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/ ; attention
FLOPs https://arxiv.org/abs/2307.08691 section 4.1; constants: ``profiles/gpus.toml``, fitted to
the public tables that ``benchmarks/bench_cost_model.py`` names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from inductor_overlap.cost_model.checks import check_counts, check_size

_NAMES: Final[dict[torch.dtype, str]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2fnuz: "fp8",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
}
_ALIASES: Final[dict[str, str]] = {
    **{str(dtype).removeprefix("torch."): name for dtype, name in _NAMES.items()},
    "half": "fp16",
    "float": "fp32",
    "tfloat32": "tf32",
    "double": "fp64",
    "float8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}
ITEM_BYTES: Final[dict[str, int]] = {
    "fp8": 1,
    "mxfp8": 1,
    "int8": 1,
    "bf16": 2,
    "fp16": 2,
    "tf32": 4,
    "fp32": 4,
    "fp64": 8,
}
# Output tiles that cuBLAS and CUTLASS use, with the share of the peak each can reach: the wider
# the tile, the more often a loaded operand is used. Shares fitted to the A100 to B300 tables.
_TILES: Final[tuple[tuple[int, int, float], ...]] = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.98),
    (128, 64, 0.78),
    (64, 128, 0.78),
    (64, 64, 0.55),
)
ATTENTION_BLOCK = 128
"""Queries of one block of fused attention (https://arxiv.org/abs/2307.08691, section 3.3)."""
MATMUL_WAVE_SHARE = 0.4
ATTENTION_WAVE_SHARE = 0.6
"""How much of a partial last wave is lost: 1 would be all, 0 none. Fitted as above."""
SUSTAINED_AFTER_US = 800.0
"""Duration at which half of the sustained slowdown shows. Fitted to the burst tables."""


@dataclass(frozen=True, slots=True)
class ComputeConstants:
    """What a kernel sees of a device; peaks are dense.

    Attributes:
        num_sms: streaming multiprocessors (CPU: cores) that share the tiles of a kernel.
        matmul_efficiency: share of the peak that large matmuls reach in a burst.
        fp8_efficiency: the same for matmuls of 8 bits: fp8 with their scales, int8.
        prologue_k: start of a tile, in steps of K.
        sustained_slowdown: how much longer a matmul takes at sustained clocks, as a share.
        attention_efficiency: share of the peak that fused attention reaches, forward.
        attention_backward_efficiency: the same, backward.
        attention_fp8_share: share of its bf16 efficiency that the matrix units keep in fp8
            attention, forward.
        attention_backward_fp8_share: the same, backward.
        attention_fp8_softmax: what exponentials and conversions of a pair take beside the matrix
            units in fp8, in multiply-adds of these, forward.
        attention_backward_fp8_softmax: the same, backward.
        attention_mxfp8_share: share of the rate of fp8 attention that block-scaled mxfp8 reaches.
        attention_backward_mxfp8_share: the same, backward.
        attention_prologue: start of a block of attention, in keys, forward.
        attention_backward_prologue: the same, backward.
        attention_us: shortest time of an attention kernel, forward; twice that backward.
        flash2_efficiency: share of the peak that FlashAttention 2, PyTorch's own kernel, reaches.
        flash2_backward_efficiency: the same, backward.
        hbm_efficiency: share of ``hbm_gb_per_s`` that a copy reaches.
        kernel_us: shortest time of any kernel.
    """

    bf16_tflop_per_s: float
    fp16_tflop_per_s: float
    fp8_tflop_per_s: float
    int8_tflop_per_s: float
    tf32_tflop_per_s: float
    fp32_tflop_per_s: float
    fp64_tflop_per_s: float
    num_sms: float
    matmul_efficiency: float
    fp8_efficiency: float
    prologue_k: float
    sustained_slowdown: float
    attention_efficiency: float
    attention_backward_efficiency: float
    attention_fp8_share: float
    attention_backward_fp8_share: float
    attention_fp8_softmax: float
    attention_backward_fp8_softmax: float
    attention_mxfp8_share: float
    attention_backward_mxfp8_share: float
    attention_prologue: float
    attention_backward_prologue: float
    attention_us: float
    flash2_efficiency: float
    flash2_backward_efficiency: float
    hbm_gb_per_s: float
    hbm_efficiency: float
    kernel_us: float

    def sm_flop_per_us(self, dtype: str) -> float:
        """Dense peak of one SM in a format, in FLOP per microsecond."""
        return getattr(self, f"{peak_format(dtype)}_tflop_per_s") * 1e6 / self.num_sms


def peak_format(dtype: str) -> str:
    """The format whose peak a dtype has: block-scaled "mxfp8" that of "fp8"."""
    return dtype.removeprefix("mx")


def has_8_bits(dtype: str) -> bool:
    """Whether matmuls and attention of a dtype run at the efficiencies of 8-bit formats."""
    return ITEM_BYTES[dtype] == 1


def dtype_name(dtype: str | torch.dtype) -> str:
    """One of ``ITEM_BYTES``: "bf16", "fp16", "fp8", "mxfp8", "int8", "tf32", "fp32", "fp64".

    Raises:
        ValueError: a dtype no matrix unit multiplies.
    """
    name = _NAMES.get(dtype) if isinstance(dtype, torch.dtype) else _from_text(str(dtype))
    if name is None:
        raise ValueError(
            f"no FLOP rate is known for dtype {dtype!r}; expected one of "
            f"{', '.join(ITEM_BYTES)} or the torch.dtype it stands for"
        )
    return name


def _from_text(text: str) -> str | None:
    bare = text.lower().removeprefix("torch.")
    return bare if bare in ITEM_BYTES else _ALIASES.get(bare)


def matmul_us(
    batch: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    constants: ComputeConstants,
    *,
    sustained: bool = False,
) -> float:
    """Time (us) of ``batch`` products (m, k) x (k, n) in one kernel; 0 if nothing is computed.

    Raises:
        ValueError: a size that is negative or no whole number.
    """
    check_counts("a matmul", batch=batch, m=m, n=n, k=k)
    if min(batch, m, n, k) == 0:
        return 0.0
    share = constants.fp8_efficiency if has_8_bits(dtype) else constants.matmul_efficiency
    rate = constants.sm_flop_per_us(dtype) * share
    steps = 2.0 * (k + constants.prologue_k) / rate
    compute_us = min(
        _waves(batch * math.ceil(m / rows) * math.ceil(n / columns), constants, MATMUL_WAVE_SHARE)
        * (rows * columns * steps / reuse)
        for rows, columns, reuse in _TILES
    )
    moved = batch * (m * k + k * n + m * n) * ITEM_BYTES[dtype]
    burst_us = max(compute_us, _transfer_us(moved, constants)) + constants.kernel_us
    throttled = 1.0 if sustained else burst_us / (burst_us + SUSTAINED_AFTER_US)
    return burst_us * (1.0 + constants.sustained_slowdown * throttled)


def _waves(tiles: float, constants: ComputeConstants, loss: float) -> float:
    """Waves that ``tiles`` take on the SMs; ``loss`` is the share lost of a partial last one."""
    exact = tiles / constants.num_sms
    if exact <= 1.0:
        return 1.0
    return exact ** (1.0 - loss) * math.ceil(exact) ** loss


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
    rows = min(seq_q, seq_kv)
    keys = seq_kv - rows / 2.0 if causal else float(seq_kv)
    queries = float(rows if causal else seq_q)
    return 2.0 * batch * q_heads * queries * keys * _pair_dims(head_dim, head_dim_v, backward)


def _pair_dims(head_dim: int, head_dim_v: int, backward: bool) -> int:
    """Multiply-adds of one query-key pair.

    Forward: Q K^T and P V. Backward: Q K^T again, dS K and dS^T Q over ``head_dim``; dO V^T and
    P^T dO over ``head_dim_v``.
    """
    return 3 * head_dim + 2 * head_dim_v if backward else head_dim + head_dim_v


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
    flash2: bool = False,
) -> float:
    """Time (us) of one fused attention kernel, forward or backward; 0 if nothing is computed.

    ``flash2``: the kernel is FlashAttention 2, which newer GPUs leave far from their peak.

    Raises:
        ValueError: a size that is negative or no whole number.
    """
    check_counts(
        "an attention",
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
    )
    if min(batch, q_heads, seq_q, seq_kv, head_dim) == 0:
        return 0.0
    rows = min(seq_q, seq_kv) if causal else seq_q
    keys = seq_kv - rows / 2.0 + ATTENTION_BLOCK / 2.0 if causal else float(seq_kv)
    keys += constants.attention_backward_prologue if backward else constants.attention_prologue
    blocks = float(batch * q_heads * math.ceil(rows / ATTENTION_BLOCK))
    share, softmax_dims = _attention_share(dtype, backward, flash2, constants)
    pair_flops = 2.0 * (_pair_dims(head_dim, head_dim_v, backward) + softmax_dims)
    block_us = ATTENTION_BLOCK * keys * pair_flops / (constants.sm_flop_per_us(dtype) * share)
    compute_us = _waves(blocks, constants, ATTENTION_WAVE_SHARE) * block_us
    moved = batch * (q_heads * seq_q + kv_heads * seq_kv) * (head_dim + head_dim_v)
    # Backward reads what forward read and wrote, and writes as much in gradients.
    passes = 2 if backward else 1
    transfer_us = _transfer_us(passes * moved * ITEM_BYTES[dtype], constants)
    summed = 0
    if backward and kv_heads < q_heads:
        # Gradients of K and V are written for each query head, then read and summed over a group.
        item_bytes = 4 if has_8_bits(dtype) else ITEM_BYTES[dtype]
        summed = 2 * batch * q_heads * seq_kv * (head_dim + head_dim_v) * item_bytes
    busy_us = max(compute_us, transfer_us) + _transfer_us(summed, constants)
    return busy_us + passes * constants.attention_us


def _attention_share(
    dtype: str, backward: bool, flash2: bool, constants: ComputeConstants
) -> tuple[float, float]:
    """The share of the peak that fused attention reaches, and what softmax adds to a pair's dims.

    At bf16 rates the softmax hides behind the matrix units and is part of their share.
    """
    c = constants
    if backward:
        share = c.flash2_backward_efficiency if flash2 else c.attention_backward_efficiency
        fp8_share, softmax_dims = c.attention_backward_fp8_share, c.attention_backward_fp8_softmax
        scaled_share = c.attention_backward_mxfp8_share
    else:
        share = c.flash2_efficiency if flash2 else c.attention_efficiency
        fp8_share, softmax_dims = c.attention_fp8_share, c.attention_fp8_softmax
        scaled_share = c.attention_mxfp8_share
    if not has_8_bits(dtype):
        return share, 0.0
    return share * fp8_share * (scaled_share if dtype == "mxfp8" else 1.0), softmax_dims


def memory_us(size_bytes: float, constants: ComputeConstants) -> float:
    """Time (us) of a kernel that reads and writes ``size_bytes`` in all; 0 if it moves nothing.

    Raises:
        ValueError: a negative size.
    """
    check_size("a memory kernel", size_bytes)
    if size_bytes == 0:
        return 0.0
    return _transfer_us(size_bytes, constants) + constants.kernel_us


def _transfer_us(size_bytes: float, constants: ComputeConstants) -> float:
    return size_bytes / (constants.hbm_gb_per_s * constants.hbm_efficiency * 1e3)
