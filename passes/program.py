"""A Schedule together with what may move in it: all that a policy sees of a graph.

`Program` is neutral: the two adapters (`graph_schedule` for FX graphs, `snode_schedule` for
scheduler nodes) build one, policies turn it into a `Plan`, and `reorder` writes orders for it.
Compute that serves no free collective is *fixed*: it keeps its relative order in every plan. The
one exception are the matmuls that make weight gradients (`defer_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from inductor_overlap.cost_model.memory import LiveBytes
from inductor_overlap.cost_model.pricing import PricedCluster
from inductor_overlap.cost_model.schedule import Schedule, Task
from inductor_overlap.cost_model.wire_time import BucketPrice

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class FreeCollective:
    """A collective that may be moved and merged.

    Attributes:
        name: its start's task name; ``wait`` its wait's.
        kind: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        bucket_key: members of one bucket agree in it (kind, group, dtype, reduction, and phase:
            no barrier and no reduction of one's result stands between two of one phase).
        size_bytes: nccl-tests size (gathered output, scattered input, reduced buffer).
        input_bytes, output_bytes: of its tensors on this rank, padded.
        ranks: global ranks of its group.
        fqn, module: the parameter it serves and that parameter's module; None if unknown.
        input_position: position of the parameter among the graph inputs; payload order.
        unpack_is_fused: its result is read by pointwise kernels only, so that unpacking it from a
            bucket needs no copy of its own.
        absorbed: the task that writes its input, if the kernel that packs a bucket would compute
            that input itself instead (a cast of a gradient), else "".
        pack_saves_bytes: what packing then reads less than its input (more, if negative).
        can_merge: it may join a bucket (its sizes are static and it is not one already).
        follows: name of the reduction whose result it reduces further (HSDP), else "".
        members: names of the collectives it was merged from; empty if it is not a bucket.
    """

    name: str
    wait: str
    kind: str
    bucket_key: tuple[str, ...]
    size_bytes: int
    input_bytes: int
    output_bytes: int
    ranks: tuple[int, ...]
    fqn: str | None = None
    module: str | None = None
    input_position: int = 0
    unpack_is_fused: bool = False
    absorbed: str = ""
    pack_saves_bytes: int = 0
    can_merge: bool = True
    follows: str = ""
    members: tuple[str, ...] = ()

    @property
    def is_gather(self) -> bool:
        return self.kind == "all_gather"


@dataclass(frozen=True)
class Program:
    """A schedule, its free collectives and the names of the tasks that may move with them."""

    schedule: Schedule
    collectives: tuple[FreeCollective, ...]
    movable: frozenset[str]
    prices: PricedCluster
    weight_gradients: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict[str, tuple[str, ...]]
    )
    """Reduction -> the fixed tasks that make its input and serve nothing else, a matmul first.

    They may be deferred: moved, together, behind later fixed tasks.
    """
    bucket_prices: Mapping[tuple[str, ...], BucketPrice] = field(
        default_factory=dict[tuple[str, ...], BucketPrice]
    )
    """Bucket key -> what a bucket takes of its link; without, its bytes at the plateau."""
    is_on_demand: bool = False
    """The tasks are in the order without overlap (`reorder.put_on_demand`)."""

    def __repr__(self) -> str:
        return f"Program({self.schedule!r}, {len(self.collectives)} free collectives)"

    def with_order(self, names: Iterable[str]) -> Program:
        return replace(self, schedule=self.schedule.reordered(names), is_on_demand=False)

    @cached_property
    def by_name(self) -> dict[str, FreeCollective]:
        return {collective.name: collective for collective in self.collectives}

    @cached_property
    def by_wait(self) -> dict[str, FreeCollective]:
        return {collective.wait: collective for collective in self.collectives}

    @cached_property
    def fixed(self) -> tuple[Task, ...]:
        """The tasks that keep their relative order, in that order."""
        return tuple(task for task in self.schedule.tasks if task.name not in self.movable)

    @cached_property
    def windows(self) -> Windows:
        return _find_windows(self)

    @cached_property
    def memory_on_demand(self) -> MemoryOnDemand:
        """Of a program whose tasks are in the order without overlap."""
        assert self.is_on_demand
        return _replay_on_demand(self)

    @cached_property
    def clock_on_demand_us(self) -> list[float]:
        """When compute ends what comes before each fixed task, and before the end, without stalls.

        Of a program whose tasks are in the order without overlap. Packing, unpacking and launches
        count: they are compute that every order has.
        """
        assert self.is_on_demand
        busy_us = self.schedule.machine.busy_us
        clock_us, ends_us = 0.0, [0.0]
        for task in self.schedule.tasks:
            clock_us += busy_us(task)
            if task.name not in self.movable:
                ends_us.append(clock_us)
        return ends_us

    @cached_property
    def prepared_bytes(self) -> dict[str, int]:
        """Free collective -> bytes that what moves with its start writes: packing, casts."""
        buffers = self.schedule.buffers
        return {
            name: sum(buffers[buffer].size_bytes for task in tasks for buffer in task.writes)
            for name, tasks in self._prepared_by.items()
        }

    @cached_property
    def prepare_us(self) -> dict[str, float]:
        """Free collective -> for how long what moves with its start keeps compute."""
        busy_us = self.schedule.machine.busy_us
        return {name: sum(map(busy_us, tasks)) for name, tasks in self._prepared_by.items()}

    @cached_property
    def _prepared_by(self) -> dict[str, list[Task]]:
        return {c.name: self._preparing(c.name) for c in self.collectives}

    def _preparing(self, name: str) -> list[Task]:
        tasks, needs = self.schedule.by_name, self.schedule.needs
        found: set[str] = set()
        pending = list(needs[name])
        while pending:
            current = pending.pop()
            is_own = current in self.movable and tasks[current].kind == "compute"
            if is_own and current not in found:
                found.add(current)
                pending += needs[current]
        return [tasks[name] for name in found]

    def for_bound(self) -> Schedule:
        """The schedule as far as every plan has it: a packing kernel may do all of its casts.

        Such a cast counts for its bytes, without a kernel and a launch of its own.
        """
        schedule = self.schedule
        kernel_us = self.prices.copy_us(1)
        least_us: dict[str, float] = {}
        for c in self.collectives:
            if c.absorbed:
                moved_bytes = max(0, 2 * c.input_bytes - c.pack_saves_bytes)
                alone_us = schedule.by_name[c.absorbed].duration_us
                cast_us = min(alone_us, self.prices.copy_us(moved_bytes // 2)) - kernel_us
                least_us[c.absorbed] = max(0.0, cast_us - schedule.machine.launch_us)
        return replace(
            schedule,
            tasks=tuple(
                replace(task, duration_us=least_us[task.name]) if task.name in least_us else task
                for task in schedule.tasks
            ),
        )

    @cached_property
    def compute_clock_us(self) -> list[float]:
        """When compute would reach each fixed task, and the end, without ever waiting."""
        costs_us = (task.duration_us if task.kind == "compute" else 0.0 for task in self.fixed)
        return list(accumulate(costs_us, initial=0.0))

    def bucket_link_us(self, like: FreeCollective, size_bytes: int) -> float:
        """For how long (us) a bucket of ``size_bytes`` keeps its link; 0 if no price is known."""
        price = self.bucket_prices.get(like.bucket_key)
        return 0.0 if price is None else price.link_us(size_bytes)

    @property
    def gathers(self) -> list[FreeCollective]:
        return [collective for collective in self.collectives if collective.is_gather]

    @property
    def reductions(self) -> list[FreeCollective]:
        return [collective for collective in self.collectives if not collective.is_gather]


def mergeable_by(
    key: Callable[[FreeCollective], _Key], collectives: Iterable[FreeCollective]
) -> dict[_Key, list[FreeCollective]]:
    """Those that may join a bucket, grouped by ``key`` of each, such as its bucket key."""
    grouped: dict[_Key, list[FreeCollective]] = {}
    for collective in collectives:
        if collective.can_merge:
            grouped.setdefault(key(collective), []).append(collective)
    return grouped


def mergeable_by_key(
    collectives: Iterable[FreeCollective],
) -> dict[tuple[str, ...], list[FreeCollective]]:
    """Those that may join a bucket, by bucket key."""
    return mergeable_by(lambda collective: collective.bucket_key, collectives)


@dataclass(frozen=True)
class Windows:
    """Where the fixed tasks of a program need its free collectives.

    Attributes:
        first_use: gather -> index of the first fixed task that needs its result; the number of
            fixed tasks if only graph outputs do.
        ready_at: collective -> index of the fixed task before which it can start first; for a
            gather 0, unless a barrier comes before it.
        needed: per fixed task, the gathers and reductions it needs first of all fixed tasks.
    """

    first_use: dict[str, int]
    ready_at: dict[str, int]
    needed: tuple[tuple[str, ...], ...]


def _find_windows(program: Program) -> Windows:
    """Windows of every free collective; linear in tasks and dependences."""
    needs = program.schedule.needs
    fixed = program.fixed
    by_wait = program.by_wait
    position = {task.name: index for index, task in enumerate(fixed)}
    seen: set[str] = set()
    first_use: dict[str, int] = {}
    needed: list[tuple[str, ...]] = []
    for index, task in enumerate(fixed):
        if all(name in position or name in seen for name in needs[task.name]):
            needed.append(())
            continue
        reached = _movable_ancestors(task.name, needs, position, seen)
        collectives = tuple(by_wait[name].name for name in reached if name in by_wait)
        needed.append(collectives)
        first_use.update(dict.fromkeys(collectives, index))
    ready: dict[str, int] = {}
    ready_at: dict[str, int] = {}
    for collective in program.collectives:
        ready_at[collective.name] = _ready_at(collective.name, needs, position, ready)
    for collective in program.collectives:
        first_use.setdefault(collective.name, len(fixed))
    return Windows(first_use, ready_at, tuple(needed))


def _movable_ancestors(
    task: str, needs: Mapping[str, Sequence[str]], position: Mapping[str, int], seen: set[str]
) -> Iterator[str]:
    """Movable tasks that ``task`` needs and no earlier call has reached."""
    pending = list(needs[task])
    while pending:
        name = pending.pop()
        if name in seen or name in position:
            continue
        seen.add(name)
        yield name
        pending += needs[name]


def _ready_at(
    name: str,
    needs: Mapping[str, Sequence[str]],
    position: Mapping[str, int],
    known: dict[str, int],
) -> int:
    """Index of the first fixed task before which all that ``name`` needs can have run."""
    stack = [name]
    while stack:
        current = stack[-1]
        if current in position:
            known[current] = position[current] + 1
        if current in known:
            stack.pop()
            continue
        unknown = [need for need in needs[current] if need not in known]
        if unknown:
            stack += unknown
        else:
            known[current] = max(map(known.__getitem__, needs[current]), default=0)
    return known[name]


@dataclass(frozen=True)
class MemoryOnDemand:
    """Live bytes of the order without overlap, per fixed task; one more entry for the end.

    Attributes:
        most: most live bytes from the fixed task before it to its own end.
        reducing: the same, only until the reductions between them have ended.
        rest: the same, only after the reductions between them have ended.
        own: the same, only after all collectives before it have been waited for.
        reduced: live bytes once the reductions before it have ended.
        before: live bytes once all collectives before it have been waited for.
    """

    most: list[int]
    reducing: list[int]
    rest: list[int]
    own: list[int]
    reduced: list[int]
    before: list[int]


def _replay_on_demand(program: Program) -> MemoryOnDemand:
    rows: list[tuple[int, int, int, int, int, int]] = []
    live = LiveBytes(program.schedule)
    by_wait, movable = program.by_wait, program.movable
    reducing, rest, own, reduced, before = 0, 0, 0, live.now, live.now
    for task in program.schedule.tasks:
        during = live.run(task)
        if during > rest:
            rest = during
        if during > own:
            own = during
        collective = by_wait.get(task.name)
        if collective is not None:
            own, before = 0, live.now
            if not collective.is_gather:
                reducing, rest, reduced = max(reducing, rest), 0, live.now
        elif task.name not in movable:
            rows.append((max(reducing, rest), reducing, rest, own, reduced, before))
            reducing, rest, own, reduced, before = 0, 0, 0, live.now, live.now
    rows.append((max(reducing, rest), reducing, rest, own, reduced, live.now))
    return MemoryOnDemand(*map(list, zip(*rows, strict=True)))
