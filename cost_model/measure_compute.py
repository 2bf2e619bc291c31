"""Time kernels of this machine while all ranks of the process group run the same.

Matmuls, fused attention and memory-bound kernels of the sizes a small training step has. They are
timed in phases, between which the caller does other things: clocks and neighbours change within a
minute, and the median over phases leaves odd ones alone. All ranks begin together, so that what
they share (cores, memory) is shared as in training, and samples are short, so that many fall
between the turns that other processes get; the time that counts is that of the slowest rank, so
that every rank gets the same list. Kernels have equal shares of the time; of one that is longer
than its share of a phase (bf16 matmuls without instructions for them take 70 times as long as fp32)
a sample is taken in some phases only, at least in one.

For CPUs: GPUs have tables in the profiles, and a burst of one kernel on an idle GPU says little
about a training step.
"""

# torch.distributed is partially typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
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
MAX_SAMPLES = 60
"""Of one kernel in a phase."""
_CPU = torch.device("cpu")


@dataclass(slots=True)
class Kernel:
    """One kernel, and the undisturbed time (us) of each phase that has sampled it."""

    run: Callable[[], object]
    measurement: Callable[[float], KernelMeasurement]
    warm_us: float = 0.0
    phases_us: list[float] = field(default_factory=list[float])

    @property
    def time_us(self) -> float:
        return median(self.phases_us)

    @property
    def runs(self) -> int:
        """Runs of a sample."""
        return max(1, int(SAMPLE_US / self.warm_us))

    def samples_in(self, phase: int, share_us: float) -> int:
        """Samples in the phase of this number, from 0; each phase has ``share_us`` for them."""
        sample_us = self.runs * self.warm_us
        if sample_us <= share_us:
            return min(MAX_SAMPLES, int(share_us / sample_us))
        return int(phase % math.ceil(sample_us / share_us) == 0)


class ComputeTimes:
    """Times of CPU kernels with as many threads as this process uses.

    Every rank must make one, and call `take_phase` and `measurements` as often.

    Args:
        phases: how often `take_phase` will be called.
        budget_s: about how long all phases may take together. Beside that, every kernel runs at
            least three times.

    Raises:
        ValueError: no process group of at least two ranks.
    """

    def __init__(self, phases: int, budget_s: float) -> None:
        check_process_group()
        self._phases = phases
        self._done = 0
        self._kernels = [*_matmuls(), *_attentions(), *_memory_kernels()]
        self._share_us = 1e6 * budget_s / phases / len(self._kernels)
        with torch.no_grad():
            for kernel in self._kernels:
                # Agreed, so that all ranks take the same samples.
                kernel.warm_us = slowest_us(_warm_us(kernel.run), _CPU)

    def take_phase(self, progress: Progress | None = None) -> None:
        """Sample the kernels that are due; ``progress`` is told the share of all phases."""
        wanted = [kernel.samples_in(self._done, self._share_us) for kernel in self._kernels]
        samples_us: list[list[float]] = [[] for _ in self._kernels]
        with torch.no_grad():
            for number in range(max(wanted)):
                dist.barrier()
                for kernel, count, own in zip(self._kernels, wanted, samples_us, strict=True):
                    if number < count:
                        own.append(mean_us(kernel.run, kernel.runs))
        for kernel, own in zip(self._kernels, samples_us, strict=True):
            if own:
                kernel.phases_us.append(undisturbed(own))
        self._done += 1
        if progress is not None:
            progress("compute", self._done / self._phases)

    def measurements(self) -> list[KernelMeasurement]:
        """What the phases so far have found, by the slowest rank."""
        return [k.measurement(slowest_us(k.time_us, _CPU)) for k in self._kernels]


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


def _matmuls() -> Iterator[Kernel]:
    for name, dtype in MATMUL_DTYPES.items():
        for m, n, k in MATMULS:
            left, right = torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype)
            yield _matmul(left, right, name)


def _matmul(left: torch.Tensor, right: torch.Tensor, name: str) -> Kernel:
    (m, k), n = left.shape, right.shape[1]
    result = left.new_empty(m, n)
    return Kernel(
        lambda: torch.mm(left, right, out=result),
        lambda time_us: MatmulMeasurement(1, m, n, k, name, time_us),
    )


def _attentions() -> Iterator[Kernel]:
    for shape in ATTENTIONS:
        for backward in (False, True):
            yield _attention(shape, backward)


def _attention(shape: tuple[int, int, int, int], backward: bool) -> Kernel:
    ops = cast("Any", torch.ops.aten)
    query = torch.rand(shape)
    forward = ops._scaled_dot_product_flash_attention_for_cpu
    result, logsumexp = forward(query, query, query, 0.0, True)
    gradient = ops._scaled_dot_product_flash_attention_for_cpu_backward

    def run() -> object:
        if not backward:
            return forward(query, query, query, 0.0, True)
        return gradient(result, query, query, query, result, logsumexp, 0.0, True)

    return Kernel(run, lambda time_us: AttentionMeasurement(*shape, "fp32", backward, time_us))


def _memory_kernels() -> Iterator[Kernel]:
    for items in MEMORY_ITEMS:
        for operands in (2, 3):
            yield _memory_kernel(items, operands)


def _memory_kernel(items: int, operands: int) -> Kernel:
    """Activation of one tensor, or sum of two: what a fused kernel reads and writes."""
    left, right, result = torch.rand(3, items).unbind()

    def run() -> object:
        if operands == 2:
            return torch.sigmoid(left, out=result)
        return torch.add(left, right, out=result)

    return Kernel(run, lambda time_us: MemoryMeasurement(4 * items * operands, time_us))
