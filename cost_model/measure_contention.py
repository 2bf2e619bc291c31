"""Measure what collectives take from the compute of the same rank, on CPUs.

Two constants of the simulator say it: launching a collective occupies compute for a fixed time
(call, allocations, the threads that it wakes, its wait), and while it is in flight compute is
slower by a factor (the backend's threads copy and reduce on the same core, and share its memory).
Compute beside a collective that takes T alone so loses ``launch + (1 - 1 / factor) T``. Small and
large collectives, streams of each beside more compute than hides them, tell the two apart. What
compute does to the collective is counted with it, so that the total of a schedule comes out right.

A round takes one sample of each; rounds go on until the medians stand still, or the time is up. Not
for GPUs: their launches are asynchronous, and the profiles say what they cost. Refused
(``ValueError``): no process group.
"""

# torch.distributed is partially typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles

import torch
import torch.distributed as dist

from inductor_overlap.cost_model.measure_collectives import (
    check_process_group,
    slowest_us,
    start_collective,
    stream,
    wait_tensor,
)
from inductor_overlap.cost_model.measure_compute import mean_us

KINDS = ("all_gather", "reduce_scatter")
"""What a step of sharded training has, about as many of each."""
SMALL_BYTES = 2**12
"""A collective whose time is no bytes; the least that is worth a start in a step."""
MOST_BYTES = 2**23
"""Of a large one: a bucket of a small model."""
MOST_CONTENTION = 20.0
"""Bound for what is measured: with it compute beside a collective practically stands still."""
MIN_ROUNDS, MAX_ROUNDS = 5, 40
STEADY = 0.03
"""Standard error of the lost share of large collectives below which no more rounds are taken."""
SAMPLE_US = 10e3
"""Least length of the collectives of a sample, alone."""
_HIDDEN = 1.5
"""Compute of a sample as a multiple of its collectives: enough to hide slower ones too."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Loss:
    """What compute loses beside collectives, for each: ``lost_us``; alone it takes ``alone_us``."""

    alone_us: float
    lost_us: float


@dataclass(frozen=True, slots=True)
class Contention:
    """The two constants of the simulator that losses of compute are due to.

    Attributes:
        launch_us: time of the compute queue for each collective.
        factor: how much slower compute is while a collective is in flight.
    """

    launch_us: float
    factor: float


def contention_of(small: Sequence[Loss], large: Sequence[Loss]) -> Contention:
    """The constants for which small and large collectives cost what they did, on average."""
    few, many = _mean(small), _mean(large)
    longer_us = many.alone_us - few.alone_us
    share = (many.lost_us - few.lost_us) / longer_us if longer_us > 0.0 else 0.0
    share = min(1 - 1 / MOST_CONTENTION, max(0.0, share))
    return Contention(max(0.0, few.lost_us - share * few.alone_us), 1 / (1 - share))


def _mean(losses: Sequence[Loss]) -> Loss:
    return Loss(fmean(loss.alone_us for loss in losses), fmean(loss.lost_us for loss in losses))


def measure_contention(
    time_of_us: Callable[[str, int], float], budget_s: float, in_flight: int = 1
) -> Contention:
    """The constants of this process group.

    Args:
        time_of_us: time of a collective of a kind and a size (nccl-tests bytes), as measured.
        budget_s: about how long it may take.
        in_flight: collectives in flight at once, as in `measure_collectives`.

    Raises:
        ValueError: no process group of at least two ranks.
    """
    check_process_group()
    # A sample is the collectives alone, compute alone and both together: four times the first.
    longest_us = 1e6 * budget_s / (4 * MIN_ROUNDS * len(KINDS) * in_flight)
    small = [_Case(kind, SMALL_BYTES, in_flight) for kind in KINDS]
    large = [_Case(kind, _size_within(longest_us, kind, time_of_us), in_flight) for kind in KINDS]
    spent_us = 0.0
    for number in range(1, MAX_ROUNDS + 1):
        round_us = sum(case.sample() for case in (*small, *large))
        spent_us += round_us
        steady = max(case.standard_error for case in large) <= STEADY
        if number >= MIN_ROUNDS and (steady or spent_us + round_us > 1e6 * budget_s):
            break
    return contention_of([case.loss for case in small], [case.loss for case in large])


def _size_within(limit_us: float, kind: str, time_of_us: Callable[[str, int], float]) -> int:
    """The largest power of two that takes at most ``limit_us``; at least four times the small."""
    size = MOST_BYTES
    while size > 4 * SMALL_BYTES and time_of_us(kind, size) > limit_us:
        size //= 2
    return size


@dataclass(slots=True)
class _Case:
    """Collectives of one kind and size beside matmuls."""

    kind: str
    size_bytes: int
    in_flight: int
    samples: list[Loss] = field(default_factory=list[Loss])
    _left: torch.Tensor = field(default_factory=lambda: torch.ones(256, 512))
    _right: torch.Tensor = field(default_factory=lambda: torch.ones(512, 512))
    _result: torch.Tensor = field(default_factory=lambda: torch.empty(256, 512))

    @property
    def loss(self) -> Loss:
        """The medians."""
        lost_us = median(sample.lost_us for sample in self.samples)
        return Loss(median(sample.alone_us for sample in self.samples), lost_us)

    @property
    def standard_error(self) -> float:
        """Of the median of the share of its time that compute loses beside a collective.

        By the quartiles: for a normal distribution they are 1.35 standard deviations apart, and a
        median scatters 1.25 times as much as a mean.
        """
        shares = [sample.lost_us / sample.alone_us for sample in self.samples]
        if len(shares) < MIN_ROUNDS:
            return float("inf")
        low, _, high = quantiles(shares, n=4)
        return 1.25 * (high - low) / 1.35 / len(shares) ** 0.5

    def sample(self) -> float:
        """Takes a sample; returns how long it took (us)."""
        start = start_collective(self.kind, self.size_bytes // 4, _CPU, self.in_flight)
        expected_us = self.loss.alone_us if self.samples else self._first_us(start)
        matmul_us = slowest_us(mean_us(lambda: self._compute(1), 10), _CPU)
        turns = max(1, round(SAMPLE_US / (expected_us * self.in_flight)))
        runs = 1 + int(_HIDDEN * expected_us * self.in_flight / matmul_us)
        count = turns * self.in_flight
        alone_us = _together_us(lambda: stream(start, count, self.in_flight))
        compute_us = _together_us(lambda: self._compute(turns * runs))
        both_us = _together_us(lambda: self._both(start, turns, runs))
        self.samples.append(Loss(alone_us / count, (both_us - compute_us) / count))
        return alone_us + compute_us + both_us

    def _first_us(self, start: Callable[[], torch.Tensor]) -> float:
        """Time (us) of one, after as many as there will be at once have set up their memory."""
        stream(start, self.in_flight, self.in_flight)
        return _together_us(lambda: stream(start, self.in_flight, self.in_flight)) / self.in_flight

    def _compute(self, runs: int) -> None:
        for _ in range(runs):
            torch.mm(self._left, self._right, out=self._result)

    def _both(self, start: Callable[[], torch.Tensor], turns: int, runs: int) -> None:
        for _ in range(turns):
            pending = [start() for _ in range(self.in_flight)]
            self._compute(runs)
            for result in pending:
                wait_tensor(result)


def _together_us(run: Callable[[], object]) -> float:
    """Time (us) of one run that all ranks begin together, on the slowest rank."""
    dist.barrier()
    return slowest_us(mean_us(run, 1), _CPU)
