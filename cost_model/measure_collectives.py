"""Time collectives on the running process group, as a training step sees them.

What is timed is what compiled graphs run: functional collectives and their wait, output and all. A
sample is a stream of them, one after the other, or with as many in flight as the group's queue runs
at once, which may use the link better than one does (gloo's all-gathers: by half). Its time is that
of the slowest rank, for each collective. So bytes are timed at the rate that the network sustains:
a rate limit lets what an idle time has saved up pass in a burst, which in a step is spent at once.
To leave none, a sample begins with collectives that are not timed, and a round goes from large
sizes to small ones without a pause. A round visits a case once, the long ones every other round, so
that a disturbance does not fall on one case alone, and a case has the trimmed mean of its samples:
where ranks share cores with the threads of their backend, samples of one case lie at several
levels, up to ten times apart, and a step has them all. How far the means scatter is told. Sizes
rise until the next would take too long, and the largest are sampled least often, so the whole takes
a bounded time on any network; where the sizes end the formulas continue.

Every rank must call `measure_collectives`, and every rank gets the same list: counts and times are
agreed by all-reduce. Refused (``ValueError``): no process group, a single rank, bad sizes, an
unknown kind.
"""

# torch.distributed is partially typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import fmean, stdev
from typing import Any, cast

import torch
import torch.distributed as dist

from inductor_overlap.cost_model.collective_time import COLLECTIVE_KINDS, check_collective
from inductor_overlap.cost_model.detect import read_surroundings
from inductor_overlap.cost_model.measurements import CollectiveMeasurement

DEFAULT_SIZES = tuple(round(2 ** (half / 2)) for half in range(20, 53))
"""1 KiB to 64 MiB, two to an octave: small gradients to large buckets. Times are not smooth (on one
machine gloo's reductions of some powers of two take half longer than of sizes beside them), so many
sizes tell more than many samples of few."""
BUDGET_S = 60.0
"""How long all kinds and sizes may take together, whatever the network."""
FIRST_SHARE = 0.5
"""Share of the budget for a first sample of every size."""
ROUNDS = 11
"""Further samples of a case, as far as the budget goes. Half as many of a collective that takes
longer than `SAMPLE_US`."""
TRIMMED = 1 / 8
"""Share of the least and of the largest samples that does not count: bursts and disturbances."""
SAMPLE_US = 5e3
"""Length of what is timed in a sample, at least one collective for each in flight. Where processes
share cores one sample may take twice as long as the next, and a longer one as a whole: many short
ones tell more."""
LEAD_US = 5e3
"""What runs before that, untimed: longer than the pause between samples, whatever that saves up."""
MAX_RUNS = 200
_ITEM_BYTES = 4

Progress = Callable[[str, float], None]
"""Called with what is measured and the share of it that is done."""


@dataclass(slots=True)
class Case:
    """One kind, size and number in flight; its samples are agreed times (us) of one collective.

    The first sample, which also warms buffers up, counts only where there is no other.
    """

    kind: str
    size_bytes: int
    in_flight: int
    first_us: float
    samples_us: list[float] = field(default_factory=list[float])

    @property
    def time_us(self) -> float:
        return trimmed_mean(self.samples_us or [self.first_us])[0]

    @property
    def noise(self) -> float:
        """Relative standard error of ``time_us``; 0 if there is one sample only."""
        mean_us, error_us = trimmed_mean(self.samples_us or [self.first_us])
        return error_us / mean_us

    @property
    def runs(self) -> int:
        """Timed collectives of one more sample."""
        return self._lasting(SAMPLE_US)

    @property
    def lead(self) -> int:
        """Collectives before them."""
        return self._lasting(LEAD_US)

    def _lasting(self, length_us: float) -> int:
        """Collectives that take about ``length_us``, as many for each that is in flight."""
        count = min(MAX_RUNS, length_us / self.time_us)
        return self.in_flight * max(1, round(count / self.in_flight))

    def rounds_of(self, rounds: int) -> int:
        """In how many of so many rounds it is sampled, the last of them included."""
        return rounds if self.time_us <= SAMPLE_US else -(-rounds // 2)

    @property
    def takes_s(self) -> float:
        """How long one more sample takes."""
        return (self.lead + self.runs) * self.time_us * 1e-6

    def sample(self, device: torch.device) -> float:
        """Takes a sample; returns how long it took (s)."""
        runs, lead = self.runs, self.lead
        sample_us = _sample_us(self.kind, self.size_bytes, lead, runs, self.in_flight, device)
        self.samples_us.append(sample_us)
        return (lead + runs) * sample_us * 1e-6


def trimmed_mean(samples: Sequence[float]) -> tuple[float, float]:
    """Mean of the samples without `TRIMMED` of them at either end, and its standard error.

    The error by what is winsorised: each sample left out counts as the nearest that is not (Tukey
    and McLaughlin 1963). Of one or two samples none is left out.
    """
    count = len(samples)
    cut = math.ceil(TRIMMED * count) if count > 2 else 0
    kept = sorted(samples)[cut : count - cut]
    if count == 1:
        return kept[0], 0.0
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    return fmean(kept), stdev(winsorised) * count**0.5 / len(kept)


def measure_collectives(
    sizes_bytes: Sequence[int] = DEFAULT_SIZES,
    kinds: Sequence[str] = COLLECTIVE_KINDS,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    budget_s: float = BUDGET_S,
    placement: tuple[int, int] | None = None,
    in_flight: int = 1,
    rounds: int = ROUNDS,
    between: Callable[[], None] | None = None,
) -> list[CollectiveMeasurement]:
    """Times of ``kinds`` at ``sizes_bytes`` on the default process group.

    Args:
        sizes_bytes: nccl-tests sizes; rounded down to what all ranks can share equally.
        kinds: collectives to measure.
        device: of the tensors; the device of the backend.
        progress: called after each sample, on every rank.
        budget_s: about how long it may take; the largest sizes are left out if one run of each
            takes longer.
        placement: nodes, and ranks on each; None: as `read_surroundings` finds them.
        in_flight: how many collectives the group's queue runs at once (gloo 2, NCCL 1); if
            several, each size is timed alone and in such a stream.
        rounds: further samples of a size at most; half as many of a long one.
        between: called before each round; what it takes does not count for ``budget_s``.

    Raises:
        ValueError: no process group of at least two ranks, a size that is too small to share, or
                an unknown kind.
    """
    check_process_group()
    for kind in kinds:
        check_collective(kind, 1, 2)
    sizes = sorted({_shared_size(size) for size in sizes_bytes})
    report = progress or _ignore
    on = torch.device(device)
    cases = _first_samples(sizes, kinds, in_flight, on, FIRST_SHARE * budget_s, report)
    left_s = budget_s - 1e-6 * sum(case.in_flight * case.first_us for case in cases)
    _further_samples(cases, on, left_s, rounds, report, between)
    where = placement or _placement()
    streams = {(case.kind, case.size_bytes): case for case in cases if case.in_flight > 1}
    measured: list[CollectiveMeasurement] = []
    for case in (case for case in cases if case.in_flight == 1):
        stream_of = streams.get((case.kind, case.size_bytes))
        link_us = None if stream_of is None else stream_of.time_us
        noise = max(one.noise for one in (case, stream_of) if one is not None)
        one = CollectiveMeasurement(
            case.kind, case.size_bytes, *where, case.time_us, link_us, noise
        )
        measured.append(one)
    return measured


def _ignore(what: str, share: float) -> None:
    """The progress of a calibration that nobody watches."""


def _placement() -> tuple[int, int]:
    found = read_surroundings()
    return found.num_nodes, found.ranks_per_node


def check_process_group() -> None:
    """Raise ``ValueError`` unless a process group of at least two ranks runs."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ValueError(
            "a live calibration needs a running process group of at least two ranks; start it with "
            "torchrun and call torch.distributed.init_process_group first"
        )


def _shared_size(size_bytes: int) -> int:
    share = dist.get_world_size() * _ITEM_BYTES
    if size_bytes < share:
        raise ValueError(f"a size of {size_bytes} bytes is less than {share}, one item a rank")
    return size_bytes // share * share


def _first_samples(
    sizes: Sequence[int],
    kinds: Sequence[str],
    in_flight: int,
    device: torch.device,
    budget_s: float,
    progress: Progress,
) -> list[Case]:
    """One sample of each kind and size, up to sizes for which ``budget_s`` is short.

    A first collective of the least size, untimed, sets up connections.
    """
    cases: list[Case] = []
    for kind in kinds:
        _sample_us(kind, sizes[0], 0, 1, 1, device)
        left_us = 1e6 * budget_s / len(kinds)
        for number, size in enumerate(sizes, 1):
            spent_us = 0.0
            for together in dict.fromkeys((1, in_flight)):
                first_us = _sample_us(kind, size, 0, together, together, device)
                cases.append(Case(kind, size, together, first_us))
                spent_us += together * first_us
            progress("sizes", (kinds.index(kind) + number / len(sizes)) / len(kinds))
            left_us -= spent_us
            if number < len(sizes) and left_us < spent_us * min(2.0, sizes[number] / size):
                break
    return cases


def _further_samples(
    cases: Sequence[Case],
    device: torch.device,
    budget_s: float,
    rounds: int,
    progress: Progress,
    between: Callable[[], None] | None,
) -> None:
    """Rounds of samples, each from large ones to small ones."""
    left_s = budget_s
    for number in range(rounds):
        if between is not None:
            between()
        chosen = in_round(cases, rounds - number, left_s)
        for case in sorted(chosen, key=lambda case: -case.size_bytes):
            left_s -= case.sample(device)
        progress("collectives", (number + 1) / rounds)


def in_round(cases: Sequence[Case], rounds_left: int, left_s: float) -> list[Case]:
    """What the next round samples: what ``left_s`` pays for in all its rounds, the short first.

    Of the others what is then left pays for one more sample, the short first again.
    """
    chosen: list[Case] = []
    for case in sorted(cases, key=lambda case: case.takes_s):
        samples = case.rounds_of(rounds_left)
        is_due = samples > case.rounds_of(rounds_left - 1)
        for paid in (samples, 1):
            if paid * case.takes_s <= left_s:
                left_s -= paid * case.takes_s
                if is_due:
                    chosen.append(case)
                break
    return chosen


def _sample_us(
    kind: str, size_bytes: int, lead: int, runs: int, in_flight: int, device: torch.device
) -> float:
    """Mean time (us) of ``runs`` collectives on the slowest rank, after ``lead`` untimed ones."""
    start = start_collective(kind, size_bytes // _ITEM_BYTES, device, in_flight)
    dist.barrier()
    stream(start, lead, in_flight)
    synchronise(device)
    begin = time.perf_counter()
    stream(start, runs, in_flight)
    synchronise(device)
    return slowest_us((time.perf_counter() - begin) * 1e6 / runs, device)


def stream(start: Callable[[], torch.Tensor], runs: int, in_flight: int) -> None:
    """Runs ``runs`` collectives, ``in_flight`` at once: one begins when the oldest has ended."""
    pending: deque[torch.Tensor] = deque()
    for _ in range(runs):
        if len(pending) == in_flight:
            wait_tensor(pending.popleft())
        pending.append(start())
    while pending:
        wait_tensor(pending.popleft())


def slowest_us(own_us: float, device: torch.device) -> float:
    """The largest of the ranks' times."""
    time_us = torch.tensor([own_us], dtype=torch.float64, device=device)
    dist.all_reduce(time_us, op=dist.ReduceOp.MAX)
    return float(time_us)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_FUNCTIONAL: Any = torch.ops._c10d_functional
wait_tensor = cast("Callable[[torch.Tensor], torch.Tensor]", _FUNCTIONAL.wait_tensor)
"""Stalls until the collective that writes its argument has ended."""


def start_collective(
    kind: str, items: int, device: torch.device, in_flight: int = 1
) -> Callable[[], torch.Tensor]:
    """A call that starts ``kind`` on ``items`` fp32 values in all; wait for what it returns.

    Those in flight at once have tensors of their own, as in a step: some write in place.
    """
    starts = cycle([_start_of_one(kind, items, device) for _ in range(in_flight)])
    return lambda: next(starts)()


def _start_of_one(kind: str, items: int, device: torch.device) -> Callable[[], torch.Tensor]:
    ranks = dist.get_world_size()
    group = cast("Any", dist.group.WORLD).group_name
    whole = torch.ones(items, device=device)
    part = torch.ones(items // ranks, device=device)
    split = [items // ranks] * ranks
    ops = _FUNCTIONAL
    # The gather that allocates its own output is a coalesced one to gloo, whose two threads then
    # write the name of the op that ended last without a lock (``ProcessGroupGloo::runLoop`` in
    # torch 2.13). That name alone is too long to be stored in place, and the heap is corrupted.
    starts: dict[str, Callable[[], torch.Tensor]] = {
        "all_gather": lambda: ops.all_gather_into_tensor_out(
            part, ranks, group, out=part.new_empty(items)
        ),
        "reduce_scatter": lambda: ops.reduce_scatter_tensor(whole, "sum", ranks, group),
        "all_reduce": lambda: ops.all_reduce_(whole, "sum", group),
        "all_to_all": lambda: ops.all_to_all_single(whole, split, split, group),
    }
    return starts[kind]
