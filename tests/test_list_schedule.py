"""The list scheduler on hand-computed programs: one link, gathers and scatters of 10 us each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.programs import free, program
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model.schedule import Buffer, Task
from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.passes.list_schedule import list_schedule, reductions_together
from inductor_overlap.passes.program import Program
from inductor_overlap.passes.reorder import put_on_demand

pytestmark = pytest.mark.quick


def step_us(given: Program, order: list[str]) -> float:
    ordered = given.with_order(order)
    ordered.schedule.validate()
    return simulate(ordered.schedule).step_us


def two_layers() -> Program:
    """g1 -> c1 -> c2 <- g2, everything 10 us; a gathered parameter is 100 bytes."""
    buffers = (Buffer("w1", 100), Buffer("w2", 100), Buffer("x", 50, is_output=True))
    tasks = (
        start("g1", 10, writes=("w1",)),
        wait("g1", reads=("w1",)),
        compute("c1", 10, "wait_g1", reads=("w1",)),
        start("g2", 10, writes=("w2",)),
        wait("g2", reads=("w2",)),
        compute("c2", 10, "c1", "wait_g2", reads=("w2",), writes=("x",)),
    )
    gathers = [free("g1", "all_gather", 100), free("g2", "all_gather", 100)]
    return program(schedule(*tasks, buffers=buffers), gathers)


def test_a_gather_is_hidden_behind_the_layer_before() -> None:
    given = two_layers()
    order = list_schedule(given)
    assert order == ["g1", "wait_g1", "g2", "c1", "wait_g2", "c2"]
    # g1 0-10 exposed, c1 10-20 beside g2 10-20, c2 20-30; on demand it is 40.
    assert step_us(given, order) == 30
    assert simulate(given.schedule).step_us == 40


@pytest.mark.parametrize(("limit", "expected_us"), [(200, 30), (199, 40)])
def test_a_gather_starts_early_only_within_the_limit(limit: int, expected_us: float) -> None:
    """Beside c1 both parameters live: 200 bytes."""
    given = two_layers()
    order = list_schedule(given, memory_limit_bytes=limit)
    assert step_us(given, order) == expected_us
    assert simulate(given.with_order(order).schedule).peak_bytes <= limit


@pytest.mark.parametrize(("limit", "expected_us"), [(225, 32), (224, 42)])
def test_what_a_gather_is_cast_from_counts_too(limit: int, expected_us: float) -> None:
    """Beside c1 live both parameters, 200 bytes, and the 25 that g2's cast has written."""
    given = two_layers()
    casts = [compute(f"cast{i}", 1, writes=(f"shard{i}",)) for i in (1, 2)]
    starts = {
        f"g{i}": replace(given.schedule.by_name[f"g{i}"], deps=(f"cast{i}",), reads=(f"shard{i}",))
        for i in (1, 2)
    }
    tasks = [starts.get(task.name, task) for task in given.schedule.tasks]
    buffers = [*given.schedule.buffers.values(), Buffer("shard1", 25), Buffer("shard2", 25)]
    changed = schedule(casts[0], *tasks[:3], casts[1], *tasks[3:], buffers=tuple(buffers))
    given = replace(given, schedule=changed, movable=given.movable | {"cast1", "cast2"})
    assert given.prepared_bytes == {"g1": 25, "g2": 25}
    order = list_schedule(given, memory_limit_bytes=limit)
    assert simulate(given.with_order(order).schedule).peak_bytes <= limit
    assert step_us(given, order) == expected_us


def test_prefetch_window_holds_a_gather_back() -> None:
    """g2's latest safe start is 0 on a clock without stalls: 10 us of window is enough, -1 not."""
    given = two_layers()
    assert step_us(given, list_schedule(given, prefetch_us=10)) == 30
    assert step_us(given, list_schedule(given, prefetch_us=-20)) == 40


def test_a_queue_that_runs_two_starts_the_next_when_its_bytes_fit() -> None:
    """Half of a gather's 20 us are bytes: the link is free for g2 at 10, before c0 ends at 15."""
    tasks = (
        compute("c0", 15),
        start("g1", 20, wire_us=10, writes=("w1",)),
        wait("g1", reads=("w1",)),
        start("g2", 20, wire_us=10, writes=("w2",)),
        wait("g2", reads=("w2",)),
        compute("c1", 10, "c0", "wait_g1", "wait_g2", reads=("w1", "w2")),
    )
    gathers = [free("g1", "all_gather", 100), free("g2", "all_gather", 100)]
    buffers = (Buffer("w1", 100), Buffer("w2", 100))
    two = program(schedule(*tasks, buffers=buffers, queue_width=2), gathers)
    order = list_schedule(two)
    assert order[:3] == ["g1", "g2", "c0"]
    # Latencies 0-10, then 20 us of bytes, c1 30-40.
    assert step_us(two, order) == 40
    one = program(schedule(*tasks, buffers=buffers), gathers)
    assert list_schedule(one)[:3] == ["g1", "c0", "g2"]


def test_compute_packs_before_the_link_is_free() -> None:
    """The next bucket is packed beside the one in flight, whose end is the end of compute.

    Packed behind c0, g1 would go on the link 5 us after g0 has left it, and end at 45.
    """
    tasks = (
        start("g0", 20),
        compute("c0", 20),
        wait("g0"),
        compute("c1", 15, "c0", "wait_g0"),
        compute("pack1", 5),
        start("g1", 20, "pack1"),
        wait("g1"),
        compute("c2", 20, "c1", "wait_g1"),
    )
    given = program(schedule(*tasks), [free(f"g{i}", "all_gather", 100) for i in range(2)])
    given = replace(given, movable=given.movable | {"pack1"})
    assert given.prepare_us == {"g0": 0.0, "g1": 5.0}
    order = list_schedule(given)
    assert order[:4] == ["g0", "pack1", "g1", "c0"]
    # g0 0-20, g1 20-40; pack 0-5, c0 to 25, c1 to 40, c2 to 60.
    assert step_us(given, order) == 60


def test_links_are_busy_while_compute_unpacks() -> None:
    """Behind g0, which compute waits for until 10, g1 takes 10-15 and g2 15-25.

    Compute unpacks until 20 and then does c0: without the unpacking g2 would seem not to be due
    before c0 has ended.
    """
    tasks: list[Task] = []
    for i, (gather_us, unpack_us) in enumerate([(10, 10), (5, 0), (10, 0)]):
        tasks += [start(f"g{i}", gather_us), wait(f"g{i}")]
        tasks.append(compute(f"unpack{i}", unpack_us, f"wait_g{i}"))
        tasks.append(compute(f"c{i}", 1, f"unpack{i}", *([f"c{i - 1}"] if i else [])))
    given = program(schedule(*tasks), [free(f"g{i}", "all_gather", 100) for i in range(3)])
    given = replace(given, movable=given.movable | {f"unpack{i}" for i in range(3)})
    order = list_schedule(given)
    assert order.index("g2") < order.index("unpack0")
    # c0 20-21, c1 21-22, stall to 25, c2 25-26.
    assert step_us(given, order) == 26


def test_latest_starts_count_packing_and_launches() -> None:
    """Compute is with c0 at 4, packs until 9, launches g until 11, and is with c1 at 15."""
    tasks = (
        compute("c0", 3),
        compute("pack", 4),
        start("g", 10, "pack"),
        wait("g"),
        compute("c1", 3, "c0", "wait_g"),
    )
    costs = schedule(*tasks, launch_us=1.0, collective_launch_us=2.0)
    given = program(costs, [free("g", "all_gather", 100)])
    given = put_on_demand(replace(given, movable=given.movable | {"pack"}))
    assert given.clock_on_demand_us == [0.0, 4.0, 15.0]


def layers(*gathers: tuple[str, float, float], **machine: Any) -> Program:
    """A kernel of 1 us behind each gather; of each its queue, time and time on the link (us)."""
    tasks: list[Task] = []
    for i, (queue, duration_us, wire_us) in enumerate(gathers):
        tasks += [start(f"g{i}", duration_us, queue=queue, wire_us=wire_us), wait(f"g{i}")]
        tasks.append(compute(f"c{i}", 1, f"wait_g{i}"))
    found = [free(f"g{i}", "all_gather", 100) for i in range(len(gathers))]
    return program(schedule(*tasks, **machine), found)


def test_other_links_are_busy_while_compute_stalls() -> None:
    """Both gathers at 0-30, kernels to 32; the second begun after the first: 62."""
    given = layers(("a", 30, 30), ("b", 30, 30))
    order = list_schedule(given)
    assert order[:3] == ["g0", "g1", "wait_g0"]
    assert step_us(given, order) == 32


def test_a_queue_that_runs_two_has_two_while_compute_stalls() -> None:
    """Latencies 0-10, the bytes of two 10-30, the third 30-50; one at a time it is 61."""
    given = layers(*[("a", 20, 10)] * 3, queue_width=2)
    order = list_schedule(given)
    assert order[:3] == ["g0", "g1", "wait_g0"]
    assert step_us(given, order) == 51


def test_links_are_filled_while_compute_stalls_in_a_fixed_wait() -> None:
    """r0 10-20 and r1 20-30 beside the all-reduce at 10-40; behind its wait r1 ends at 50."""
    tasks = (
        compute("c0", 10),
        start("r0", 10, "c0"),
        wait("r0"),
        start("r1", 10, "c0"),
        wait("r1"),
        start("ar", 30, "c0", queue="tp"),
        wait("ar"),
        compute("c1", 1, "wait_ar"),
    )
    reductions = [free(name, "reduce_scatter", 100) for name in ("r0", "r1")]
    given = program(schedule(*tasks), reductions)
    order = list_schedule(given)
    assert order.index("r1") < order.index("wait_ar")
    assert step_us(given, order) == 41


def test_what_is_live_in_a_fixed_wait_counts() -> None:
    """The all-reduce holds 100 bytes beside the base of 200: g1's 100 do not fit until its end."""
    buffers = (Buffer("base", 200, is_input=True), Buffer("a", 100), Buffer("w1", 100))
    tasks = (
        compute("c0", 10, writes=("a",)),
        start("ar", 30, "c0", queue="tp", reads=("a",)),
        wait("ar", reads=("a",)),
        start("g1", 10, writes=("w1",)),
        wait("g1", reads=("w1",)),
        compute("c1", 10, "wait_ar", "wait_g1", reads=("w1", "base")),
    )
    given = program(schedule(*tasks, buffers=buffers), [free("g1", "all_gather", 100)])
    for limit, peak_bytes in [(399, 300), (400, 400)]:
        order = list_schedule(given, memory_limit_bytes=limit)
        assert simulate(given.with_order(order).schedule).peak_bytes == peak_bytes


def test_all_gathers_of_a_task_count_before_a_reduction_starts() -> None:
    """In c1 live: two weights and the gradient, 300 bytes; the scatter's shard would be 50 more.

    Neither gather starts beside c0.
    """
    buffers = (*(Buffer(name, 100) for name in ("grad", "w1", "w2")), Buffer("shard", 50))
    tasks = (
        compute("c0", 10, writes=("grad",)),
        start("r0", 10, "c0", queue="b", reads=("grad",), writes=("shard",)),
        wait("r0", reads=("grad", "shard")),
        start("g1", 10, writes=("w1",)),
        wait("g1", reads=("w1",)),
        start("g2", 10, writes=("w2",)),
        wait("g2", reads=("w2",)),
        compute("c1", 10, "c0", "wait_g1", "wait_g2", reads=("w1", "w2")),
    )
    gathers = [free(name, "all_gather", 100) for name in ("g1", "g2")]
    given = program(
        schedule(*tasks, buffers=buffers), [free("r0", "reduce_scatter", 100), *gathers]
    )
    for limit, peak_bytes in [(349, 300), (350, 350)]:
        order = list_schedule(given, memory_limit_bytes=limit, prefetch_us=-20)
        assert simulate(given.with_order(order).schedule).peak_bytes == peak_bytes


def test_what_joins_a_bucket_ends_with_it() -> None:
    """Both scatters as one: so do the all-reduces behind them, though two may be in flight."""
    tasks = [compute("c0", 10)]
    for i in (0, 1):
        tasks += [start(f"r{i}", 3, "c0"), wait(f"r{i}")]
        tasks += [start(f"a{i}", 2, f"wait_r{i}", queue="b"), wait(f"a{i}")]
    tasks += [compute(f"c{i}", 10, f"c{i - 1}") for i in (1, 2)]
    scatters = [free(f"r{i}", "reduce_scatter", 200) for i in (0, 1)]
    all_reduces = [free(f"a{i}", "all_reduce", 100, follows=f"r{i}") for i in (1, 0)]
    given = program(schedule(*tasks, queue_width=2), [*scatters, *all_reduces])
    longest_us = {"reduce_scatter": 100.0, "all_reduce": 100.0}
    together = reductions_together(given, longest_us=longest_us)
    assert [[each.name for each in group] for group in together] == [["r0", "r1"], ["a1", "a0"]]


def backward(gradient_bytes: int = 100) -> Program:
    """c1 makes a gradient that r1 scatters; c2 needs g2; c3 follows."""
    buffers = (
        Buffer("grad", gradient_bytes),
        Buffer("shard", 50, is_output=True),
        Buffer("w2", 100),
        Buffer("x", 10, is_output=True),
    )
    tasks = (
        compute("c1", 10, writes=("grad",)),
        start("r1", 10, "c1", reads=("grad",), writes=("shard",)),
        wait("r1", reads=("grad", "shard")),
        start("g2", 10, writes=("w2",)),
        wait("g2", reads=("w2",)),
        compute("c2", 10, "c1", "wait_g2", reads=("w2",)),
        compute("c3", 10, "c2", writes=("x",)),
    )
    free_ones = [free("r1", "reduce_scatter", 100), free("g2", "all_gather", 100)]
    return program(schedule(*tasks, buffers=buffers), free_ones)


def test_a_scatter_is_hidden_and_its_wait_comes_last() -> None:
    given = backward()
    order = list_schedule(given)
    # g2 beside c1, r1 beside c2: nothing is exposed; on demand it is 50.
    assert step_us(given, order) == 30
    assert order.index("g2") < order.index("c1")
    assert order.index("c3") < order.index("wait_r1")


def test_a_gather_that_compute_is_about_to_need_goes_before_a_pending_scatter() -> None:
    """The queue is empty when both could start; the scatter first would delay c2 by 10 us."""
    buffers = (Buffer("grad", 100), Buffer("shard", 50, is_output=True), Buffer("w2", 100))
    tasks = (
        compute("c0", 10, writes=("grad",)),
        start("r1", 10, "c0", reads=("grad",), writes=("shard",)),
        wait("r1", reads=("grad", "shard")),
        compute("c1", 10, "c0"),
        start("g2", 10, writes=("w2",)),
        wait("g2", reads=("w2",)),
        compute("c2", 20, "c1", "wait_g2", reads=("w2",)),
    )
    free_ones = [free("r1", "reduce_scatter", 100), free("g2", "all_gather", 100)]
    given = program(schedule(*tasks, buffers=buffers), free_ones)
    # A window of 0 us keeps g2 from starting at 0, so it meets r1 at 10.
    order = list_schedule(given, prefetch_us=0)
    assert order.index("g2") < order.index("r1")
    assert step_us(given, order) == 40
    # r1 first: c2 waits for g2 until 30.
    order = list_schedule(given, prefetch_us=0, reductions_first=True)
    assert order.index("r1") < order.index("g2")
    assert step_us(given, order) == 50


def test_a_scatter_starts_when_there_is_room_for_its_output() -> None:
    """Beside c2 live: grad 100, w2 100, and 50 for the shard if the scatter has started."""
    given = backward()
    order = list_schedule(given, memory_limit_bytes=249)
    assert order.index("c2") < order.index("r1") < order.index("c3")
    assert simulate(given.with_order(order).schedule).peak_bytes == 200
    assert step_us(given, order) == 40  # g2 cannot start beside c1, whose grad may need its shard


def test_a_scatter_is_waited_for_early_when_memory_is_short() -> None:
    """Below 200 bytes, grad and w2 exclude each other: the scatter ends before c2 begins."""
    given = backward()
    order = list_schedule(given, memory_limit_bytes=199)
    assert order.index("wait_r1") < order.index("g2")
    assert simulate(given.with_order(order).schedule).peak_bytes <= 199


def test_the_issue_order_is_kept() -> None:
    given = two_layers()
    order = list_schedule(given, issue_order=["g1", "g2"])
    assert [name for name in order if name in ("g1", "g2")] == ["g1", "g2"]
    assert step_us(given, order) == 30


def test_fixed_collectives_occupy_their_link() -> None:
    """A critical-path all-reduce keeps its place; the gather behind it is started early enough."""
    tasks = (
        compute("c1", 10),
        start("ar", 10, "c1"),
        wait("ar"),
        compute("c2", 10, "wait_ar"),
        start("g3", 10),
        wait("g3"),
        compute("c3", 10, "c2", "wait_g3"),
    )
    given = program(schedule(*tasks), [free("g3", "all_gather", 100)])
    order = list_schedule(given)
    fixed = [name for name in order if name not in ("g3", "wait_g3")]
    assert fixed == ["c1", "ar", "wait_ar", "c2", "c3"]
    # c1 10, ar exposed 10, c2 10, c3 10; g3 hidden: 40 instead of 50.
    assert step_us(given, order) == 40


def tied_gradients() -> Program:
    """Two scatters whose shards are summed; the sum only reaches an output, a third follows it."""
    buffers = (
        Buffer("grad1", 100),
        Buffer("shard1", 50),
        Buffer("grad2", 100),
        Buffer("shard2", 50),
        Buffer("sum", 50, is_output=True),
        Buffer("out", 50, is_output=True),
    )
    tasks = (
        compute("c1", 10, writes=("grad1",)),
        start("r1", 10, "c1", reads=("grad1",), writes=("shard1",)),
        wait("r1", reads=("grad1", "shard1")),
        compute("c2", 10, "c1", writes=("grad2",)),
        start("r2", 10, "c2", reads=("grad2",), writes=("shard2",)),
        wait("r2", reads=("grad2", "shard2")),
        compute("sum", 1, "wait_r1", "wait_r2", reads=("shard1", "shard2"), writes=("sum",)),
        start("r3", 10, "sum", reads=("sum",), writes=("out",)),
        wait("r3", reads=("sum", "out")),
        compute("c3", 10, "c2"),
        compute("c4", 10, "c3"),
    )
    kinds = [("r1", "reduce_scatter"), ("r2", "reduce_scatter"), ("r3", "all_reduce")]
    given = program(schedule(*tasks, buffers=buffers), [free(*kind, 100) for kind in kinds])
    return replace(given, movable=given.movable | {"sum"})


LIMITS = pytest.mark.parametrize("limit", [0, 150, 200, 250, 300, 1000])


@LIMITS
def test_a_chain_of_reductions_keeps_compute_in_order(limit: int) -> None:
    given = tied_gradients()
    order = list_schedule(given, memory_limit_bytes=limit)
    given.with_order(order).schedule.validate()
    assert [name for name in order if name.startswith("c")] == ["c1", "c2", "c3", "c4"]


@LIMITS
def test_a_wait_that_another_wait_needs_is_counted(limit: int) -> None:
    """r1 starts first, but its wait needs r2's: who misses that retires r2 for ever."""
    gradients = tuple(Buffer(name, 100) for name in ("grad1", "grad2", "shard1", "shard2"))
    buffers = (*gradients, Buffer("large", 300))
    tasks = (
        compute("c1", 10, writes=("grad1",)),
        start("r1", 10, "c1", reads=("grad1",), writes=("shard1",)),
        compute("c2", 10, "c1", writes=("grad2",)),
        start("r2", 10, "c2", reads=("grad2",), writes=("shard2",)),
        wait("r2", reads=("grad2", "shard2")),
        wait("r1", "wait_r2", reads=("grad1", "shard1")),
        compute("c3", 10, "c2", writes=("large",)),
        compute("c4", 10, "c3", reads=("large",)),
    )
    free_ones = [free("r1", "reduce_scatter", 100), free("r2", "reduce_scatter", 100)]
    given = program(schedule(*tasks, buffers=buffers), free_ones)
    order = list_schedule(given, memory_limit_bytes=limit)
    given.with_order(order).schedule.validate()
    assert [name for name in order if name.startswith("c")] == ["c1", "c2", "c3", "c4"]
