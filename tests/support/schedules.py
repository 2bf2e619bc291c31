"""Short spellings for hand-written schedules, and hypothesis strategies for random ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from inductor_overlap.cost_model.schedule import Buffer, Machine, Schedule, Task


def compute(name: str, duration_us: float, *deps: str, **fields: Any) -> Task:
    return Task(name, "compute", duration_us, deps=deps, **fields)


def start(
    name: str,
    duration_us: float,
    *deps: str,
    queue: str = "pg",
    wire_us: float = math.inf,
    **fields: Any,
) -> Task:
    return Task(name, "start", duration_us, queue=queue, wire_us=wire_us, deps=deps, **fields)


def wait(collective: str, *deps: str, **fields: Any) -> Task:
    """The wait of ``collective``, named ``wait_<collective>``."""
    name = f"wait_{collective}"
    return Task(name, "wait", collective=collective, deps=(collective, *deps), **fields)


def schedule(*tasks: Task, buffers: tuple[Buffer, ...] = (), **machine: Any) -> Schedule:
    return Schedule(tasks, {buffer.name: buffer for buffer in buffers}, Machine(**machine))


@dataclass(frozen=True)
class Shape:
    """Size and kind of the random schedules: how many tasks, on which machines.

    Attributes:
        num_items: most compute tasks and collectives together (a collective is two tasks).
        queues: communicators to draw from.
        shared_link: whether the communicators may share one link.
    """

    num_items: int = 12
    queues: tuple[str, ...] = ("pg0", "pg1")
    shared_link: bool = True


@st.composite
def machines(draw: st.DrawFn, shape: Shape = Shape()) -> Machine:
    shared = shape.shared_link and draw(st.booleans())
    return Machine(
        launch_us=draw(st.sampled_from([0.0, 1.0])),
        contention=draw(st.sampled_from([1.0, 1.25, 2.0])),
        queue_width=draw(st.sampled_from([1, 1, 2])),
        links=dict.fromkeys(shape.queues, "net") if shared else {},
        collective_launch_us=draw(st.sampled_from([None, 0.0, 2.0])),
    )


@st.composite
def schedules(draw: st.DrawFn, shape: Shape = Shape()) -> Schedule:
    """A valid schedule: random dependences on earlier tasks, waits at random later places."""
    tasks: list[Task] = []
    buffers: dict[str, Buffer] = {}
    pending: list[str] = []
    for index in range(draw(st.integers(1, shape.num_items))):
        known = sorted(buffers)
        reads = tuple(draw(st.lists(st.sampled_from(known), max_size=2))) if known else ()
        buffers[f"b{index}"] = Buffer(
            f"b{index}", draw(st.integers(0, 9)), is_output=draw(st.booleans())
        )
        deps = tuple(
            f"wait_{task.name}" if task.kind == "start" else task.name
            for task in tasks
            if set(task.writes) & set(reads)
        )
        new = _draw_task(draw, index, deps, reads, shape)
        for name in [dep.removeprefix("wait_") for dep in deps if dep.startswith("wait_")]:
            if name in pending:
                pending.remove(name)
                tasks.append(wait(name))
        tasks.append(new)
        if new.kind == "start":
            pending.append(new.name)
        while pending and draw(st.booleans()):
            tasks.append(wait(pending.pop(draw(st.integers(0, len(pending) - 1)))))
    tasks.extend(wait(name) for name in pending)
    return Schedule(tuple(tasks), buffers, draw(machines(shape)))


def _draw_task(
    draw: st.DrawFn, index: int, deps: tuple[str, ...], reads: tuple[str, ...], shape: Shape
) -> Task:
    duration_us = float(draw(st.integers(0, 6)))
    writes = (f"b{index}",)
    if draw(st.booleans()):
        return compute(f"c{index}", duration_us, *deps, reads=reads, writes=writes)
    return start(
        f"s{index}",
        duration_us,
        *deps,
        queue=draw(st.sampled_from(shape.queues)),
        wire_us=float(draw(st.integers(0, int(duration_us)))),
        link_us=float(draw(st.integers(0, int(duration_us)))),
        reads=reads,
        writes=writes,
    )
