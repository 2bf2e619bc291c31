"""Time kernels of this machine while all ranks of the process group run the same.

Matmuls, fused attention and memory-bound kernels of the sizes a small training step has. All ranks
begin together, so that what they share (cores, memory) is shared as in training. A round takes one
sample of every kernel, and samples are short, so that many fall between the turns that other
processes get; the time that counts is that of the slowest rank, so that every rank gets the same
list. For CPUs: GPUs have tables in the profiles, and a burst of one kernel on an idle GPU says
little about a training step.
"""

# torch.distributed is partially typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from inductor_overlap.cost_model.measure_collectives import (
    Progress,
    check_process_group,
    slowest_us,
)
from inductor_overlap.cost_model.measurements import (
    AttentionMeasurement,
    MatmulMeasurement,
    MemoryMeasurement,
)

KernelMeasurement = MatmulMeasurement | AttentionMeasurement | MemoryMeasurement

MATMULS = (
    (256, 256, 256),
    (128, 2048, 512),
    (256, 1024, 512),
    (512, 512, 512),
    (512, 512, 1024),
    (1024, 512, 512),
)
"""(m, n, k) of linear layers, forward and backward; a few milliseconds each on one core."""
MATMUL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ATTENTIONS = ((2, 4, 256, 64), (1, 4, 512, 64), (4, 4, 128, 32))
"""(batch, heads, seq, head dim)"""
MEMORY_ITEMS = (2**6, 2**17, 2**19, 2**21)
"""fp32 items of a pointwise kernel: from the fixed time of a kernel to beyond a core's caches."""
SAMPLE_US = 2e3
"""Length of a sample, at least one run: within the turn that a scheduler gives a process."""
MIN_SAMPLES, MAX_SAMPLES = 3, 60
BUDGET_S = 10.0
"""How long all kernels may take together."""
_CPU = torch.device("cpu")

_Case = tuple[Callable[[], object], Callable[[float], KernelMeasurement]]


def measure_compute(
    progress: Progress | None = None, budget_s: float = BUDGET_S
) -> list[KernelMeasurement]:
    """Times of CPU kernels with as many threads as this process uses.

    Args:
        progress: called after each round of samples, on every rank.
        budget_s: about how long it may take.

    Raises:
        ValueError: no process group of at least two ranks.
    """
    check_process_group()
    cases = [*_matmuls(), *_attentions(), *_memory_kernels()]
    with torch.no_grad():
        warm_us = [_warm_us(run) for run, _ in cases]
        runs = [max(1, int(SAMPLE_US / time_us)) for time_us in warm_us]
        round_us = sum(count * time_us for count, time_us in zip(runs, warm_us, strict=True))
        rounds = int(budget_s * 1e6 / slowest_us(round_us, _CPU))
        rounds = max(MIN_SAMPLES, min(MAX_SAMPLES, rounds))
        samples_us: list[list[float]] = []
        for number in range(1, rounds + 1):
            dist.barrier()
            samples_us.append([mean_us(run, n) for (run, _), n in zip(cases, runs, strict=True)])
            if progress is not None:
                progress("compute", number / rounds)
    own_us = [undisturbed(times_us) for times_us in zip(*samples_us, strict=True)]
    return [
        measurement(slowest_us(time_us, _CPU))
        for (_, measurement), time_us in zip(cases, own_us, strict=True)
    ]


def undisturbed(samples_us: Sequence[float]) -> float:
    """The lower quartile: what a quiet core takes, without trusting a single lucky sample."""
    return sorted(samples_us)[(len(samples_us) - 1) // 4]


def _warm_us(run: Callable[[], object]) -> float:
    """Time (us) of a second run: the first one sets up buffers and caches."""
    run()
    return mean_us(run, 1)


def mean_us(run: Callable[[], object], runs: int) -> float:
    """Mean time (us) of ``runs`` runs, at least a nanosecond."""
    begin = time.perf_counter()
    for _ in range(runs):
        run()
    return max(1e-3, (time.perf_counter() - begin) * 1e6 / runs)


def _matmuls() -> Iterator[_Case]:
    for name, dtype in MATMUL_DTYPES.items():
        for m, n, k in MATMULS:
            left, right = torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype)
            yield _matmul(left, right, name)


def _matmul(left: torch.Tensor, right: torch.Tensor, name: str) -> _Case:
    (m, k), n = left.shape, right.shape[1]
    result = left.new_empty(m, n)
    return (
        lambda: torch.mm(left, right, out=result),
        lambda time_us: MatmulMeasurement(1, m, n, k, name, time_us),
    )


def _attentions() -> Iterator[_Case]:
    for shape in ATTENTIONS:
        for backward in (False, True):
            yield _attention(shape, backward)


def _attention(shape: tuple[int, int, int, int], backward: bool) -> _Case:
    ops = cast("Any", torch.ops.aten)
    query = torch.rand(shape)
    forward = ops._scaled_dot_product_flash_attention_for_cpu
    result, logsumexp = forward(query, query, query, 0.0, True)
    gradient = ops._scaled_dot_product_flash_attention_for_cpu_backward

    def run() -> object:
        if not backward:
            return forward(query, query, query, 0.0, True)
        return gradient(result, query, query, query, result, logsumexp, 0.0, True)

    return run, lambda time_us: AttentionMeasurement(*shape, "fp32", backward, time_us)


def _memory_kernels() -> Iterator[_Case]:
    for items in MEMORY_ITEMS:
        for operands in (2, 3):
            yield _memory_kernel(items, operands)


def _memory_kernel(items: int, operands: int) -> _Case:
    """Activation of one tensor, or sum of two: what a fused kernel reads and writes."""
    left, right, result = torch.rand(3, items).unbind()

    def run() -> object:
        if operands == 2:
            return torch.sigmoid(left, out=result)
        return torch.add(left, right, out=result)

    return run, lambda time_us: MemoryMeasurement(4 * items * operands, time_us)
