"""Heads and tails: when each task can begin at the earliest, and what must follow it at least.

Both hold for *every* order of the tasks that respects dependences and for every bucketing that
`lower_bound` admits. A head is the larger of the longest path to the task and, for each machine
(the compute queue, each link), all the work that machine must do for the task's ancestors, begun
no earlier than the least head among them. Tails are the same on the reversed graph.

The work of all ancestors is exact where that is cheap: sets are bit masks, merged by adding what
the smaller ones have and the largest lacks, which is little in graphs made of chains. A count
bounds the total; beyond it the rest of a set is left out, which only lowers a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inductor_overlap.cost_model.schedule import Schedule, Task

_BITS_PER_JOB = 400
"""Set elements that a sweep may add one by one, per task that takes time: all ranks have those, but
only some have the views that pad."""


@dataclass(frozen=True, slots=True)
class Job:
    """Work one machine must do, between the least that precedes and the least that follows.

    Attributes:
        position: of the compute task, or of the collective's start, in program order.
        head_us: the machine cannot begin it earlier.
        work_us: what the machine is busy with it: all of a compute task, the wire of a collective.
        tail_us: the step ends no earlier than this after it.
    """

    position: int
    head_us: float
    work_us: float
    tail_us: float


class Precedence:
    """A schedule's dependences by position, with heads, tails and the jobs of each machine.

    Attributes:
        preds, succs: positions of direct predecessors and successors of each task.
        head_us: earliest time each task can begin (a wait: be over with its other dependences).
        tail_us: least time from the end of each task to the end of the step.
        wait_of: position of a start -> position of its wait.
    """

    def __init__(self, schedule: Schedule) -> None:
        schedule.validate()
        self.schedule = schedule
        self.tasks: Sequence[Task] = schedule.tasks
        self.preds = _predecessors(schedule)
        self.succs = _successors(self.preds)
        self.wait_of = _waits(schedule)
        self.launch_us = schedule.machine.launch_us
        self.links = sorted({self.link(at) for at in self.wait_of})
        self.head_us = self._sweep(forward=True)
        self.tail_us = self._sweep(forward=False)

    def link(self, start: int) -> str:
        return self.schedule.machine.link(self.tasks[start].queue)

    def latency_us(self, start: int) -> float:
        """How long a collective, or any bucket with it, at least does not use its link."""
        return self.tasks[start].latency_us

    def work_us(self, position: int) -> float:
        """Time of a compute task on its queue; 0 for every other task."""
        task = self.tasks[position]
        if task.kind != "compute" or task.duration_us == 0.0:
            return 0.0
        return task.duration_us + self.launch_us

    def compute_jobs(self) -> list[Job]:
        """The compute tasks that take time."""
        works = ((at, self.work_us(at)) for at in range(len(self.tasks)))
        return [
            Job(at, self.head_us[at], work, self.tail_us[at]) for at, work in works if work > 0.0
        ]

    def wire_jobs(self, link: str) -> list[Job]:
        """The collectives of one link: each holds it last for ``wire_us``, after its latency."""
        return [
            Job(
                start,
                self.head_us[start] + self.latency_us(start),
                self.tasks[start].wire_us,
                self.tail_us[wait],
            )
            for start, wait in self.wait_of.items()
            if self.link(start) == link
        ]

    def _sweep(self, forward: bool) -> list[float]:
        """Heads of all tasks or, against the arrows, tails."""
        sweep = _Sweep(self.preds if forward else self.succs, 1 + len(self.links))
        machine_of = {link: 1 + index for index, link in enumerate(self.links)}
        for start, wait in self.wait_of.items():
            entry, exit_ = (start, wait) if forward else (wait, start)
            latency_us = self.latency_us(start)
            sweep.add_collective(
                entry,
                exit_,
                machine=machine_of[self.link(start)],
                duration_us=self.tasks[start].duration_us,
                wire_us=self.tasks[start].wire_us,
                lead_us=latency_us if forward else 0.0,
                lag_us=0.0 if forward else latency_us,
            )
        for at in range(len(self.tasks)):
            sweep.work_us[at] = sweep.work_us[at] or self.work_us(at)
        positions = range(len(self.tasks))
        return sweep.run(positions if forward else reversed(positions))


@dataclass(slots=True)
class _Ancestors:
    """What must be done before a point: a set of jobs, and per machine its sum and margins."""

    bits: int
    work_us: list[float]
    least_head_us: list[float]
    least_gap_us: list[float]
    """From the end of any of the jobs to the point."""


@dataclass(frozen=True, slots=True)
class _Exit:
    """The far end of a collective in the direction of a sweep."""

    entry: int
    machine: int
    duration_us: float
    lead_us: float
    lag_us: float


class _Sweep:
    """One pass over the graph; everything is named as if it ran with the arrows."""

    def __init__(self, preds: Sequence[Sequence[int]], num_machines: int) -> None:
        self.work_us = [0.0] * len(preds)
        self._preds = preds
        self._num_machines = num_machines
        self._exits: dict[int, _Exit] = {}
        self._ready_us = [0.0] * len(preds)
        self._done_us = [0.0] * len(preds)
        self._after: dict[int, _Ancestors] = {}
        self._uses = [0] * len(preds)
        self._bits_left = 0
        for sources in preds:
            for source in sources:
                self._uses[source] += 1

    def add_collective(
        self,
        entry: int,
        exit_: int,
        *,
        machine: int,
        duration_us: float,
        wire_us: float,
        lead_us: float,
        lag_us: float,
    ) -> None:
        self._exits[exit_] = _Exit(entry, machine, duration_us, lead_us, lag_us)
        self.work_us[exit_] = wire_us

    def run(self, order: Iterator[int] | range) -> list[float]:
        self._bits_left = _BITS_PER_JOB * sum(work_us > 0.0 for work_us in self.work_us)
        for at in order:
            before = self._merge(self._preds[at])
            self._ready_us[at] = self._ready(at, before)
            self._done_us[at] = self._done(at)
            self._after[at] = self._with_job(at, before)
            self._release(self._preds[at])
        return self._ready_us

    def _ready(self, at: int, before: _Ancestors | None) -> float:
        if before is None:
            return 0.0
        ready_us = max(self._done_us[source] for source in self._preds[at])
        for work, head, gap in zip(
            before.work_us, before.least_head_us, before.least_gap_us, strict=True
        ):
            if work > 0.0:
                ready_us = max(ready_us, head + work + gap)
        return ready_us

    def _done(self, at: int) -> float:
        exit_ = self._exits.get(at)
        if exit_ is None:
            return self._ready_us[at] + self.work_us[at]
        return max(self._ready_us[at], self._ready_us[exit_.entry] + exit_.duration_us)

    def _merge(self, sources: Sequence[int]) -> _Ancestors | None:
        if not sources:
            return None
        if len(sources) == 1:
            return self._after[sources[0]]
        parts = sorted(
            (self._after[source] for source in sources), key=lambda part: -sum(part.work_us)
        )
        bits = parts[0].bits
        work_us = parts[0].work_us.copy()
        for part in parts[1:]:
            self._add(part.bits & ~bits, work_us)
            bits |= part.bits
        machines = range(self._num_machines)
        return _Ancestors(
            bits,
            work_us,
            [min(part.least_head_us[m] for part in parts) for m in machines],
            [min(part.least_gap_us[m] for part in parts) for m in machines],
        )

    def _add(self, bits: int, work_us: list[float]) -> None:
        """Add the work of every job in ``bits``, while the count lasts."""
        while bits and self._bits_left > 0:
            at = bits.bit_length() - 1
            bits ^= 1 << at
            self._bits_left -= 1
            work_us[self._machine(at)] += self.work_us[at]

    def _machine(self, at: int) -> int:
        exit_ = self._exits.get(at)
        return 0 if exit_ is None else exit_.machine

    def _with_job(self, at: int, before: _Ancestors | None) -> _Ancestors:
        """The ancestors of what follows ``at``: those of ``at`` and itself."""
        if before is None:
            inf = [float("inf")] * self._num_machines
            before = _Ancestors(0, [0.0] * self._num_machines, inf, inf)
        work_us = self.work_us[at]
        if work_us == 0.0:
            return before
        machine = self._machine(at)
        exit_ = self._exits.get(at)
        head_us = (
            self._ready_us[at] if exit_ is None else self._ready_us[exit_.entry] + exit_.lead_us
        )
        passed_us = work_us if exit_ is None else 0.0
        after = _Ancestors(
            before.bits | 1 << at,
            before.work_us.copy(),
            before.least_head_us.copy(),
            [gap + passed_us for gap in before.least_gap_us],
        )
        after.work_us[machine] += work_us
        after.least_head_us[machine] = min(after.least_head_us[machine], head_us)
        after.least_gap_us[machine] = (
            0.0 if exit_ is None else min(after.least_gap_us[machine], exit_.lag_us)
        )
        return after

    def _release(self, sources: Sequence[int]) -> None:
        """Forget sets that nothing later asks for; keeps memory near-linear."""
        for source in sources:
            self._uses[source] -= 1
            if self._uses[source] == 0:
                del self._after[source]


def _predecessors(schedule: Schedule) -> list[list[int]]:
    position = {task.name: at for at, task in enumerate(schedule.tasks)}
    needs = schedule.needs
    return [sorted({position[name] for name in needs[task.name]}) for task in schedule.tasks]


def _successors(preds: Sequence[Sequence[int]]) -> list[list[int]]:
    succs: list[list[int]] = [[] for _ in preds]
    for at, sources in enumerate(preds):
        for source in sources:
            succs[source].append(at)
    return succs


def _waits(schedule: Schedule) -> dict[int, int]:
    position = {task.name: at for at, task in enumerate(schedule.tasks)}
    waits = (
        (position[t.collective], at) for at, t in enumerate(schedule.tasks) if t.kind == "wait"
    )
    return dict(sorted(waits))
