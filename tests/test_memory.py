"""Live bytes of hand-written orders, each figure added up beside it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from support.schedules import compute, schedule, schedules, start, wait

from inductor_overlap.cost_model.memory import buffer_lifetimes, memory_profile
from inductor_overlap.cost_model.schedule import Buffer, Schedule
from inductor_overlap.cost_model.simulate import simulate

pytestmark = pytest.mark.quick


def test_no_tasks_no_profile() -> None:
    assert memory_profile(schedule()) == []


def test_outputs_are_allocated_before_inputs_are_freed() -> None:
    case = schedule(
        compute("a", 1, writes=("x",)),
        compute("b", 1, reads=("x",), writes=("y",)),
        compute("c", 1, reads=("y",), writes=("z",)),
        buffers=(Buffer("x", 1), Buffer("y", 10), Buffer("z", 100, is_output=True)),
    )
    assert memory_profile(case) == [1, 11, 110]
    timeline = simulate(case)
    assert (timeline.peak_bytes, timeline.peak_task) == (110, "c")


def test_peak_task_is_the_first_at_the_peak() -> None:
    case = schedule(
        compute("a", 1, writes=("x",)),
        compute("b", 1, writes=("y",)),
        buffers=(Buffer("x", 5), Buffer("y", 5)),
    )
    assert simulate(case).peak_task == "a"


def test_collective_holds_input_and_output_until_its_wait() -> None:
    # shard (2) read by the start, full (8) written by it: both until the wait, full until "use".
    case = schedule(
        compute("pack", 1, writes=("shard",)),
        start("s", 1, reads=("shard",), writes=("full",)),
        compute("other", 1),
        wait("s"),
        compute("use", 1, reads=("full",)),
        compute("after", 1),
        buffers=(Buffer("shard", 2), Buffer("full", 8)),
    )
    assert memory_profile(case) == [2, 10, 10, 10, 8, 0]


def test_earlier_wait_frees_earlier() -> None:
    tasks = (start("s", 1, reads=("shard",), writes=("full",)), compute("other", 1), wait("s"))
    buffers = (Buffer("shard", 2, is_input=True), Buffer("full", 8))
    case = schedule(*tasks, buffers=buffers)
    assert memory_profile(case) == [10, 10, 10]
    assert memory_profile(case.reordered(["s", "wait_s", "other"])) == [10, 10, 0]


def test_reader_after_the_wait_extends_the_input() -> None:
    case = schedule(
        start("s", 1, reads=("grad",), writes=("part",)),
        wait("s"),
        compute("other", 1),
        compute("norm", 1, reads=("grad",)),
        buffers=(Buffer("grad", 4, is_input=True), Buffer("part", 1, is_output=True)),
    )
    assert memory_profile(case) == [5, 5, 5, 5]


def test_inputs_live_from_the_beginning_to_their_last_reader() -> None:
    case = schedule(
        compute("a", 1),
        compute("b", 1, reads=("saved",)),
        compute("c", 1),
        buffers=(Buffer("saved", 4, is_input=True), Buffer("unread", 1, is_input=True)),
    )
    assert memory_profile(case) == [5, 5, 1]  # an input that nothing reads stays


def test_outputs_live_to_the_end_and_dead_writes_die_at_once() -> None:
    case = schedule(
        compute("a", 1, writes=("out", "dead")),
        compute("b", 1),
        buffers=(Buffer("out", 3, is_output=True), Buffer("dead", 4)),
    )
    assert memory_profile(case) == [7, 3]


def test_unread_output_of_a_collective_dies_at_its_wait() -> None:
    case = schedule(
        start("s", 1, writes=("full",)),
        compute("a", 1),
        wait("s"),
        compute("b", 1),
        buffers=(Buffer("full", 3),),
    )
    assert memory_profile(case) == [3, 3, 3, 0]


def test_buffer_nothing_writes_is_never_live() -> None:
    case = schedule(compute("a", 1), buffers=(Buffer("x", 3),))
    assert memory_profile(case) == [0]
    assert buffer_lifetimes(case) == {}


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_agrees_with_an_allocator_that_replays_frees(case: Schedule) -> None:
    assert memory_profile(case) == _replayed(case)


def _replayed(case: Schedule) -> list[int]:
    """Another way to count: at each task, ask of every buffer whether anyone still needs it."""
    tasks = case.tasks
    done_at = {t.collective: i for i, t in enumerate(tasks) if t.kind == "wait"}
    profile: list[int] = []
    for at in range(len(tasks)):
        live = 0
        for name, buffer in case.buffers.items():
            users = [i for i, t in enumerate(tasks) if name in t.reads or name in t.writes]
            users += [done_at[tasks[i].name] for i in users if tasks[i].kind == "start"]
            born = any(name in t.writes for t in tasks[: at + 1])
            if born and (buffer.is_output or max(users) >= at):
                live += buffer.size_bytes
        profile.append(live)
    return profile
