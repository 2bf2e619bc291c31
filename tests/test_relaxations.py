"""The parts of the lower bound, each against another way to compute it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model import precedence
from inductor_overlap.cost_model.batches import fewest_batches
from inductor_overlap.cost_model.flow_shop import johnson_us
from inductor_overlap.cost_model.lower_bound import jackson
from inductor_overlap.cost_model.precedence import Job, Precedence
from inductor_overlap.cost_model.schedule import Schedule, Task

pytestmark = pytest.mark.quick

times = st.integers(0, 6).map(float)


def head_of(case: Schedule, name: str) -> float:
    return Precedence(case).head_us[case.tasks.index(case.by_name[name])]


def tail_of(case: Schedule, name: str) -> float:
    return Precedence(case).tail_us[case.tasks.index(case.by_name[name])]


def test_head_is_the_work_of_all_ancestors_on_one_machine() -> None:
    case = schedule(compute("a", 2), compute("b", 3), compute("c", 1, "a", "b"))
    assert head_of(case, "c") == 5  # the longest path is 3


def test_head_counts_shared_ancestors_once() -> None:
    tasks = [compute("a", 2), compute("b", 3, "a"), compute("c", 4, "a"), compute("d", 1, "b", "c")]
    assert head_of(schedule(*tasks), "d") == 9


def test_head_begins_at_the_least_head_of_the_ancestors() -> None:
    # a and b both wait for the gather of 4: 4 + 2 + 3
    case = schedule(
        start("s", 4),
        wait("s"),
        compute("a", 2, "wait_s"),
        compute("b", 3, "wait_s"),
        compute("c", 1, "a", "b"),
    )
    assert head_of(case, "c") == 9


def test_head_adds_the_bytes_of_one_link_and_one_latency() -> None:
    # latencies 1 and 2, bytes 2 + 4: c cannot begin before 1 + 6; paths give 6
    case = schedule(
        start("s", 3, wire_us=2),
        start("t", 6, wire_us=4),
        wait("s"),
        wait("t"),
        compute("c", 1, "wait_s", "wait_t"),
    )
    assert head_of(case, "c") == 7


def test_head_adds_what_must_lie_between_the_link_and_the_task() -> None:
    # 4 + 4 of bytes, and after either gather at least 3 of compute
    case = schedule(
        start("s", 4),
        start("t", 4),
        wait("s"),
        wait("t"),
        compute("a", 3, "wait_s"),
        compute("b", 3, "wait_t"),
        compute("c", 1, "a", "b"),
    )
    assert head_of(case, "c") == 11  # compute alone: 4 + 6


def test_tail_mirrors_the_head_with_latency_behind_the_task() -> None:
    # after a: latency 1 at least, then bytes 2 + 4
    case = schedule(
        compute("a", 1),
        start("s", 3, "a", wire_us=2),
        start("t", 6, "a", wire_us=4),
        wait("s"),
        wait("t"),
    )
    assert tail_of(case, "a") == 7
    assert tail_of(case, "wait_t") == 0


def test_a_task_behind_a_start_does_not_wait_for_its_end() -> None:
    case = schedule(start("s", 9), compute("a", 1, "s"), wait("s"))
    assert head_of(case, "a") == 0


def test_launch_is_part_of_compute_that_takes_time() -> None:
    case = schedule(compute("a", 2), compute("view", 0, "a"), compute("b", 1, "view"), launch_us=1)
    assert head_of(case, "b") == 3


def test_sets_too_large_to_add_up_only_lower_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = schedule(
        compute("a", 2), compute("b", 3), compute("c", 4), compute("d", 1, "a", "b", "c")
    )
    assert head_of(case, "d") == 9
    monkeypatch.setattr(precedence, "_BITS_PER_JOB", 0)
    assert head_of(case, "d") == 4  # the longest path is left


@given(st.lists(st.builds(Job, st.just(0), times, times, times), min_size=1, max_size=7))
@settings(max_examples=300, deadline=None)
def test_jackson_is_the_best_subset_bound(jobs: list[Job]) -> None:
    """Least head + all work + least tail, over all subsets (Carlier, EJOR 11, 1982)."""
    subsets = (s for size in range(1, len(jobs) + 1) for s in combinations(jobs, size))
    expected = max(
        min(j.head_us for j in s) + sum(j.work_us for j in s) + min(j.tail_us for j in s)
        for s in subsets
    )
    assert jackson(jobs)[0] == expected


@given(st.lists(st.tuples(times, times), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_johnson_is_the_best_permutation(pairs: list[tuple[float, float]]) -> None:
    assert johnson_us(pairs) == min(_makespan(order) for order in permutations(pairs))


def _makespan(order: Sequence[tuple[float, float]]) -> float:
    first = second = 0.0
    for a, b in order:
        first += a
        second = max(first, second) + b
    return second


@given(
    st.lists(st.tuples(times, times, times), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 40),
)
@settings(max_examples=200, deadline=None)
def test_fewest_batches_is_the_best_partition(
    items: list[tuple[float, float, float]], latency: int, step: int
) -> None:
    begin = min(head for _, _, head in items)
    counts = (
        len(batches)
        for order in permutations(items)
        for batches in _cuts(order)
        if _meets_deadlines(batches, begin, latency, step)
    )
    assert fewest_batches(items, latency, step) == min(counts, default=math.inf)


def _cuts(
    order: Sequence[tuple[float, float, float]],
) -> list[list[list[tuple[float, float, float]]]]:
    """All ways of cutting a sequence into batches."""
    cut: list[list[list[tuple[float, float, float]]]] = []
    for mask in range(2 ** (len(order) - 1)):
        batches = [[order[0]]]
        for index, item in enumerate(order[1:]):
            if mask >> index & 1:
                batches.append([])
            batches[-1].append(item)
        cut.append(batches)
    return cut


def _meets_deadlines(
    batches: list[list[tuple[float, float, float]]], now: float, latency: int, step: int
) -> bool:
    for batch in batches:
        now += latency + sum(wire for _, wire, _ in batch)
        if any(now > step - tail for tail, _, _ in batch):
            return False
    return True


def test_predecessors_include_the_start_of_a_wait() -> None:
    case = schedule(start("s", 1), Task("w", "wait", collective="s"))
    assert Precedence(case).preds == [[], [0]]
