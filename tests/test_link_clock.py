"""The list scheduler's clock of a link, by hand and against the simulator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.passes.link_clock import LinkClock

pytestmark = pytest.mark.quick


def test_one_at_a_time() -> None:
    link = LinkClock(1)
    assert link.free_us == 0
    assert link.start(5.0, 20.0, 10.0).end_us == 25
    assert link.free_us == 25
    assert link.start(6.0, 20.0, 10.0).end_us == 45


@pytest.mark.parametrize(
    ("second_us", "ends_us"),
    # The first: latency 0-10, bytes 10-20 if it has the link alone.
    [(0.0, (30, 30)), (5.0, (25, 30)), (10.0, (20, 30)), (30.0, (20, 50))],
)
def test_two_share_what_of_their_bytes_overlaps(
    second_us: float, ends_us: tuple[float, float]
) -> None:
    link = LinkClock(2)
    flights = [link.start(at_us, 20.0, 10.0) for at_us in (0.0, second_us)]
    assert tuple(flight.end_us for flight in flights) == ends_us


def test_a_third_waits_for_the_first_to_end() -> None:
    link = LinkClock(2)
    link.start(0.0, 20.0, 0.0)
    link.start(0.0, 30.0, 0.0)
    assert link.free_us == 20
    assert link.start(0.0, 5.0, 0.0).end_us == 25


TIMES = st.integers(0, 50)


@given(TIMES, TIMES, TIMES, TIMES, TIMES)
def test_two_end_as_simulated(
    latency: int, wire: int, other_latency: int, other_wire: int, later: int
) -> None:
    tasks = (
        start("a", latency + wire, wire_us=wire),
        compute("c", later),
        start("b", other_latency + other_wire, wire_us=other_wire),
        wait("a"),
        wait("b"),
    )
    spans = simulate(schedule(*tasks, queue_width=2)).spans
    ends_us = [span.end_us for span in spans if span.kind == "start"]
    link = LinkClock(2)
    flights = [
        link.start(0.0, latency + wire, wire),
        link.start(later, other_latency + other_wire, other_wire),
    ]
    assert [flight.end_us for flight in flights] == pytest.approx(ends_us)
