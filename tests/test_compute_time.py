"""Time of one kernel: tiles and waves, attention, memory, clocks, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.compute_time import (
    ComputeConstants,
    attention_flops,
    attention_us,
    dtype_name,
    matmul_us,
    memory_us,
)

pytestmark = pytest.mark.quick

# 100 SMs of 1 TFLOP/s (1e6 FLOP/us) each; memory moves 1000 GB/s = 1e6 bytes/us.
PLAIN = ComputeConstants(
    bf16_tflop_per_s=100,
    fp16_tflop_per_s=100,
    fp8_tflop_per_s=200,
    int8_tflop_per_s=400,
    tf32_tflop_per_s=50,
    fp32_tflop_per_s=10,
    fp64_tflop_per_s=5,
    num_sms=100,
    matmul_efficiency=0.5,
    fp8_efficiency=0.25,
    prologue_k=0,
    sustained_slowdown=0,
    attention_efficiency=0.5,
    attention_backward_efficiency=0.25,
    attention_fp8_share=1,
    attention_backward_fp8_share=1,
    attention_fp8_softmax=0,
    attention_backward_fp8_softmax=256,
    attention_mxfp8_share=0.5,
    attention_backward_mxfp8_share=0.25,
    attention_prologue=0,
    attention_backward_prologue=0,
    attention_us=0,
    flash2_efficiency=0.25,
    flash2_backward_efficiency=0.125,
    hbm_gb_per_s=1000,
    hbm_efficiency=0.8,
    kernel_us=0,
)
TILE_US = 2 * 256 * 128 * 1000 / 0.5e6  # one 256 x 128 tile with K = 1000: 131 us


def test_a_full_wave_takes_the_time_of_one_tile() -> None:
    # 10 x 10 tiles of 256 x 128 on 100 SMs.
    assert matmul_us(1, 2560, 1280, 1000, "bf16", PLAIN) == pytest.approx(TILE_US)


def test_one_tile_more_starts_a_wave_that_is_partly_lost() -> None:
    # 101 tiles in a batch: exact 1.01 waves, 2 started: 1.01^0.6 * 2^0.4.
    time = matmul_us(101, 256, 128, 1000, "bf16", PLAIN)
    assert time <= TILE_US * 1.01**0.6 * 2**0.4 * (1 + 1e-9)
    assert time > 1.01 * TILE_US


def test_a_small_output_takes_small_tiles() -> None:
    # 640 x 640 is 15 tiles of 256 x 128 but 100 of 64 x 64, at 55 % of the rate each.
    small = 2 * 64 * 64 * 1000 / (0.5e6 * 0.55)
    assert matmul_us(1, 640, 640, 1000, "bf16", PLAIN) == pytest.approx(small)


def test_a_thin_matmul_is_bound_by_memory() -> None:
    # 1 x 1000 by 1000 x 1000: 1,002,000 values of 4 bytes at 800 GB/s.
    time = matmul_us(1, 1, 1000, 1000, "fp32", PLAIN)
    compute = 2 * 64 * 64 * 1000 / (10e6 / 100 * 0.5 * 0.55)
    assert time == pytest.approx(max(1_002_000 * 4 / 0.8e6, compute))


def test_sustained_clocks_are_slower_than_a_burst() -> None:
    h100 = Cluster.preset("h100-ib")
    burst, sustained = (
        price(8192, 8192, 8192) for price in (h100.matmul_us, h100.sustained_matmul_us)
    )
    assert burst < sustained <= burst * 1.2


def test_attention_runs_in_blocks_of_128_queries() -> None:
    # 100 heads, 128 queries, 1000 keys of 64: 2 * 128 * 1000 * 128 FLOP a block, one wave.
    time = _attention(batch=1, heads=100, queries=128, keys=1000)
    assert time == pytest.approx(2 * 128 * 1000 * 128 / 0.5e6)


def test_a_causal_mask_halves_long_attention() -> None:
    full = _attention(batch=1, heads=100, queries=12800, keys=12800)
    masked = _attention(batch=1, heads=100, queries=12800, keys=12800, causal=True)
    # Half the keys and half a block: (6400 + 64) / 12800.
    assert masked / full == pytest.approx(6464 / 12800)


def test_backward_does_five_products_at_its_own_rate() -> None:
    forward = _attention(batch=1, heads=100, queries=128, keys=1000)
    backward = _attention(batch=1, heads=100, queries=128, keys=1000, backward=True)
    assert backward / forward == pytest.approx(5 / 2 * 0.5 / 0.25)


def test_flash_attention_2_has_its_own_rates() -> None:
    best = _attention(batch=1, heads=100, queries=128, keys=1000)
    assert _attention(batch=1, heads=100, queries=128, keys=1000, flash2=True) == 2 * best
    backward = _attention(batch=1, heads=100, queries=128, keys=1000, backward=True)
    slower = _attention(batch=1, heads=100, queries=128, keys=1000, backward=True, flash2=True)
    assert slower == 2 * backward


def test_fp8_attention_does_not_hide_its_softmax() -> None:
    # Head dims 64 and 64: 320 multiply-adds a pair backward, and 256 more, at twice the peak.
    slow = _attention(batch=1, heads=100, queries=128, keys=1000, backward=True)
    fast = _attention(batch=1, heads=100, queries=128, keys=1000, backward=True, dtype="fp8")
    assert fast / slow == pytest.approx((320 + 256) / 320 / 2)
    scaled = _attention(batch=1, heads=100, queries=128, keys=1000, backward=True, dtype="mxfp8")
    assert scaled == 4 * fast
    forward = [
        _attention(batch=1, heads=100, queries=128, keys=1000, dtype=dtype)
        for dtype in ("bf16", "fp8", "mxfp8")
    ]
    assert forward[0] == 2 * forward[1] == forward[2]


@pytest.mark.parametrize(("dtype", "item_bytes"), [("bf16", 2), ("fp8", 4)])
def test_gradients_of_shared_keys_are_summed_over_their_query_heads(
    dtype: str, item_bytes: int
) -> None:
    shape: dict[str, Any] = {
        "batch": 1,
        "heads": 100,
        "queries": 128,
        "keys": 1000,
        "backward": True,
    }
    own = _attention(**shape, dtype=dtype)
    shared = _attention(**shape, dtype=dtype, kv_heads=10)
    # Two gradients of dim 64 for each of 100 heads and 1000 keys, written and read at 800 GB/s.
    assert shared - own == pytest.approx(2 * 100 * 1000 * (64 + 64) * item_bytes / 0.8e6)


def test_attention_flops_agree_with_torch() -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q, k = (2, 8, 512, 64), (2, 8, 1024, 64)
    forward = attention_flops(2, 8, 512, 1024, 64, 64, causal=False, backward=False)
    backward = attention_flops(2, 8, 512, 1024, 64, 64, causal=False, backward=True)
    assert forward == sdpa_flop_count(q, k, k)
    assert backward == sdpa_backward_flop_count(q, q, k, k)


def test_memory_time_is_bytes_over_what_a_copy_reaches() -> None:
    assert memory_us(8e6, PLAIN) == pytest.approx(10)
    assert memory_us(0, PLAIN) == 0


def test_dtypes_by_name_and_by_torch() -> None:
    assert dtype_name(torch.bfloat16) == dtype_name("bfloat16") == dtype_name("bf16") == "bf16"
    assert dtype_name("torch.float8_e4m3fn") == dtype_name(torch.float8_e5m2) == "fp8"
    assert dtype_name("BF16") == dtype_name("torch.BFloat16") == "bf16"
    assert dtype_name("fp8_e4m3") == dtype_name("FP8_E5M2") == "fp8"
    with pytest.raises(ValueError, match=r"no FLOP rate is known for dtype torch.bool; expected"):
        dtype_name(torch.bool)


def test_int8_has_a_peak_of_its_own() -> None:
    assert dtype_name("int8") == dtype_name(torch.int8) == dtype_name(torch.uint8) == "int8"
    # A full wave of tiles at 4 TFLOP/s an SM, of which 8-bit formats reach a quarter.
    assert matmul_us(1, 2560, 1280, 1000, "int8", PLAIN) == pytest.approx(TILE_US / 2)


@pytest.mark.parametrize(
    ("gpu", "least", "peak"),
    [("a100", 350, 624), ("h100", 950, 1979), ("l40s", 400, 733), ("b200", 1600, 4500)],
)
def test_large_int8_matmuls_are_near_the_data_sheet(gpu: str, least: float, peak: float) -> None:
    time_us = Cluster(gpu).sustained_matmul_us(8192, 8192, 8192, "int8")
    assert least < 2 * 8192**3 / time_us / 1e6 < peak


def test_blackwell_ultra_is_slow_at_int8() -> None:
    for gpu in ("b300", "gb300"):
        cluster = Cluster(gpu)
        in_bf16 = cluster.sustained_matmul_us(4096, 4096, 4096, "bf16")
        assert cluster.sustained_matmul_us(4096, 4096, 4096, "int8") > 5 * in_bf16


@pytest.mark.parametrize(
    ("gpu", "shape", "measured_us"),
    [
        # github.com/ai-dynamo/aiconfigurator, systems/data/*/gemm: M, N, K and time.
        ("a100", (8192, 16384, 6144), 6527.0),
        ("h100", (8192, 16384, 6144), 2095.0),
        ("h200", (8192, 10240, 10240), 2212.2),
        ("b200", (8192, 10240, 10240), 1154.9),
    ],
)
def test_published_matmuls_are_met(
    gpu: str, shape: tuple[int, int, int], measured_us: float
) -> None:
    assert Cluster(gpu).matmul_us(*shape, "bf16") == pytest.approx(measured_us, rel=0.08)


@settings(max_examples=150, deadline=None)
@given(
    gpu=st.sampled_from(Cluster.gpus()),
    dtype=st.sampled_from(["bf16", "fp16", "fp8", "mxfp8", "int8", "tf32", "fp32", "fp64"]),
    shape=st.tuples(*[st.integers(0, 200_000)] * 3),
)
def test_every_matmul_has_a_finite_time(gpu: str, dtype: str, shape: tuple[int, int, int]) -> None:
    cluster = Cluster(gpu)
    time = cluster.matmul_us(*shape, dtype)
    assert 0 <= time < math.inf
    assert cluster.matmul_us(shape[0], shape[1], shape[2] + 1024, dtype) >= time


@settings(max_examples=100, deadline=None)
@given(
    gpu=st.sampled_from(Cluster.gpus()),
    batch=st.integers(0, 64),
    heads=st.integers(0, 128),
    queries=st.integers(0, 100_000),
    keys=st.integers(0, 100_000),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_every_attention_has_a_finite_time(
    gpu: str,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    flags: tuple[bool, bool, bool],
) -> None:
    causal, backward, flash2 = flags
    time = Cluster(gpu).attention_us(
        batch, heads, heads, queries, keys, 64, causal=causal, backward=backward, flash2=flash2
    )
    assert 0 <= time < math.inf


def _attention(
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    causal: bool = False,
    backward: bool = False,
    flash2: bool = False,
    dtype: str = "bf16",
    kv_heads: int | None = None,
) -> float:
    return attention_us(
        batch,
        heads,
        heads if kv_heads is None else kv_heads,
        queries,
        keys,
        64,
        64,
        dtype,
        causal=causal,
        backward=backward,
        constants=PLAIN,
        flash2=flash2,
    )
