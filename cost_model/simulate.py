"""Simulate a schedule: how long a step takes, what communication is exposed, the memory peak.

The arbiter of every decision. Its rules:

* One compute queue runs the tasks in program order. A compute task takes ``duration_us`` plus the
  machine's ``launch_us``; one of no duration (a view) is free. A start costs ``start_us`` on the
  compute queue and is enqueued on its communicator when the compute queue reaches it. A wait
  stalls compute until its collective has ended.
* Queues and links are those of `network`: FIFO per communicator, bandwidth shared per link.
* While a collective is in flight, compute (launches included) runs slower by
  ``machine.contention``.
* Memory is that of `memory`; it depends on program order alone.

Times are float microseconds, sizes integer bytes, ties are broken by program position. Constants
come from `Machine`, times from the tasks: no number originates here. Dependences are the caller's
to check (`Schedule.validate`); what is refused (``ValueError``) is an order in which a wait has no
earlier start, or a start not exactly one wait, or a buffer is read before it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from inductor_overlap.cost_model.memory import memory_profile
from inductor_overlap.cost_model.network import Network, Transfer
from inductor_overlap.cost_model.schedule import Machine, Schedule, Task, TaskKind

COMPUTE_QUEUE = "compute"


class Span(NamedTuple):
    """Time one task occupied a queue: ``"compute"`` or a communicator.

    A start has a span on its communicator (the collective itself) and, if launching costs time,
    one on the compute queue. A wait has one only if it stalls compute.
    """

    name: str
    kind: TaskKind
    queue: str
    start_us: float
    end_us: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """What `simulate` found.

    Attributes:
        step_us: the end of the last task.
        compute_us: work of the compute queue: durations and launches, without the slowdown by
            contention and without stalls.
        communication_us: sum of the durations of all collectives, as if each had its link alone.
        exposed_us: sum of the stalls of compute in waits.
        peak_bytes: the most live bytes during any task.
        spans: in program order, so that a collective is enqueued when the span before it on the
            compute queue ends.
        exposed_by: collective (name of its start) -> stall of its wait; stalls of 0 are left out.
        peak_task: the first task during which ``peak_bytes`` are live; empty if there is no task.
    """

    step_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    peak_bytes: int
    spans: tuple[Span, ...] = ()
    exposed_by: Mapping[str, float] = field(default_factory=dict[str, float])
    peak_task: str = ""

    @property
    def contention_us(self) -> float:
        """What compute lost by running beside collectives: the step less work and stalls."""
        return max(0.0, self.step_us - self.compute_us - self.exposed_us)

    def __repr__(self) -> str:
        return (
            f"Timeline(step_us={self.step_us:.6g}, compute_us={self.compute_us:.6g}, "
            f"communication_us={self.communication_us:.6g}, exposed_us={self.exposed_us:.6g}, "
            f"peak_bytes={self.peak_bytes}, {len(self.spans)} spans)"
        )


def simulate(schedule: Schedule) -> Timeline:
    """The timeline of ``schedule`` in its program order; near-linear in its tasks.

    Raises:
        ValueError: The order cannot run: see the module's docstring.
    """
    replay = _replayed(schedule)
    live_bytes = memory_profile(schedule)
    peak_bytes = max(live_bytes, default=0)
    peak_task = schedule.tasks[live_bytes.index(peak_bytes)].name if live_bytes else ""
    return Timeline(
        step_us=replay.now_us,
        compute_us=replay.compute_us,
        communication_us=sum(task.duration_us for task in schedule.tasks if task.kind == "start"),
        exposed_us=sum(replay.exposed_by.values()),
        peak_bytes=peak_bytes,
        spans=replay.spans(),
        exposed_by=replay.exposed_by,
        peak_task=peak_task,
    )


def simulated_step_us(schedule: Schedule) -> float:
    """``simulate(schedule).step_us``, without looking at memory, which times do not change."""
    return _replayed(schedule).now_us


def _replayed(schedule: Schedule) -> _Replay:
    replay = _Replay(schedule.machine)
    for position, task in enumerate(schedule.tasks):
        replay.run(task, position)
    replay.check_all_waited()
    return replay


class _Replay:
    """The compute queue, driving the network."""

    def __init__(self, machine: Machine) -> None:
        self.now_us = 0.0
        self.compute_us = 0.0
        self.exposed_by: dict[str, float] = {}
        self._launch_us = machine.launch_us
        self._start_us = machine.start_us
        self._contention = machine.contention
        self._network = Network(machine)
        self._unwaited: dict[str, Transfer] = {}
        self._trace: list[Span | Transfer] = []

    def run(self, task: Task, position: int) -> None:
        if task.kind == "compute":
            if task.duration_us > 0.0:
                self._occupy(task, self._launch_us + task.duration_us)
        elif task.kind == "start":
            self._start(task, position)
        else:
            self._wait(task)

    def check_all_waited(self) -> None:
        if self._unwaited:
            raise ValueError(f"collectives without a wait: {list(self._unwaited)[:5]}")

    def spans(self) -> tuple[Span, ...]:
        return tuple(
            item
            if isinstance(item, Span)
            else Span(item.task.name, "start", item.task.queue, item.begin_us, item.end_us)
            for item in self._trace
        )

    def _start(self, task: Task, position: int) -> None:
        if task.name in self._unwaited:
            raise ValueError(f"collective {task.name!r} is started twice")
        self._network.advance_to(self.now_us)
        transfer = self._network.enqueue(task, position, self.now_us)
        self._unwaited[task.name] = transfer
        self._trace.append(transfer)
        if self._start_us > 0.0:
            self._occupy(task, self._start_us)

    def _wait(self, task: Task) -> None:
        transfer = self._unwaited.pop(task.collective, None)
        if transfer is None:
            raise ValueError(
                f"wait {task.name!r}: no start named {task.collective!r} comes before it, "
                f"or another wait has already waited for it"
            )
        while not transfer.ended:
            self._network.step()
        if transfer.end_us > self.now_us:
            self._stall(task, transfer.end_us)

    def _occupy(self, task: Task, work_us: float) -> None:
        start_us = self.now_us
        self.compute_us += work_us
        self._work(work_us)
        self._trace.append(Span(task.name, task.kind, COMPUTE_QUEUE, start_us, self.now_us))

    def _work(self, work_us: float) -> None:
        """Advance the clock by ``work_us`` of work, slowed down while collectives are in flight."""
        if self._contention == 1.0:  # nothing the network does can change the end
            self.now_us += work_us
            return
        network = self._network
        while True:
            slowdown = self._contention if network.in_flight else 1.0
            end_us = self.now_us + max(0.0, work_us) * slowdown
            if end_us <= network.next_event_us:
                self.now_us = end_us
                return
            work_us -= (network.next_event_us - self.now_us) / slowdown
            self.now_us = network.next_event_us
            network.step()

    def _stall(self, task: Task, end_us: float) -> None:
        self.exposed_by[task.collective] = end_us - self.now_us
        self._trace.append(Span(task.name, "wait", COMPUTE_QUEUE, self.now_us, end_us))
        self.now_us = end_us
