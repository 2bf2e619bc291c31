"""The scheduler pass: correct the order after fusion, and pin it.

Fusion can delay a start (its pack kernel fused with later work) or pull a reader of a wait
forward. `overlap_snodes` times the fused kernels, keeps the order in which collectives start, which
the FX pass chose and all ranks share, moves starts and waits to where the real kernels hide them
best, and pins the result with fake `WeakDep`s, so that Inductor's later peak-memory reordering
keeps it. Compute is never moved. A new order is used only if the simulator finds it faster than the
incoming one within the incoming peak.

Pins are a chain through every start, every wait, every op that may communicate in a way of its own
and every kernel that takes real time; small kernels between them stay free for Inductor.
"""

# torch does not type Inductor's scheduler for users.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch.fx as fx

from inductor_overlap.cost_model.pricing import PricedCluster
from inductor_overlap.cost_model.schedule import Schedule, Task
from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.passes.list_schedule import list_schedule
from inductor_overlap.passes.program import Program
from inductor_overlap.passes.snode_schedule import SnodeProgram, read_snodes

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

_PINNED_SHARE = 1e-3
"""Kernels that take at least this share of all compute are pinned between collectives."""


def overlap_snodes(
    snodes: Sequence[BaseSchedulerNode], graph: fx.Graph, prices: PricedCluster
) -> list[BaseSchedulerNode]:
    """``snodes`` in the order to generate code in, pinned; unchanged if nothing is free to move."""
    if not snodes:
        return []
    source = read_snodes(snodes, graph, prices)
    if not source.program.collectives:
        return list(snodes)
    program = retime(source.program)
    _pin(_snodes(source, pinned_tasks(program.schedule, source.barriers)))
    return _snodes(source, program.schedule.tasks)


def _snodes(source: SnodeProgram, tasks: Iterable[Task]) -> list[BaseSchedulerNode]:
    return [snode for task in tasks for snode in source.snodes[task.name]]


def retime(program: Program) -> Program:
    """The program in the best order found that keeps its issue order and its peak."""
    before = simulate(program.schedule)
    starts = [task.name for task in program.schedule.tasks if task.kind == "start"]
    longest_us = max(program.schedule.by_name[c.name].duration_us for c in program.collectives)
    best, best_us = program, before.step_us * (1 - 1e-9)
    for prefetch_us in (2.0 * longest_us, float("inf")):
        order = list_schedule(
            program,
            memory_limit_bytes=before.peak_bytes,
            prefetch_us=prefetch_us,
            issue_order=starts,
        )
        candidate = program.with_order(order)
        if [t.name for t in candidate.schedule.tasks if t.kind == "start"] != starts:
            continue
        timeline = simulate(candidate.schedule)
        if timeline.step_us < best_us and timeline.peak_bytes <= before.peak_bytes:
            best, best_us = candidate, timeline.step_us
    return best


def pinned_tasks(schedule: Schedule, barriers: Collection[str] = ()) -> list[Task]:
    """The tasks whose relative order is pinned.

    Collectives, waits, ``barriers``, and kernels that take time.
    """
    total_us = sum(task.duration_us for task in schedule.tasks if task.kind == "compute")
    return [
        task
        for task in schedule.tasks
        if task.kind != "compute"
        or task.name in barriers
        or task.duration_us > _PINNED_SHARE * total_us
    ]


def _pin(pinned: Sequence[BaseSchedulerNode]) -> None:
    for earlier, later in pairwise(pinned):
        _add_order_dep(earlier, later)


def _add_order_dep(earlier: BaseSchedulerNode, later: BaseSchedulerNode) -> None:
    """Make ``later`` come after ``earlier``, without keeping any buffer alive for it."""
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import FusedSchedulerNode, refresh_group_node_dependencies

    buffer = next(iter(earlier.get_buffer_names()))
    dep = WeakDep(buffer, mutating_buf=next(iter(later.get_buffer_names())), is_fake=True)
    if isinstance(later, FusedSchedulerNode):
        later.snodes[0].add_fake_dep(dep)
        refresh_group_node_dependencies(later)
    else:
        later.add_fake_dep(dep)
