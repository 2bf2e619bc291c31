"""The scheduler pass on programs: what it re-times, what it keeps, what it pins."""

from __future__ import annotations

import pytest
from support.programs import free, program
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model.schedule import Buffer
from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.passes.program import Program
from inductor_overlap.passes.scheduler import pinned_tasks, retime

pytestmark = pytest.mark.quick


def names(given: Program) -> list[str]:
    return [task.name for task in given.schedule.tasks]


def late_gather(peak_bytes: int) -> Program:
    """What fusion leaves behind: g2 starts only after c1, although its chain allows it before."""
    buffers = (Buffer("w2", 100), Buffer("big", peak_bytes))
    tasks = (
        compute("c0", 10),
        compute("c1", 10, "c0"),
        start("g2", 10, writes=("w2",)),
        wait("g2", reads=("w2",)),
        compute("c2", 10, "c1", "wait_g2", reads=("w2",)),
        compute("c3", 10, "c2", writes=("big",)),
    )
    return program(schedule(*tasks, buffers=buffers), [free("g2", "all_gather", 100)])


def test_a_delayed_start_is_moved_back_before_compute() -> None:
    given = late_gather(peak_bytes=1000)
    assert simulate(given.schedule).step_us == 50
    better = retime(given)
    assert simulate(better.schedule).step_us == 40
    assert names(better).index("g2") < names(better).index("c1")


def test_compute_keeps_its_order() -> None:
    better = retime(late_gather(peak_bytes=1000))
    assert [n for n in names(better) if n.startswith("c")] == ["c0", "c1", "c2", "c3"]


def test_the_incoming_peak_is_a_limit() -> None:
    """Two gathers whose parameters do not fit beside each other stay where they are."""
    buffers = (Buffer("w1", 100), Buffer("w2", 100))
    tasks = (
        start("g1", 10, writes=("w1",)),
        wait("g1", reads=("w1",)),
        compute("c1", 10, "wait_g1", reads=("w1",)),
        start("g2", 10, writes=("w2",)),
        wait("g2", reads=("w2",)),
        compute("c2", 10, "c1", "wait_g2", reads=("w2",)),
    )
    gathers = [free("g1", "all_gather", 100), free("g2", "all_gather", 100)]
    given = program(schedule(*tasks, buffers=buffers), gathers)
    assert names(retime(given)) == names(given)


def test_the_issue_order_of_the_graph_pass_is_kept() -> None:
    """g1 is needed first, but the graph pass, and so every other rank, starts g2 first."""
    tasks = (
        start("g2", 10),
        start("g1", 10),
        compute("c0", 30),
        wait("g1"),
        compute("c1", 10, "c0", "wait_g1"),
        wait("g2"),
        compute("c2", 10, "c1", "wait_g2"),
    )
    gathers = [free("g1", "all_gather", 100), free("g2", "all_gather", 100)]
    better = retime(program(schedule(*tasks), gathers))
    assert [n for n in names(better) if n in ("g1", "g2")] == ["g2", "g1"]


def test_collectives_and_real_kernels_are_pinned_and_small_ones_are_not() -> None:
    """The chain of pins leaves out kernels below a thousandth of all compute."""
    tasks = (
        start("g1", 10),
        compute("view", 0),
        compute("large", 1000),
        compute("small", 0.5),
        wait("g1"),
        compute("medium", 5, "wait_g1"),
    )
    pinned = [task.name for task in pinned_tasks(schedule(*tasks))]
    assert pinned == ["g1", "large", "wait_g1", "medium"]
