"""The neutral schedule: an order of tasks, the buffers they touch, the queues they run on.

This is the one representation that policies, the simulator and the lower bound share. It knows
nothing of FX nodes or scheduler nodes: two adapters in ``passes`` translate (`graph_schedule`,
`snode_schedule`). It decides nothing; it refuses (``ValueError``) an order that is not executable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import networkx as nx

TaskKind = Literal["compute", "start", "wait"]


@dataclass(frozen=True, slots=True)
class Task:
    """One step of the program.

    ``compute`` runs on the compute queue for ``duration_us``. ``start`` hands a collective of
    ``duration_us`` to the communicator ``queue``. ``wait`` stalls compute until the collective
    whose start is named ``collective`` has ended.

    ``wire_us`` (starts only) is the part of ``duration_us`` that the bytes alone need on the wire
    at the link's plateau: what is left when latency is shared with others in a bucket. The default
    is ``duration_us``; it is never more, and 0 for other tasks.
    ``link_us`` is for how long the collective, as it is, keeps its link from others: at least
    ``wire_us``, which is the default, and at most ``duration_us``. Give all three when replacing
    ``duration_us`` of a start.
    ``latency_us`` is what any bucket with this collective in it needs at least beside the bytes of
    all its members; by default, and at most, ``duration_us - wire_us``. Starts of one queue may be
    merged if their ``bucket_key`` (kind, dtype, reduction: whatever the adapter tells apart) is
    the same; one without a key and without latency is merged with nothing.

    ``deps`` are the names of tasks that must come earlier in every order (data dependences,
    effect tokens, barriers). ``reads`` and ``writes`` are names of `Buffer`; a buffer is written
    (allocated) by at most one task. Writing into it again in place is a read.
    """

    name: str
    kind: TaskKind = "compute"
    duration_us: float = 0.0
    queue: str = ""
    collective: str = ""
    wire_us: float = math.inf
    link_us: float = 0.0
    latency_us: float = math.inf
    deps: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    bucket_key: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "start" and not self.queue:
            raise ValueError(f"start {self.name!r} names no queue; set queue to its group name")
        if self.kind == "wait" and not self.collective:
            raise ValueError(f"wait {self.name!r} names no collective; set it to the start's name")
        if not 0.0 <= self.duration_us < math.inf:
            raise ValueError(
                f"task {self.name!r}: duration_us must be finite and >= 0, got {self.duration_us}"
            )
        if not self.wire_us >= 0.0:
            raise ValueError(f"task {self.name!r}: wire_us must be >= 0, got {self.wire_us}")
        if not self.link_us >= 0.0:
            raise ValueError(f"task {self.name!r}: link_us must be >= 0, got {self.link_us}")
        wire_us = min(self.wire_us, self.duration_us) if self.kind == "start" else 0.0
        rest_us = self.duration_us - wire_us if self.kind == "start" else 0.0
        latency_us = min(self.latency_us, rest_us)
        link_us = min(max(self.link_us, wire_us), wire_us + rest_us)
        object.__setattr__(self, "wire_us", wire_us)
        object.__setattr__(self, "link_us", link_us)
        object.__setattr__(self, "latency_us", latency_us)

    def scaled(self, communication: float, compute: float) -> Task:
        """The same task, so many times as long if it is a collective or compute."""
        factor = compute if self.kind == "compute" else communication
        if factor == 1.0 or self.duration_us == 0.0:
            return self
        if self.kind == "compute":
            return replace(self, duration_us=self.duration_us * compute)
        return replace(
            self,
            duration_us=self.duration_us * communication,
            wire_us=self.wire_us * communication,
            link_us=self.link_us * communication,
        )


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation (a storage, not a tensor: views share their base's buffer).

    ``is_input``: live from the beginning and freed after its last reader (saved activations,
    tangents). Parameters, which outlive the graph, are not buffers. ``is_output``: lives to the
    end.
    """

    name: str
    size_bytes: int
    is_input: bool = False
    is_output: bool = False

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(
                f"buffer {self.name!r}: size_bytes must be >= 0, got {self.size_bytes}"
            )


@dataclass(frozen=True, slots=True)
class Machine:
    """How the queues behave: constants of the cluster profile.

    Attributes:
        launch_us: host overhead of every compute task with a duration.
        collective_launch_us: host overhead of every start; None: the same.
        contention: factor (>= 1) by which compute is slower while a collective is in flight.
        queue_width: collectives that one communicator runs at once (NCCL 1, gloo 2).
        links: communicator -> name of the link it uses. Communicators on one link share its
            bandwidth; one that is not listed has a link of its own.
    """

    launch_us: float = 0.0
    contention: float = 1.0
    queue_width: int = 1
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    collective_launch_us: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.launch_us < math.inf:
            raise ValueError(f"launch_us must be finite and >= 0, got {self.launch_us}")
        if not 0.0 <= self.start_us < math.inf:
            raise ValueError(f"collective_launch_us must be finite and >= 0, got {self.start_us}")
        if not 1.0 <= self.contention < math.inf:
            raise ValueError(f"contention must be finite and >= 1, got {self.contention}")
        if self.queue_width < 1:
            raise ValueError(f"queue_width must be >= 1, got {self.queue_width}")

    @property
    def start_us(self) -> float:
        """Host overhead (us) of every start."""
        return self.launch_us if self.collective_launch_us is None else self.collective_launch_us

    def busy_us(self, task: Task) -> float:
        """For how long (us) ``task`` keeps the compute queue, beside stalls and contention."""
        if task.kind == "compute":
            return task.duration_us + self.launch_us if task.duration_us > 0.0 else 0.0
        return self.start_us if task.kind == "start" else 0.0

    def occupied_us(self, duration_us: float, link_us: float) -> float:
        """For how long (us) one of many collectives of a queue keeps the others from their link.

        Of ``duration_us``, ``link_us`` are on the link; the rest passes beside the bytes of others,
        of which as many are in flight as the queue runs at once.
        """
        return max(link_us, duration_us / self.queue_width)

    def link(self, queue: str) -> str:
        return self.links.get(queue, queue)


@dataclass(frozen=True)
class Schedule:
    """Tasks in program order, their buffers and the machine they run on."""

    tasks: tuple[Task, ...]
    buffers: Mapping[str, Buffer] = field(default_factory=dict[str, Buffer])
    machine: Machine = field(default_factory=Machine)

    def __repr__(self) -> str:
        starts = sum(task.kind == "start" for task in self.tasks)
        return (
            f"Schedule({len(self.tasks)} tasks, {starts} collectives, {len(self.buffers)} buffers)"
        )

    @cached_property
    def by_name(self) -> dict[str, Task]:
        return {task.name: task for task in self.tasks}

    @cached_property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """Task -> what must come before it: its dependences and, for a wait, its start."""
        return {
            task.name: (*task.deps, task.collective) if task.kind == "wait" else task.deps
            for task in self.tasks
        }

    @cached_property
    def holders(self) -> dict[str, int]:
        """Buffer -> how many tasks hold it: all that read it, and the start that writes it."""
        holders: dict[str, int] = {}
        for task in self.tasks:
            for name in (*task.reads, *task.writes) if task.kind == "start" else task.reads:
                holders[name] = holders.get(name, 0) + 1
        return holders

    @cached_property
    def graph(self) -> nx.DiGraph[str]:
        """The dependency graph: an edge from each task to every task that needs it.

        A wait depends on its start, whether ``deps`` says so or not.
        """
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(task.name for task in self.tasks)
        for task in self.tasks:
            graph.add_edges_from((dep, task.name) for dep in task.deps)
            if task.kind == "wait":
                graph.add_edge(task.collective, task.name)
        return graph

    def reordered(self, names: Iterable[str]) -> Schedule:
        """The same tasks in the order of ``names``.

        Raises:
            ValueError: ``names`` is not a permutation of the tasks.
        """
        by_name = self.by_name
        order = list(names)
        if len(order) != len(self.tasks) or by_name.keys() != set(order):
            missing = sorted(by_name.keys() - set(order))[:5]
            unknown = sorted(set(order) - by_name.keys())[:5]
            raise ValueError(
                f"an order must name each of the {len(self.tasks)} tasks once; got {len(order)} "
                f"names, missing {missing}, unknown {unknown}"
            )
        other = replace(self, tasks=tuple(by_name[name] for name in order))
        # What does not depend on the order is known already.
        known = {name: vars(self)[name] for name in _OF_ANY_ORDER if name in vars(self)}
        vars(other).update(known)
        return other

    def scaled(self, *, communication: float = 1.0, compute: float = 1.0) -> Schedule:
        """The same with all collectives and all compute so many times as long."""
        return replace(self, tasks=tuple(t.scaled(communication, compute) for t in self.tasks))

    def validate(self) -> None:
        """Raise ``ValueError`` unless the order is executable.

        Checked: names are unique, dependences and collectives exist and come earlier, every
        start is waited for exactly once, buffers exist and are written before they are read.
        """
        seen: set[str] = set()
        written: set[str] = {name for name, buffer in self.buffers.items() if buffer.is_input}
        waited: set[str] = set()
        for task in self.tasks:
            self._validate_task(task, seen, written, waited)
            seen.add(task.name)
            written.update(task.writes)
        unwaited = [t.name for t in self.tasks if t.kind == "start" and t.name not in waited]
        if unwaited:
            raise ValueError(f"collectives without a wait: {unwaited[:5]}")

    def _validate_task(
        self, task: Task, seen: set[str], written: set[str], waited: set[str]
    ) -> None:
        if task.name in seen:
            raise ValueError(f"task name {task.name!r} occurs twice")
        late = [dep for dep in task.deps if dep not in seen]
        if late:
            raise ValueError(f"task {task.name!r} comes before {late}, which it depends on")
        unwritten = [name for name in task.reads if name not in written]
        if unwritten:
            raise ValueError(f"task {task.name!r} reads buffers nothing has written: {unwritten}")
        unknown = [name for name in task.writes if name not in self.buffers or name in written]
        if unknown:
            raise ValueError(f"task {task.name!r} writes unknown or written buffers: {unknown}")
        if task.kind == "wait":
            start = self.by_name.get(task.collective)
            if start is None or start.kind != "start" or task.collective not in seen:
                raise ValueError(f"wait {task.name!r}: no earlier start named {task.collective!r}")
            if task.collective in waited:
                raise ValueError(f"collective {task.collective!r} is waited for twice")
            waited.add(task.collective)


_OF_ANY_ORDER = ("by_name", "needs", "holders")
