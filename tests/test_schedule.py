"""The neutral schedule refuses what cannot run and says why."""

from __future__ import annotations

import math

import pytest
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model.schedule import Buffer, Machine, Task

pytestmark = pytest.mark.quick


def test_valid_order_passes() -> None:
    schedule(
        compute("a", 1, reads=("in",), writes=("x",)),
        start("s", 2, "a", reads=("x",), writes=("y",)),
        wait("s"),
        compute("b", 1, "wait_s", reads=("y",)),
        buffers=(Buffer("in", 1, is_input=True), Buffer("x", 1), Buffer("y", 1)),
    ).validate()


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((compute("a", 1), compute("a", 1)), "'a' occurs twice"),
        ((compute("a", 1, "b"), compute("b", 1)), r"'a' comes before \['b'\]"),
        ((compute("a", 1, reads=("x",)),), r"reads buffers nothing has written: \['x'\]"),
        ((compute("a", 1, writes=("x",)),), r"writes unknown or written buffers: \['x'\]"),
        ((wait("s"),), r"'wait_s' comes before \['s'\]"),
        ((Task("w", "wait", collective="s"),), "no earlier start named 's'"),
        ((compute("s", 1), wait("s")), "no earlier start named 's'"),
        ((start("s", 1),), r"collectives without a wait: \['s'\]"),
        (
            (start("s", 1), wait("s"), Task("w", "wait", collective="s")),
            "'s' is waited for twice",
        ),
    ],
)
def test_invalid_orders_are_refused(tasks: tuple[Task, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(*tasks).validate()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Task("s", "start", 1.0), "names no queue"),
        (lambda: Task("w", "wait"), "names no collective"),
        (lambda: compute("a", -1.0), "duration_us must be finite and >= 0, got -1"),
        (lambda: compute("a", math.nan), "got nan"),
        (lambda: compute("a", math.inf), "got inf"),
        (lambda: start("s", 1.0, wire_us=math.nan), "wire_us must be >= 0, got nan"),
        (lambda: start("s", 1.0, link_us=math.nan), "link_us must be >= 0, got nan"),
        (lambda: Buffer("b", -1), "size_bytes must be >= 0, got -1"),
        (lambda: Machine(launch_us=-1.0), "launch_us must be finite and >= 0"),
        (
            lambda: Machine(collective_launch_us=-1.0),
            "collective_launch_us must be finite and >= 0",
        ),
        (lambda: Machine(contention=0.5), "contention must be finite and >= 1, got 0.5"),
        (lambda: Machine(queue_width=0), "queue_width must be >= 1, got 0"),
    ],
)
def test_impossible_values_are_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=message):
        build()


def test_wire_is_the_whole_duration_unless_given() -> None:
    assert start("s", 4.0).wire_us == 4.0
    assert start("s", 4.0, wire_us=3.0).wire_us == 3.0
    assert start("s", 4.0, wire_us=5.0).wire_us == 4.0
    assert compute("a", 4.0).wire_us == 0.0


@pytest.mark.parametrize(("given_us", "link_us"), [(0.0, 3.0), (3.5, 3.5), (5.0, 4.0)])
def test_the_link_is_kept_between_wire_and_duration(given_us: float, link_us: float) -> None:
    task = start("s", 4.0, wire_us=3.0, link_us=given_us)
    assert task.link_us == link_us
    assert task.latency_us == 1.0
    assert task.scaled(communication=2.0, compute=1.0).link_us == 2 * link_us


def test_graph_has_an_edge_from_start_to_wait() -> None:
    case = schedule(compute("a", 1), start("s", 1, "a"), Task("w", "wait", collective="s"))
    assert set(case.graph.edges) == {("a", "s"), ("s", "w")}


def test_reordered_keeps_tasks() -> None:
    case = schedule(compute("a", 1), compute("b", 2), launch_us=1)
    swapped = case.reordered(["b", "a"])
    assert [task.name for task in swapped.tasks] == ["b", "a"]
    assert swapped.machine == case.machine


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "c"], ["a", "b", "b"]])
def test_reordered_refuses_other_tasks(names: list[str]) -> None:
    with pytest.raises(ValueError, match="must name each of the 2 tasks once"):
        schedule(compute("a", 1), compute("b", 2)).reordered(names)


def test_machine_links_default_to_the_queue() -> None:
    machine = Machine(links={"p": "net"})
    assert (machine.link("p"), machine.link("q")) == ("net", "q")


def test_repr_counts() -> None:
    case = schedule(start("s", 1), wait("s"), buffers=(Buffer("b", 1),))
    assert repr(case) == "Schedule(2 tasks, 1 collectives, 1 buffers)"


@pytest.mark.parametrize(("width", "expected_us"), [(1, 30.0), (2, 15.0), (4, 10.0)])
def test_a_link_is_kept_for_the_bytes_or_the_share_of_a_queue(
    width: int, expected_us: float
) -> None:
    """30 us, of which 10 are bytes."""
    assert Machine(queue_width=width).occupied_us(30.0, 10.0) == expected_us


def test_launches_keep_compute_busy_and_waits_and_views_do_not() -> None:
    machine = Machine(launch_us=3.0, collective_launch_us=5.0)
    tasks = compute("mm", 10), compute("view", 0), start("gather", 20), wait("gather")
    assert [machine.busy_us(task) for task in tasks] == [13.0, 0.0, 5.0, 0.0]
    assert Machine(launch_us=3.0).busy_us(start("gather", 20)) == 3.0
