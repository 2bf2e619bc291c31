"""The lower bound: each relaxation by hand, and all of them against trying everything."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from support.brute_force import bucketings, least_step_us, orders
from support.schedules import Shape, compute, schedule, schedules, start, wait
from support.tiny_schedules import tiny_schedule

from inductor_overlap.cost_model.lower_bound import LowerBound, lower_bound
from inductor_overlap.cost_model.schedule import Schedule, Task
from inductor_overlap.cost_model.simulate import simulate

pytestmark = pytest.mark.quick


def test_nothing_takes_no_time() -> None:
    assert lower_bound(schedule()) == LowerBound(0.0, "empty", "nothing to do")


def test_compute_with_a_head_and_a_tail() -> None:
    # gather 4, compute 3 + 2, reduction 5: nothing overlaps, the longest path is all of it
    bound = lower_bound(
        schedule(
            start("ag", 4),
            wait("ag"),
            compute("a", 3, "wait_ag"),
            compute("b", 2, "a"),
            start("rs", 5, "b"),
            wait("rs"),
        )
    )
    assert bound.step_us == 14
    assert bound.certificate == (
        "2 of 2 jobs of compute need 5 us, none can begin before 4 us, "
        "and at least 5 us follow each"
    )


def test_bytes_cannot_be_bucketed_away_but_latency_can() -> None:
    # One bucket: 2 of latency and 3 x 4 on the wire, then 1 of compute; one by one: 18 + 1.
    tasks = [start(f"ag{i}", 6, wire_us=4) for i in range(3)]
    waits = [wait(f"ag{i}") for i in range(3)]
    bound = lower_bound(schedule(*tasks, *waits, compute("a", 1, *(w.name for w in waits))))
    assert bound.step_us == 15
    assert bound.relaxations["link"] == 15


def test_bucket_keys_keep_latencies_apart() -> None:
    # Two classes: each pays its own latency of 2.
    tasks = [start(f"s{i}", 6, wire_us=4, bucket_key=(key,)) for i, key in enumerate("aab")]
    bound = lower_bound(schedule(*tasks, *(wait(task.name) for task in tasks)))
    assert bound.step_us == pytest.approx(16)
    assert bound.kind == "latency"


def test_flow_shop_beats_the_single_machines() -> None:
    # Jobs (compute, reduction) (1,1) (1,1) (3,3): Johnson's order is as listed, 5 of compute and
    # then 3 of reduction. Compute alone sees 5 + 1, the link 1 + 5.
    tasks = [
        task
        for name, us in (("a", 1), ("b", 1), ("c", 3))
        for task in (compute(name, us), start(f"rs_{name}", us, name), wait(f"rs_{name}"))
    ]
    bound = lower_bound(schedule(*tasks))
    assert (bound.step_us, bound.kind) == (8, "flow shop")
    assert bound.relaxations["compute"] == bound.relaxations["link"] == 6
    assert bound.certificate == (
        "5 us of compute before 3 collectives that hold link pg for 5 us, in Johnson's order"
    )


def test_flow_shop_pays_one_latency() -> None:
    # As above with a latency of 2 between compute and the last reduction's bytes.
    tasks = [
        task
        for name, us in (("a", 1), ("b", 1), ("c", 3))
        for task in (
            compute(name, us),
            start(f"rs_{name}", us + 2, name, wire_us=us),
            wait(f"rs_{name}"),
        )
    ]
    assert lower_bound(schedule(*tasks)).relaxations["flow shop"] == 10


def test_flow_shop_charges_a_chain_to_its_end() -> None:
    # Chain c0-c1-c2 of 1 each; weight gradients w1 of 1 behind c0 and w2 of 2 behind c1. w2 has the
    # deepest reduction, so c0 and c1 are charged to it: jobs (4, 3) (1, 1) (1, 1), Johnson: 6 of
    # compute, then 3. That is the optimum: c0 c1 w2 by 4, its reduction by 7, two more by 9.
    # Charged to the nearest, c0 belongs to w1 and c1 to c2, and nothing exceeds 6 + 1.
    case = schedule(
        compute("c0", 1),
        *_reduced("w1", 1, 1, "c0"),
        compute("c1", 1, "c0"),
        *_reduced("w2", 2, 3, "c1"),
        *_reduced("c2", 1, 1, "c1"),
    )
    assert lower_bound(case).step_us == least_step_us(case) == 9


def _reduced(name: str, work_us: float, wire_us: float, *deps: str) -> list[Task]:
    reduction = start(f"rs_{name}", wire_us, name)
    return [compute(name, work_us, *deps), reduction, wait(reduction.name)]


def test_flow_shop_of_gathers_runs_against_the_arrows() -> None:
    tasks = [
        task
        for name, us in (("a", 1), ("b", 1), ("c", 3))
        for task in (
            start(f"ag_{name}", us),
            wait(f"ag_{name}"),
            compute(name, us, f"wait_ag_{name}"),
        )
    ]
    bound = lower_bound(schedule(*tasks))
    assert (bound.step_us, bound.kind) == (8, "flow shop")


def test_early_deadlines_cost_latencies() -> None:
    # Gathers of 5 + 1. In one bucket: 7, then 4 + 4 of compute: 15. Apart: the second ends at 12,
    # then 4: 16. The single machines see 6 + 8 and 5 + 2 + 4.
    bound = lower_bound(
        schedule(
            start("s", 6, wire_us=1),
            wait("s"),
            compute("a", 4, "wait_s"),
            start("t", 6, wire_us=1),
            wait("t"),
            compute("b", 4, "a", "wait_t"),
        )
    )
    assert bound.step_us == pytest.approx(15)
    assert bound.kind == "latency"
    assert bound.relaxations["compute"] == 14


def test_contention_slows_compute_beside_bytes() -> None:
    # 4 of bytes beside compute at rate 1/2: 4 us do 2 of the 10, 8 more follow.
    case = schedule(start("s", 4), compute("a", 10), wait("s"), contention=2)
    bound = lower_bound(case)
    assert (bound.step_us, bound.kind) == (12, "contention")
    assert simulate(case).step_us == 12


def test_contention_spares_bytes_before_the_first_compute() -> None:
    # The gather runs while compute is idle anyway.
    case = schedule(start("s", 4), wait("s"), compute("a", 10, "wait_s"), contention=2)
    assert lower_bound(case).step_us == simulate(case).step_us == 14


def test_contention_counts_latency_of_a_narrow_queue() -> None:
    # 4 of latency and 2 of bytes beside compute at rate 1/2: 3 of the 10 are done by 6. A second
    # class of collectives adds its own 6.
    s, a = start("s", 6, wire_us=2), compute("a", 10)
    case = schedule(s, a, wait("s"), contention=2)
    assert lower_bound(case).relaxations["contention"] == simulate(case).step_us == 13
    t = start("t", 6, wire_us=2, bucket_key=("other",))
    case = schedule(s, t, a, wait("s"), wait("t"), contention=2)
    assert lower_bound(case).relaxations["contention"] == simulate(case).step_us == 16


def test_contention_leaves_out_compute_without_a_tail() -> None:
    # a of 10 precedes a reduction of 4: 14. With b, which precedes nothing: 11 + 4 / 2.
    case = schedule(compute("a", 10), start("s", 4, "a"), compute("b", 1), wait("s"), contention=2)
    assert lower_bound(case).relaxations["contention"] == 14


def test_contention_takes_the_busiest_link_and_the_idle_time() -> None:
    # Compute of 10 cannot begin before 4. Link p moves 4 + 3: the last 3 beside compute at rate
    # 1/2, so 1.5 are lost. The 6 of link q run at the same time and do not add to that.
    tasks = [start("s", 4, queue="p"), start("t", 6, queue="q"), start("u", 3, queue="p")]
    a = compute("a", 10, "wait_s")
    case = schedule(*tasks, wait("s"), a, wait("t"), wait("u"), contention=2)
    assert lower_bound(case).relaxations["contention"] == pytest.approx(15.5)
    assert simulate(case).step_us == 15.5


def test_launches_count_once_for_what_can_be_merged() -> None:
    # Compute 1 + 1; starts s and t merge into one launch, u (no latency) has its own.
    tasks = [start("s", 2, wire_us=1), start("t", 2, wire_us=1), start("u", 0)]
    bound = lower_bound(
        schedule(*tasks, compute("a", 1), *(wait(task.name) for task in tasks), launch_us=1)
    )
    assert bound.relaxations["compute"] == 4
    apart = [replace(task, bucket_key=(task.name,)) for task in tasks]
    bound = lower_bound(schedule(*apart, *map(wait, "stu"), launch_us=1))
    assert bound.relaxations["compute"] == 3
    dear = lower_bound(schedule(*apart, *map(wait, "stu"), launch_us=1, collective_launch_us=5))
    assert dear.relaxations["compute"] == 15


def test_shared_link_adds_up_bytes() -> None:
    tasks = [start("s", 4, queue="p"), start("t", 3, queue="q"), wait("s"), wait("t")]
    assert lower_bound(schedule(*tasks)).step_us == 4
    assert lower_bound(schedule(*tasks, links={"p": "net", "q": "net"})).step_us == 7


def test_wide_queues_overlap_latency() -> None:
    tasks = [start(f"s{i}", 6, wire_us=1, bucket_key=(str(i),)) for i in range(2)]
    waits = [wait("s0"), wait("s1")]
    assert lower_bound(schedule(*tasks, *waits)).step_us == pytest.approx(12)
    wide = schedule(*tasks, *waits, queue_width=2)
    assert lower_bound(wide).step_us == simulate(wide).step_us == 7


def test_invalid_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="comes before"):
        lower_bound(schedule(compute("a", 1, "b"), compute("b", 1)))


@pytest.mark.parametrize("seeds", [range(i, i + 100) for i in range(0, 500, 100)])
def test_no_order_and_no_bucketing_beats_it(seeds: range) -> None:
    tight = 0
    for seed in seeds:
        case = tiny_schedule(seed)
        best_us = least_step_us(case)
        bound = lower_bound(case)
        assert bound.step_us <= best_us + 1e-9, (seed, bound, best_us)
        tight += bound.step_us >= best_us - 1e-9
    assert tight >= 60  # of 100: 77 on average


def test_brute_force_tries_everything() -> None:
    # Three independent tasks: 3! orders. Three mergeable collectives: 5 partitions of a set of 3.
    assert len(list(orders([compute(name, 1) for name in "abc"]))) == 6
    starts = [start(name, 2, wire_us=1) for name in "abc"]
    waits = [wait(name) for name in "abc"]
    assert len(list(bucketings([*starts, *waits]))) == 5


@given(schedules(Shape(num_items=25)))
@settings(max_examples=150, deadline=None)
def test_no_simulated_order_beats_it(case: Schedule) -> None:
    assert lower_bound(case).step_us <= simulate(case).step_us + 1e-6


def test_seven_thousand_tasks_take_less_than_a_second() -> None:
    """A backward graph: a chain, beside it weight gradients, a gather and a reduction for each."""
    tasks = [compute("c0", 1.0)]
    for i in range(1, 1166):
        tasks += [
            start(f"ag{i}", 3.0, wire_us=2.0, bucket_key=("ag",)),
            wait(f"ag{i}"),
            compute(f"c{i}", 5.0, f"c{i - 1}", f"wait_ag{i}"),
            compute(f"w{i}", 5.0, f"c{i - 1}"),
            start(f"rs{i}", 4.0, f"w{i}", wire_us=3.0, bucket_key=("rs",)),
            wait(f"rs{i}"),
        ]
    case = schedule(*tasks)
    before = time.process_time()
    lower_bound(case)
    assert time.process_time() - before < 1.0  # 0.15 s on an idle core
