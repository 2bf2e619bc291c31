"""Parts of the search behind ``wrap="auto"``: live bytes, coarse programs, deferral, partitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from support.graphs import GraphBuilder, TestPrices
from support.programs import free, program
from support.random_graphs import Recipe, build, recipes
from support.schedules import Shape, compute, schedule, schedules, start, wait

from inductor_overlap.cost_model.memory import LiveBytes, memory_profile
from inductor_overlap.cost_model.schedule import Buffer, Schedule, Task
from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.passes.coarsen import coarsen
from inductor_overlap.passes.defer_gradients import (
    WeightGradient,
    cheapest,
    defer_gradients,
    johnson_order,
    latest,
    weight_gradients,
)
from inductor_overlap.passes.graph_schedule import read_graph
from inductor_overlap.passes.list_schedule import list_schedule
from inductor_overlap.passes.partition import by_deadline, by_latency, by_room, pending_together
from inductor_overlap.passes.program import Program
from inductor_overlap.passes.reorder import order_on_demand
from inductor_overlap.passes.robust_choice import robust_choice
from inductor_overlap.passes.search import Proposal, Trial

pytestmark = pytest.mark.quick


# Live bytes.


@given(schedules(Shape(num_items=16)))
def test_live_bytes_are_those_between_the_tasks_of_the_replay(given_schedule: Schedule) -> None:
    """During a task: what was live before it and what it writes, as in `memory_profile`."""
    live = LiveBytes(given_schedule)
    profile = memory_profile(given_schedule)
    for task, during in zip(given_schedule.tasks, profile, strict=True):
        writes = sum(given_schedule.buffers[name].size_bytes for name in task.writes)
        assert live.now + writes == during
        assert live.run(task) == during


# Coarse programs.


@given(recipes())
def test_a_coarse_program_runs_like_the_whole_one(recipe: Recipe) -> None:
    whole = read_graph(build(recipe, 0).graph, TestPrices()).program
    coarse = coarsen(whole)
    coarse.program.schedule.validate()
    for order in (order_on_demand(coarse.program), list_schedule(coarse.program)):
        ordered = whole.with_order(coarse.expand(order)).schedule
        ordered.validate()
        fast = simulate(coarse.program.with_order(order).schedule)
        assert simulate(ordered).step_us == pytest.approx(fast.step_us)
        assert simulate(ordered).peak_bytes <= fast.peak_bytes


def test_compute_between_collectives_is_joined() -> None:
    """a and b, then c and d behind the gather; what lives inside a run takes no buffer."""
    buffers = (Buffer("x", 10), Buffer("y", 1), Buffer("w", 50), Buffer("out", 10, is_output=True))
    tasks = (
        compute("a", 1, writes=("x",)),
        compute("b", 2, "a", reads=("x",), writes=("y",)),
        start("g", 5, writes=("w",)),
        wait("g", reads=("w",)),
        compute("c", 3, "b", "wait_g", reads=("y", "w")),
        compute("d", 4, "c", writes=("out",)),
    )
    coarse = coarsen(program(schedule(*tasks, buffers=buffers), [free("g", "all_gather", 50)]))
    assert coarse.parts == {"a": ("a", "b")}  # c and d are at the peak: 61 bytes
    assert coarse.program.schedule.by_name["a"].duration_us == 3
    assert coarse.program.schedule.buffers["a.inside"].size_bytes == 10
    assert coarse.expand(["g", "a"]) == ["g", "a", "b"]


def test_what_frees_before_it_writes_is_not_joined_near_the_peak() -> None:
    """a frees 61 bytes, then b writes 60: joined they take 121, each by itself at most 71.

    The peak is 200, during c.
    """
    buffers = (
        Buffer("x", 61, is_input=True),
        Buffer("small", 10),
        Buffer("y", 60),
        Buffer("w", 5),
        Buffer("inside", 134),
        Buffer("out", 1, is_output=True),
    )
    tasks = (
        compute("a", 1, reads=("x",), writes=("small",)),
        compute("b", 1, "a", reads=("small",), writes=("y",)),
        start("g", 5, writes=("w",)),
        wait("g", reads=("w",)),
        compute("c", 1, "b", "wait_g", reads=("y", "w"), writes=("inside", "out")),
    )
    whole = program(schedule(*tasks, buffers=buffers), [free("g", "all_gather", 50)])
    assert simulate(whole.schedule).peak_bytes == 200
    assert coarsen(whole).parts == {}


def test_a_weight_gradient_is_joined_with_the_views_of_its_result() -> None:
    """dx stands between the matmul and its view; the cast writes a buffer and stays."""
    buffers = (Buffer("x", 9), Buffer("y", 9), Buffer("w", 8), Buffer("out", 4, is_output=True))
    tasks = (
        compute("dw", 3, writes=("x",)),
        compute("dx", 2, writes=("y",)),
        compute("view", 0, "dw", reads=("x",)),
        compute("cast", 1, "view", reads=("x",), writes=("w",)),
        start("s", 5, "cast", reads=("w",), writes=("out",)),
        wait("s", reads=("out",)),
        compute("end", 1, "dx", reads=("y",)),
    )
    whole = program(schedule(*tasks, buffers=buffers), [free("s", "reduce_scatter", 50)])
    coarse = coarsen(replace(whole, weight_gradients={"s": ("dw", "view", "cast")}))
    assert coarse.parts == {"dw": ("dw", "view")}
    assert coarse.program.weight_gradients == {"s": ("dw", "cast")}
    names = [task.name for task in coarse.program.fixed]
    assert names == ["dw", "dx", "cast", "end"]


# Deferral.


def backward_of_two_layers() -> Program:
    """Each layer: a matmul for the weight's gradient, cast and scattered, one for the input's."""
    b = GraphBuilder()
    x, grad = b.input("x", 8, 8), b.input("tangents_1", 8, 8)
    outputs = []
    for index in (2, 1):
        parameter = b.parameter(f"w{index}", 2, 8)
        weight_grad = b.cast(b.mm(b.transpose(grad), x, name=f"dw{index}"), torch.bfloat16)
        outputs.append(b.stamp(b.scatter(weight_grad), parameter))
        grad = b.mm(grad, b.input(f"saved{index}", 8, 8), name=f"dx{index}")
    b.output(grad, *outputs)
    return read_graph(b.graph, TestPrices()).program


def test_weight_gradients_are_what_only_a_reduction_needs() -> None:
    found = weight_gradients(backward_of_two_layers())
    assert [gradient.tasks[0] for gradient in found] == ["dw2", "dw1"]
    assert all(len(gradient.tasks) == 2 for gradient in found)  # the matmul and its cast
    # 10 us and 1 us; the scatter of 8 x 8 bfloat16 takes 2 + 128 / 64.
    assert [(g.compute_us, g.reduction_us) for g in found] == [(11, 4), (11, 4)]
    # The first needs the tangents, 256 bytes, which dx2 reads after it; x is read by dw1.
    assert [gradient.held_bytes for gradient in found] == [0, 256]


def test_deferred_gradients_come_last() -> None:
    given_program = backward_of_two_layers()
    first = weight_gradients(given_program)[0]
    deferred = defer_gradients(given_program, [first])
    deferred.schedule.validate()
    assert [task.name for task in deferred.fixed if task.name.startswith("d")] == [
        "dx2",
        "dw1",
        "dx1",
        "dw2",
    ]


def gradient(name: str, compute_us: float, reduction_us: float, held: int = 0) -> WeightGradient:
    return WeightGradient(name, (name,), compute_us, reduction_us, held, int(name))


def test_johnson_puts_short_compute_first_and_short_reductions_last() -> None:
    jobs = [gradient("0", 5, 2), gradient("1", 4, 9), gradient("2", 1, 3), gradient("3", 9, 8)]
    assert [job.reduction for job in johnson_order(jobs)] == ["2", "1", "3", "0"]


def test_what_is_deferred_fits_the_amount() -> None:
    jobs = [gradient("0", 5, 1, held=50), gradient("1", 4, 1, held=4), gradient("2", 3, 1, held=9)]
    assert [job.reduction for job in latest(jobs, 8)] == ["2", "1"]
    assert [job.reduction for job in latest(jobs, 3.5)] == ["2"]
    assert [job.reduction for job in cheapest(jobs, 9)] == ["1", "2"]
    assert latest(jobs, 0.5) == []


# Partitions.


def gathers(*layers: tuple[float, float]) -> Program:
    """One gather per layer: bytes of ``wire`` us, 10 us of latency, and ``work`` us of compute."""
    tasks, buffers, found = [], [], []
    for i, (wire, work) in enumerate(layers):
        buffers.append(Buffer(f"w{i}", int(100 * wire)))
        tasks += [start(f"g{i}", 10 + wire, wire_us=wire, writes=(f"w{i}",)), wait(f"g{i}")]
        before = (f"c{i - 1}",) if i else ()
        tasks.append(compute(f"c{i}", work, *before, f"wait_g{i}", reads=(f"w{i}",)))
        found.append(free(f"g{i}", "all_gather", int(100 * wire)))
    return program(schedule(*tasks, buffers=tuple(buffers)), found)


def sizes(groups: object) -> list[int]:
    return [len(group) for group in groups]  # type: ignore[attr-defined]


def test_buckets_close_at_a_multiple_of_the_latency() -> None:
    given_program = gathers((6, 1), (6, 1), (30, 1), (6, 1), (6, 1))
    assert sizes(by_latency(given_program, 1.0)) == [2, 1, 2]
    assert sizes(by_latency(given_program, 0.0)) == [1, 1, 1, 1, 1]
    assert sizes(by_latency(given_program, 100.0)) == [5]


def test_tiny_gathers_share_a_bucket() -> None:
    """Less than a quarter of a latency: 2 us."""
    given_program = gathers((2, 1), (30, 1), (2, 1), (30, 1))
    assert sizes(by_latency(given_program, 1.0)) == [2, 1, 1]
    few = gathers((3, 1), (30, 1), (3, 1), (30, 1))  # not tiny, and never neighbours
    assert sizes(by_latency(few, 1.0)) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.1, [1, 1, 1, 1]), (0.5, [2, 1, 1]), (0.8, [3, 1]), (1.0, [4])]
)
def test_buckets_take_a_share_of_the_memory_that_is_free(share: float, expected: list[int]) -> None:
    """Gathers of 100 bytes, one live at a time; of 500, 400 are free, behind c1 only 150."""
    tasks: list[Task] = []
    buffers = [Buffer("saved", 250, is_output=True)]
    for i in range(4):
        buffers.append(Buffer(f"w{i}", 100))
        tasks += [start(f"g{i}", 20, wire_us=10, writes=(f"w{i}",)), wait(f"g{i}")]
        saves = {"writes": ("saved",)} if i == 2 else {}
        tasks.append(compute(f"c{i}", 10, f"wait_g{i}", reads=(f"w{i}",), **saves))
    found = [free(f"g{i}", "all_gather", 100) for i in range(4)]
    given_program = program(schedule(*tasks, buffers=tuple(buffers)), found)
    assert sizes(by_room(given_program, share, 500)) == expected


def delay_us(layers: tuple[tuple[float, float], ...], groups: list[int]) -> float:
    """By hand: the link runs bucket after bucket, compute waits for each at its first layer."""
    link, now, at = 0.0, 0.0, 0
    for size in groups:
        members = layers[at : at + size]
        link += 10 + sum(wire for wire, _ in members)
        copies = sum(int(100 * wire) / 1000 for wire, _ in members) if size > 1 else 0.0
        now = max(now, link) + copies + sum(work for _, work in members)
        at += size
    return now


@pytest.mark.parametrize(
    "layers",
    [
        ((5, 50), (5, 50), (5, 50)),
        ((5, 1), (5, 1), (5, 30), (5, 1), (5, 1)),
        ((20, 15), (1, 2), (1, 2), (1, 30), (20, 15)),
        ((1, 1), (1, 1), (1, 1), (1, 1), (1, 1), (1, 1)),
    ],
)
def test_no_partition_ends_before_the_one_by_deadline(
    layers: tuple[tuple[float, float], ...],
) -> None:
    found = sizes(by_deadline(gathers(*layers)))
    cuts = product((False, True), repeat=len(layers) - 1)
    every = [_sizes_of(cut) for cut in cuts]
    assert delay_us(layers, found) == pytest.approx(min(delay_us(layers, s) for s in every))


def _sizes_of(cuts: tuple[bool, ...]) -> list[int]:
    found = [1]
    for cut in cuts:
        if cut:
            found.append(1)
        else:
            found[-1] += 1
    return found


def test_reductions_that_wait_for_the_link_go_together() -> None:
    """r0 runs 0.4-2.4 while r1, r2 and r3 become ready; alone each takes 1 us and 1 per 100 B."""
    tasks, buffers, found = [], [], []
    for i in range(4):
        buffers += [Buffer(f"d{i}", 100), Buffer(f"s{i}", 50, is_output=True)]
        before = (f"c{i - 1}",) if i else ()
        tasks.append(compute(f"c{i}", 0.4, *before, writes=(f"d{i}",)))
        scatter = start(f"r{i}", 2, f"c{i}", wire_us=1, reads=(f"d{i}",), writes=(f"s{i}",))
        tasks += [scatter, wait(f"r{i}", reads=(f"s{i}",))]
        found.append(free(f"r{i}", "reduce_scatter", 100))
    given_program = program(schedule(*tasks, buffers=tuple(buffers)), found)
    groups = pending_together(given_program, given_program, 100.0, 1e9)
    assert [[member.name for member in group] for group in groups] == [["r0"], ["r1", "r2", "r3"]]
    groups = pending_together(given_program, given_program, 3.0, 1e9)  # two take 3 us
    assert [len(group) for group in groups] == [1, 2, 1]


def test_all_reduces_that_wait_for_a_slower_network_go_together() -> None:
    """HSDP. c0-c4 take 2 us each; r0-r4 take 1 us on their own link and never wait there.

    a0 runs 4-8, as soon as r0 has ended; by 8 r1 and r2 have ended, but not r3. a1 and a2 together
    run 8-15; by then r3 and r4 have ended.
    """
    tasks, buffers, found = [], [], []
    for i in range(5):
        names = (f"d{i}", f"s{i}", f"g{i}")
        buffers += [Buffer(name, 10, is_output=name == f"g{i}") for name in names]
        before = (f"c{i - 1}",) if i else ()
        tasks += [
            compute(f"c{i}", 2, *before, writes=(f"d{i}",)),
            start(f"r{i}", 1, f"c{i}", reads=(f"d{i}",), writes=(f"s{i}",)),
            wait(f"r{i}", reads=(f"s{i}",)),
            start(
                f"a{i}",
                4,
                f"wait_r{i}",
                queue="net",
                wire_us=3,
                reads=(f"s{i}",),
                writes=(f"g{i}",),
            ),
            wait(f"a{i}", reads=(f"g{i}",)),
        ]
        found += [
            free(f"r{i}", "reduce_scatter", 100),
            free(f"a{i}", "all_reduce", 300, follows=f"r{i}"),
        ]
    given_program = program(schedule(*tasks, buffers=tuple(buffers)), found)
    groups = pending_together(given_program, given_program, 100.0, 1e9)
    assert [[m.name for m in group] for group in groups] == [["a0"], ["a1", "a2"], ["a3", "a4"]]


# Robust choice.


def test_of_two_equal_plans_the_one_with_slack_comes_first() -> None:
    """Both take 100 us; one hides 99 us of communication behind 100 of compute, one 10."""

    def trial(kind: str, duration_us: float) -> Trial:
        tasks = (start("g", duration_us), compute("c", 100), wait("g"))
        given_schedule = schedule(*tasks)
        return Trial(Proposal(kind), given_schedule, simulate(given_schedule))

    tight, loose = trial("tight", 99), trial("loose", 10)
    assert robust_choice([tight, loose]) == [loose, tight]
    assert robust_choice([tight, trial("tight", 10)])[0] == tight  # one of a kind
    far = replace(loose, timeline=replace(loose.timeline, step_us=110.0))
    assert robust_choice([tight, far]) == [tight, far]
