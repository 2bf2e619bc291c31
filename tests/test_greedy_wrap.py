"""Greedy wrapping, by hand: a gather of 100 bytes takes 2 us, of 200 bytes 3 us, and so on."""

from __future__ import annotations

import math

import pytest
from support.programs import free, program
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model.schedule import Buffer
from inductor_overlap.passes.greedy_wrap import GreedyWrap
from inductor_overlap.passes.program import Program

pytestmark = pytest.mark.quick


def forward(compute_us: float) -> Program:
    """Four layers: a gather of 100 bytes and a kernel each."""
    tasks, buffers = [], []
    for i in range(1, 5):
        buffers.append(Buffer(f"w{i}", 100))
        tasks += [start(f"g{i}", 2, writes=(f"w{i}",)), wait(f"g{i}", reads=(f"w{i}",))]
        tasks.append(compute(f"c{i}", compute_us, f"wait_g{i}", reads=(f"w{i}",)))
    found = [free(f"g{i}", "all_gather", 100, input_position=i) for i in range(1, 5)]
    return program(schedule(*tasks, buffers=tuple(buffers)), found)


def members(given: Program, max_share: float, limit: float = math.inf) -> list[tuple[str, ...]]:
    made = GreedyWrap(max_share).buckets(given, memory_limit_bytes=limit)
    return [bucket.members for bucket in made]


def test_a_bucket_grows_while_its_gather_fits_the_compute_before_it() -> None:
    """Nothing comes before g1. g2 may grow for the 10 us of c1: three gathers take 4 us."""
    assert members(forward(10), 1.0) == [("g2", "g3", "g4")]
    # 3 us of c1 hold two gathers (3 us), not three (4 us).
    assert members(forward(3), 1.0) == [("g2", "g3")]


def test_a_bucket_stays_below_its_share_of_all_bytes() -> None:
    """Half of 400 bytes are two gathers; a quarter is one."""
    assert members(forward(10), 0.5) == [("g2", "g3")]
    assert members(forward(10), 0.25) == []


def test_a_bucket_fits_twice_beside_the_step_before() -> None:
    """c1 runs with w1: 100 bytes. Two gathers hold 2 x (100 out + 50 in), twice that is 600."""
    assert members(forward(10), 0.5, limit=700) == [("g2", "g3")]
    assert members(forward(10), 0.5, limit=699) != [("g2", "g3")]


def test_without_compute_a_bucket_may_not_close() -> None:
    """Kernels without duration hide nothing: one gather for all."""
    assert members(forward(0), 0.25) == [("g1", "g2", "g3", "g4")]


def backward(compute_us: float, tail_us: float) -> Program:
    """Four gradients of 100 bytes, a kernel in front of each and one behind all."""
    tasks = []
    for i in range(1, 5):
        tasks += [compute(f"c{i}", compute_us), start(f"s{i}", 2, f"c{i}"), wait(f"s{i}")]
    tasks.append(compute("tail", tail_us))
    found = [free(f"s{i}", "reduce_scatter", 100, input_position=i) for i in range(1, 5)]
    return program(schedule(*tasks), found)


def test_reductions_grow_along_the_same_compute() -> None:
    """s1 has no window; from s2 on 10 us hold all three (4 us), with 100 us left to hide them."""
    assert members(backward(10, 100), 1.0) == [("s2", "s3", "s4")]


def test_reductions_close_early_near_the_end() -> None:
    """5 x 3 us must be left for two: they are after s3 (10 + 10), not for three after s4 (10)."""
    assert members(backward(10, 10), 1.0) == [("s2", "s3")]
    assert members(backward(10, 0), 1.0) == []
