"""The simulator, rule by rule: tiny stories whose times are worked out by hand beside them."""

from __future__ import annotations

import pickle
import time

import pytest
from hypothesis import given, settings
from support.schedules import compute, schedule, schedules, start, wait

from inductor_overlap.cost_model.schedule import Schedule, Task
from inductor_overlap.cost_model.simulate import Span, Timeline, simulate

pytestmark = pytest.mark.quick


def spans_of(timeline: Timeline, queue: str) -> list[tuple[str, float, float]]:
    return [(s.name, s.start_us, s.end_us) for s in timeline.spans if s.queue == queue]


def test_nothing_takes_no_time() -> None:
    timeline = simulate(schedule())
    assert timeline == Timeline(0.0, 0.0, 0.0, 0.0, 0)


def test_compute_runs_in_program_order() -> None:
    timeline = simulate(schedule(compute("a", 2), compute("b", 3)))
    assert timeline.step_us == 5
    assert timeline.spans == (
        Span("a", "compute", "compute", 0, 2),
        Span("b", "compute", "compute", 2, 5),
    )


def test_start_is_enqueued_when_compute_reaches_it() -> None:
    # a 0-2, collective 2-6, b 2-5, the wait stalls 5-6
    timeline = simulate(schedule(compute("a", 2), start("s", 4), compute("b", 3), wait("s")))
    assert timeline.step_us == 6
    assert spans_of(timeline, "pg") == [("s", 2, 6)]
    assert spans_of(timeline, "compute") == [("a", 0, 2), ("b", 2, 5), ("wait_s", 5, 6)]
    assert timeline.exposed_us == 1
    assert timeline.exposed_by == {"s": 1}
    assert timeline.compute_us == 5
    assert timeline.communication_us == 4


def test_hidden_collective_costs_nothing() -> None:
    timeline = simulate(schedule(start("s", 3), compute("a", 4), wait("s"), compute("b", 1)))
    assert timeline.step_us == 5
    assert timeline.exposed_us == 0
    assert timeline.exposed_by == {}
    assert "wait_s" not in [span.name for span in timeline.spans]


def test_one_communicator_is_a_fifo() -> None:
    # s 0-5, t 5-9 though it was ready at 1; waits in the other order change nothing
    timeline = simulate(
        schedule(start("s", 5), compute("a", 1), start("t", 4), wait("t"), wait("s"))
    )
    assert spans_of(timeline, "pg") == [("s", 0, 5), ("t", 5, 9)]
    assert timeline.exposed_by == {"t": 8}


def test_idle_communicator_waits_for_the_start() -> None:
    # s is over at 1; t is reached at 3 and begins there, not when the queue became free
    timeline = simulate(
        schedule(start("s", 1), compute("a", 3), start("t", 1), wait("s"), wait("t"))
    )
    assert spans_of(timeline, "pg") == [("s", 0, 1), ("t", 3, 4)]


def test_a_stall_ends_with_its_collective_not_with_the_queue() -> None:
    # s 0-1, t 1-2; the wait for s ends at 1, where u is enqueued behind t: 2-3.
    timeline = simulate(
        schedule(start("s", 1), start("t", 1), wait("s"), start("u", 1), wait("t"), wait("u"))
    )
    assert spans_of(timeline, "pg") == [("s", 0, 1), ("t", 1, 2), ("u", 2, 3)]


def test_communicators_with_links_of_their_own_run_at_once() -> None:
    timeline = simulate(
        schedule(start("s", 5, queue="p"), start("t", 4, queue="q"), wait("s"), wait("t"))
    )
    assert timeline.step_us == 5


def test_shared_link_divides_bandwidth() -> None:
    # Both on the wire: s needs 4, t needs 2. Half rate: t ends at 4, s has 2 left, ends at 6.
    timeline = simulate(
        schedule(
            start("s", 4, queue="p"),
            start("t", 2, queue="q"),
            wait("s"),
            wait("t"),
            links={"p": "net", "q": "net"},
        )
    )
    assert spans_of(timeline, "p") == [("s", 0, 6)]
    assert spans_of(timeline, "q") == [("t", 0, 4)]


def test_three_on_one_link_arriving_one_by_one() -> None:
    # s alone 0-2 (2 of 6 done), halves until u comes at 4 (s 3, t 1 done), thirds until t's and
    # u's last 1 are done at 4+3=7 (s 4 done), alone until 7+2=9.
    timeline = simulate(
        schedule(
            start("s", 6, queue="p"),
            compute("a", 2),
            start("t", 2, queue="q"),
            compute("b", 2),
            start("u", 1, queue="r"),
            wait("s"),
            wait("t"),
            wait("u"),
            links=dict.fromkeys("pqr", "net"),
        )
    )
    assert [s.end_us for s in timeline.spans if s.queue != "compute"] == [9, 7, 7]
    assert timeline.step_us == 9


def test_latency_does_not_use_the_link() -> None:
    # s: latency 0-2, wire from 2. t: wire 0-2 alone. Nothing is shared.
    timeline = simulate(
        schedule(
            start("s", 5, queue="p", wire_us=3),
            start("t", 2, queue="q"),
            wait("s"),
            wait("t"),
            links={"p": "net", "q": "net"},
        )
    )
    assert spans_of(timeline, "p") == [("s", 0, 5)]
    assert spans_of(timeline, "q") == [("t", 0, 2)]


def test_latency_only_collective_ignores_load() -> None:
    timeline = simulate(
        schedule(
            start("s", 3, queue="p", wire_us=0),
            start("t", 8, queue="q"),
            wait("s"),
            wait("t"),
            links={"p": "net", "q": "net"},
        )
    )
    assert spans_of(timeline, "p") == [("s", 0, 3)]
    assert spans_of(timeline, "q") == [("t", 0, 8)]


def test_wide_queue_shares_its_own_link() -> None:
    # Width 2: s and t at half rate end at 4 (2 each); u begins at 4, alone, ends at 6.
    timeline = simulate(
        schedule(
            start("s", 2),
            start("t", 2),
            start("u", 2),
            wait("s"),
            wait("t"),
            wait("u"),
            queue_width=2,
        )
    )
    assert spans_of(timeline, "pg") == [("s", 0, 4), ("t", 0, 4), ("u", 4, 6)]


def test_wide_queue_hides_latency() -> None:
    # Width 2: both latencies 0-3 at once, then 1 + 1 of wire shared: both end at 5, not 8.
    timeline = simulate(
        schedule(
            start("s", 4, wire_us=1), start("t", 4, wire_us=1), wait("s"), wait("t"), queue_width=2
        )
    )
    assert timeline.step_us == 5


def test_a_link_is_kept_for_longer_than_the_bytes_take_at_the_plateau() -> None:
    # As above, but each keeps the link for 3: latencies 0-1, then 3 + 3 shared until 7.
    starts = (start("s", 4, wire_us=1, link_us=3), start("t", 4, wire_us=1, link_us=3))
    timeline = simulate(schedule(*starts, wait("s"), wait("t"), queue_width=2))
    assert timeline.step_us == 7


def test_launch_overhead_counts_for_compute_and_starts_only() -> None:
    # start: enqueued at 0, launch 0-1; view free; a 1-4 (1 + 2); wait free until the stall 4-5
    timeline = simulate(
        schedule(start("s", 5), compute("view", 0), compute("a", 2), wait("s"), launch_us=1)
    )
    assert spans_of(timeline, "compute") == [("s", 0, 1), ("a", 1, 4), ("wait_s", 4, 5)]
    assert spans_of(timeline, "pg") == [("s", 0, 5)]
    assert timeline.compute_us == 4


def test_launching_a_collective_may_cost_another_time_than_a_kernel() -> None:
    # s is enqueued at 0 and launched until 3; a 3-6 (1 + 2) hides the rest of it.
    tasks = [start("s", 5), compute("a", 2), wait("s")]
    timeline = simulate(schedule(*tasks, launch_us=1, collective_launch_us=3))
    assert spans_of(timeline, "compute") == [("s", 0, 3), ("a", 3, 6)]
    assert timeline.compute_us == 6
    assert simulate(schedule(*tasks, launch_us=1, collective_launch_us=0)).compute_us == 3


def test_contention_slows_compute_while_a_collective_is_in_flight() -> None:
    # Collective 0-3. Of a's 4, 3 us at rate 1/1.5 do 2; the other 2 run at full rate: 3 + 2.
    timeline = simulate(schedule(start("s", 3), compute("a", 4), wait("s"), contention=1.5))
    assert timeline.step_us == 5
    assert timeline.compute_us == 4
    assert timeline.contention_us == 1


def test_contention_ends_when_the_queue_runs_dry() -> None:
    # s 0-1, t 1-2 back to back, so a (3 of work at 1/2) does 1 by 2 and ends at 4.
    timeline = simulate(
        schedule(start("s", 1), start("t", 1), compute("a", 3), wait("s"), wait("t"), contention=2)
    )
    assert timeline.step_us == 4


def test_contention_does_not_stack() -> None:
    # Two in flight slow compute as one does: 2 of work by 4, both ended at 4.
    timeline = simulate(
        schedule(
            start("s", 4, queue="p"),
            start("t", 4, queue="q"),
            compute("a", 3),
            wait("s"),
            wait("t"),
            contention=2,
        )
    )
    assert timeline.step_us == 5


def test_many_collectives_of_no_duration() -> None:
    names = [f"s{i}" for i in range(3000)]
    timeline = simulate(
        schedule(start("first", 1), *(start(n, 0) for n in names), *map(wait, [*names, "first"]))
    )
    assert timeline.step_us == 1
    assert timeline.exposed_by == {"s0": 1}


def test_repr_carries_the_numbers() -> None:
    text = repr(simulate(schedule(start("s", 4), compute("b", 3), wait("s"))))
    assert text == (
        "Timeline(step_us=4, compute_us=3, communication_us=4, exposed_us=1, peak_bytes=0, 3 spans)"
    )


def test_timeline_survives_pickling() -> None:
    timeline = simulate(schedule(start("s", 4), compute("b", 3), wait("s")))
    assert pickle.loads(pickle.dumps(timeline)) == timeline


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((wait("s"), start("s", 1)), "wait 'wait_s': no start named 's' comes before it"),
        ((start("s", 1),), r"collectives without a wait: \['s'\]"),
        ((start("s", 1), wait("s"), wait("s")), "another wait has already waited"),
        ((start("s", 1), start("s", 1), wait("s")), "collective 's' is started twice"),
        ((compute("a", 1, reads=("b",)),), "'a' reads buffer 'b' before it is written"),
        ((compute("a", 1, writes=("b",)),), "'a' writes unknown or written buffer 'b'"),
    ],
)
def test_orders_that_cannot_run_are_refused(tasks: tuple[Task, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(schedule(*tasks))


@given(schedules())
@settings(max_examples=300, deadline=None)
def test_accounts_balance(case: Schedule) -> None:
    case.validate()
    timeline = simulate(case)
    worst = timeline.compute_us * case.machine.contention + timeline.exposed_us
    best = timeline.compute_us + timeline.exposed_us
    assert best - 1e-6 <= timeline.step_us <= worst + 1e-6
    assert timeline == simulate(case)


@given(schedules())
@settings(max_examples=300, deadline=None)
def test_collectives_respect_queues_and_links(case: Schedule) -> None:
    timeline = simulate(case)
    transfers = [span for span in timeline.spans if span.queue != "compute"]
    for queue in {span.queue for span in transfers}:
        begins = [span.start_us for span in transfers if span.queue == queue]
        assert begins == sorted(begins)  # a FIFO
        for at in begins:
            running = [s for s in transfers if s.queue == queue and s.start_us <= at < s.end_us]
            assert len(running) <= case.machine.queue_width
    for span in transfers:
        assert span.end_us - span.start_us >= case.by_name[span.name].duration_us - 1e-6
    for link in {case.machine.link(span.queue) for span in transfers}:
        used = [span for span in transfers if case.machine.link(span.queue) == link]
        busy_us = max(span.end_us for span in used) - min(span.start_us for span in used)
        assert busy_us >= sum(case.by_name[span.name].link_us for span in used) - 1e-6


@given(schedules())
@settings(max_examples=100, deadline=None)
def test_waits_hold_compute(case: Schedule) -> None:
    timeline = simulate(case)
    ends = {span.name: span.end_us for span in timeline.spans if span.queue != "compute"}
    stalled = {s.name: s.end_us for s in timeline.spans if s.kind == "wait"}
    for name, end_us in stalled.items():
        assert end_us == ends[case.by_name[name].collective]


def test_seven_thousand_tasks_take_milliseconds() -> None:
    tasks = [compute(f"c{i}", 1.0) for i in range(6000)]
    for i in range(500):
        tasks.insert(12 * i, start(f"s{i}", 5.0))
        tasks.insert(12 * i + 9, wait(f"s{i}"))
    case = schedule(*tasks, contention=1.1, launch_us=0.5)
    simulate(case)
    before = time.process_time()
    simulate(case)
    assert time.process_time() - before < 0.2  # some 10 ms on an idle core
