"""Reasons for exposed communication: a tiny schedule for each, its numbers worked out beside it."""

from __future__ import annotations

import pytest
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model.schedule import Schedule
from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.exposure import explain_exposed

pytestmark = pytest.mark.quick


def reasons(case: Schedule) -> dict[str, str]:
    return {item.collective: item.reason for item in explain_exposed(case, simulate(case))}


def test_hidden_collectives_need_no_reason() -> None:
    assert reasons(schedule(start("s", 3), compute("a", 4), wait("s"))) == {}


def test_first_gather_has_nothing_to_hide_behind() -> None:
    case = schedule(start("s", 4), wait("s"), compute("a", 9, "wait_s"))
    assert reasons(case) == {
        "s": "first of the graph: no compute comes before its wait "
        "to hide its 4.0 us of communication"
    }


def test_first_gather_behind_little_compute() -> None:
    case = schedule(compute("view", 1), start("s", 4), wait("s"), compute("a", 9, "wait_s"))
    assert reasons(case) == {
        "s": "first of the graph: only 1.0 us of compute comes before its wait "
        "to hide its 4.0 us of communication"
    }


def test_last_reduction_has_nothing_to_hide_behind() -> None:
    case = schedule(compute("a", 9), start("s", 4, "a"), wait("s"))
    assert reasons(case) == {
        "s": "last of the graph: no compute is left after its start "
        "to hide its 4.0 us of communication"
    }


def test_last_reduction_with_little_compute_left() -> None:
    case = schedule(compute("a", 9), start("s", 4, "a"), compute("b", 3), wait("s"))
    assert reasons(case) == {
        "s": "last of the graph: only 3.0 us of compute is left after its start "
        "to hide its 4.0 us of communication"
    }


def test_nothing_between_start_and_wait() -> None:
    case = schedule(compute("a", 9), start("s", 4), wait("s"), compute("b", 9, "wait_s"))
    assert reasons(case) == {
        "s": "nothing runs between its start and its wait to hide its 4.0 us of communication"
    }


def test_critical_path_is_seen_through_views() -> None:
    case = schedule(
        compute("a", 9),
        compute("view", 0, "a"),
        start("s", 4, "view"),
        wait("s"),
        compute("slice", 0, "wait_s"),
        compute("b", 9, "slice"),
        compute("c", 9, "b"),
    )
    assert reasons(case) == {"s": "on the critical path: it needs a, and b needs it"}


def test_an_independent_neighbour_makes_no_critical_path() -> None:
    case = schedule(compute("a", 9), start("s", 4, "a"), wait("s"), compute("b", 9))
    assert reasons(case) == {
        "s": "nothing runs between its start and its wait to hide its 4.0 us of communication"
    }


def test_window_too_short() -> None:
    case = schedule(
        compute("a", 9), start("s", 4), compute("b", 3), wait("s"), compute("c", 9, "wait_s")
    )
    assert reasons(case) == {
        "s": "only 3.0 us between its start and its wait to hide its 4.0 us of communication"
    }


def test_busy_communicator() -> None:
    # s 9-15, t could have been hidden by b (9-14) but ran 15-19; r was over at 1
    case = schedule(
        start("r", 1),
        compute("a", 9),
        wait("r"),
        start("s", 6),
        start("t", 4),
        compute("b", 5),
        wait("t"),
        compute("c", 9, "wait_t"),
        wait("s"),
    )
    assert reasons(case) == {"t": "it began 6.0 us after its start, behind s on pg"}


def test_busy_communicator_and_short_window() -> None:
    # r 9-11, s 11-13, u 13-15, t 15-19, waited for at 10
    case = schedule(
        compute("a", 9),
        *(start(name, 2) for name in "rsu"),
        start("t", 4),
        compute("b", 1),
        wait("t"),
        compute("c", 9, "wait_t"),
        *map(wait, "rsu"),
    )
    assert reasons(case) == {
        "t": "only 1.0 us between its start and its wait to hide its 4.0 us of communication; "
        "it began 6.0 us after its start, behind r and 2 others on pg"
    }


def test_shared_link() -> None:
    # both at half rate from 9 on: s needs 6 instead of 3 (to 15), b lasts to 13
    case = schedule(
        compute("a", 9),
        start("s", 3, queue="p"),
        start("t", 3, queue="q"),
        compute("b", 4),
        wait("s"),
        compute("c", 9, "wait_s"),
        wait("t"),
        links={"p": "net", "q": "net"},
    )
    assert reasons(case) == {"s": "sharing its link cost it 3.0 us"}


def test_longest_first() -> None:
    case = schedule(
        start("s", 1), wait("s"), compute("a", 5), start("t", 3, "a"), wait("t"), compute("b", 9)
    )
    exposed = explain_exposed(case, simulate(case))
    assert [(item.collective, item.us) for item in exposed] == [("t", 3), ("s", 1)]


def test_launches_do_not_blur_the_start() -> None:
    # enqueued at 10 (1 + 9), before its own launch, waited for at 11; b ends at 22
    case = schedule(
        compute("a", 9), start("s", 4), wait("s"), compute("b", 9, "wait_s"), launch_us=1
    )
    assert reasons(case) == {
        "s": "only 1.0 us between its start and its wait to hide its 4.0 us of communication"
    }
