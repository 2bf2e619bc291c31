"""Orders on demand and one ahead, on programs small enough to write the order down."""

from __future__ import annotations

import pytest
from support.programs import free, program
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.passes.program import Program
from inductor_overlap.passes.reorder import Emitter, order_on_demand, order_one_ahead

pytestmark = pytest.mark.quick


def forward() -> Program:
    """Both gathers first, of 6 us each; two kernels of 10 us."""
    tasks = (
        start("g1", 6),
        start("g2", 6),
        wait("g1"),
        wait("g2"),
        compute("c1", 10, "wait_g1"),
        compute("c2", 10, "c1", "wait_g2"),
    )
    return program(schedule(*tasks), [free("g1", "all_gather", 1), free("g2", "all_gather", 1)])


def backward() -> Program:
    """Two layers: gather, kernel, scatter."""
    tasks = []
    for i in (1, 2):
        tasks += [start(f"g{i}", 6), wait(f"g{i}"), compute(f"c{i}", 10, f"wait_g{i}")]
        tasks += [start(f"s{i}", 6, f"c{i}"), wait(f"s{i}")]
    found = [free(f"g{i}", "all_gather", 1) for i in (1, 2)]
    return program(
        schedule(*tasks), [*found, *[free(f"s{i}", "reduce_scatter", 1) for i in (1, 2)]]
    )


def step_us(given: Program, order: list[str]) -> float:
    ordered = given.with_order(order)
    ordered.schedule.validate()
    return simulate(ordered.schedule).step_us


def test_on_demand_gathers_just_before_the_reader() -> None:
    order = order_on_demand(forward())
    assert order == ["g1", "wait_g1", "c1", "g2", "wait_g2", "c2"]
    assert step_us(forward(), order) == 32  # 2 x (6 + 10)


def test_on_demand_ends_a_reduction_at_once() -> None:
    order = order_on_demand(backward())
    assert order == [task.name for task in backward().schedule.tasks]
    assert step_us(backward(), order) == 44  # 2 x (6 + 10 + 6)


def test_one_ahead_starts_the_next_gather_before_this_ones_wait_in_forward() -> None:
    order = order_one_ahead(forward())
    assert order == ["g1", "g2", "wait_g1", "c1", "wait_g2", "c2"]
    assert step_us(forward(), order) == 26  # 6 exposed, then 2 x 10


def test_one_ahead_starts_it_after_the_wait_in_backward() -> None:
    """A reduction ends when the next one starts."""
    order = order_one_ahead(backward())
    assert order == [
        *("g1", "wait_g1", "g2", "c1"),
        *("s1", "wait_g2", "c2"),
        *("wait_s1", "s2", "wait_s2"),
    ]
    # g1 6, c1 to 16 beside g2, c2 to 26 beside s1, s2 to 32.
    assert step_us(backward(), order) == 32


def behind_a_barrier() -> Program:
    tasks = (
        start("g1", 6),
        wait("g1"),
        compute("c1", 10, "wait_g1"),
        compute("barrier", 1, "wait_g1"),
        start("g2", 6, "barrier"),
        wait("g2"),
        compute("c2", 10, "wait_g2"),
    )
    return program(schedule(*tasks), [free("g1", "all_gather", 1), free("g2", "all_gather", 1)])


def test_no_order_starts_a_gather_before_its_barrier() -> None:
    given = behind_a_barrier()
    for order in (order_on_demand(given), order_one_ahead(given)):
        assert [name for name in order if name in ("c1", "barrier", "c2")] == [
            "c1",
            "barrier",
            "c2",
        ]
        assert order.index("barrier") < order.index("g2")


def test_windows_say_where_collectives_are_needed_and_ready() -> None:
    windows = backward().windows
    assert windows.first_use == {"g1": 0, "g2": 1, "s1": 2, "s2": 2}
    assert windows.ready_at == {"g1": 0, "g2": 0, "s1": 1, "s2": 2}
    assert windows.needed == (("g1",), ("g2",))
    assert behind_a_barrier().windows.ready_at == {"g1": 0, "g2": 2}


def test_an_emitter_writes_what_is_missing_once() -> None:
    given = forward()
    emitter = Emitter(given.schedule)
    assert emitter.missing("c1") == ["g1", "wait_g1", "c1"]
    assert emitter.emit("c1") == ["g1", "wait_g1", "c1"]
    assert emitter.emit("c1") == [] and "g1" in emitter and "g2" not in emitter
    emitter.emit("c2")
    assert emitter.order == ["g1", "wait_g1", "c1", "g2", "wait_g2", "c2"]


def test_a_wait_needs_its_start_also_if_its_dependences_do_not_say_so() -> None:
    given = forward()
    assert given.schedule.needs["c2"] == ("c1", "wait_g2")
    assert "g1" in given.schedule.needs["wait_g1"]
