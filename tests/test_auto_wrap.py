"""The portfolio: what wrap= names, which plans are ranked, what a limit does."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.programs import free, program
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model.schedule import Buffer
from inductor_overlap.passes.auto_wrap import (
    INPUT_ORDER,
    AutoWrap,
    MemoryLimitError,
    NoWrap,
    parse_wrap,
    rank_choices,
)
from inductor_overlap.passes.greedy_wrap import GreedyWrap
from inductor_overlap.passes.manual_wrap import ManualWrap
from inductor_overlap.passes.plan import Bucket, Plan
from inductor_overlap.passes.program import Program
from inductor_overlap.passes.search import EARLY, ONE_AHEAD, Proposal, Search
from inductor_overlap.passes.stages import repeated_blocks

pytestmark = pytest.mark.quick


def two_layers() -> Program:
    """Each a gather of 100 bytes (2 us) and a kernel of 10 us: 24 us one after the other."""
    tasks, buffers = [], []
    for i in (0, 1):
        buffers.append(Buffer(f"w{i}", 100))
        tasks += [start(f"g{i}", 2, writes=(f"w{i}",)), wait(f"g{i}", reads=(f"w{i}",))]
        tasks.append(compute(f"c{i}", 10, f"wait_g{i}", reads=(f"w{i}",)))
    found = [free(f"g{i}", "all_gather", 100, fqn=f"layers.{i}.w") for i in (0, 1)]
    return program(schedule(*tasks, buffers=tuple(buffers)), found)


def test_wrap_names_a_policy() -> None:
    assert parse_wrap("auto") == AutoWrap()
    assert parse_wrap("greedy") == GreedyWrap()
    assert parse_wrap("none") == NoWrap()
    assert parse_wrap(["a", ["b", "c"]]) == ManualWrap(("a", ("b", "c")))


@pytest.mark.parametrize("wrap", ["best", None, 3, True])
def test_anything_else_is_refused(wrap: Any) -> None:
    with pytest.raises(ValueError, match='wrap must be "auto", "greedy", "none" or a list'):
        parse_wrap(wrap)


def test_blocks_are_cut_at_the_first_number() -> None:
    names = ["tok.weight", "layers.0.attn.wq.0.w", "layers.11.w", "a.b.3.c.w", "w", "x2.w"]
    found = [free(name, "all_gather", 1, fqn=name) for name in names]
    keys = [key for key, _ in repeated_blocks([*found, free("unknown", "all_gather", 1)])]
    assert keys == ["tok", "layers.0", "layers.11", "a.b.3", "w", "x2"]


def test_the_best_comes_first_and_the_input_order_last() -> None:
    ranking = rank_choices(two_layers(), AutoWrap(), memory_limit_bytes=math.inf)
    steps = [choice.timeline.step_us for choice in ranking.choices()]
    assert steps[0] == 22 and steps[-1] == 24
    assert steps == sorted(steps)
    assert list(ranking.choices())[-1].plan.policy == INPUT_ORDER
    assert list(ranking.choices())[-1].plan.changes_nothing
    assert ranking.refused == ()


def test_a_search_ends_at_the_bound() -> None:
    """The first proposal takes 22 us, which is the bound; without a bound all are tried."""
    settled = rank_choices(two_layers(), AutoWrap(), memory_limit_bytes=math.inf, bound_us=22)
    kinds = {trial.proposal.kind for trial in settled.search.trials}
    assert kinds == {"single"}
    full = rank_choices(two_layers(), AutoWrap(), memory_limit_bytes=math.inf)
    assert len(full.search.trials) > len(settled.search.trials)
    assert next(settled.choices()).timeline.step_us == next(full.choices()).timeline.step_us


@pytest.mark.parametrize(
    ("bound_us", "is_settled"),
    [(22.0, True), (22 / (1 + 9e-6), True), (22 / (1 + 1e-5), False), (0.0, False)],
)
def test_a_gap_is_worth_tasks_in_proportion(bound_us: float, is_settled: bool) -> None:
    """Two trials of 6 tasks, 12 in all: worth it for 12 / 1,250,000 = 9.6e-6 of a step."""
    search = Search(two_layers(), math.inf, bound_us, is_coarse=False)
    assert not search.is_settled
    for order in (EARLY, ONE_AHEAD):
        search.try_one(Proposal("single", order=order))
    assert min(trial.timeline.step_us for trial in search.trials) == 22
    assert search.num_ordered == 12
    assert search.is_settled == is_settled


def test_plans_over_the_limit_are_refused_with_the_reason() -> None:
    """Overlap needs both weights, 200 bytes; the input order one, 100."""
    ranking = rank_choices(two_layers(), AutoWrap(), memory_limit_bytes=150)
    assert [choice.plan.policy for choice in ranking.choices()] == [INPUT_ORDER]
    assert ranking.refused


@pytest.mark.parametrize(
    ("last_us", "preferred", "expected_us", "peak_bytes"),
    [(0.1, 100, 32.1, 100), (0.1, math.inf, 32.0, 150), (2.0, 100, 32.0, 150)],
)
def test_memory_above_what_is_preferred_is_worth_one_percent(
    last_us: float, preferred: float, expected_us: float, peak_bytes: int
) -> None:
    """Three kernels of 10 us behind a gather of 2 us; the last gather is hidden for 150 bytes."""
    tasks, buffers, found = [], [], []
    for i, (size_bytes, gather_us) in enumerate([(50, 2.0), (50, 2.0), (100, last_us)]):
        buffers.append(Buffer(f"w{i}", size_bytes))
        tasks += [start(f"g{i}", gather_us, writes=(f"w{i}",)), wait(f"g{i}", reads=(f"w{i}",))]
        tasks.append(compute(f"c{i}", 10, f"wait_g{i}", reads=(f"w{i}",)))
        found.append(free(f"g{i}", "all_gather", size_bytes, can_merge=False))
    given = program(schedule(*tasks, buffers=tuple(buffers)), found)
    ranking = rank_choices(given, AutoWrap(), memory_limit_bytes=150, preferred_bytes=preferred)
    best = next(ranking.choices()).timeline
    assert best.step_us == pytest.approx(expected_us)
    assert best.peak_bytes == peak_bytes


def test_a_limit_below_every_plan_is_an_error() -> None:
    with pytest.raises(MemoryLimitError, match="raise memory_limit_gb to at least"):
        rank_choices(two_layers(), AutoWrap(), memory_limit_bytes=99)


def test_an_input_over_the_limit_is_no_choice() -> None:
    """Both gathers first: 200 bytes. One after the other fits 100, and is slower."""
    given = two_layers().with_order(["g0", "g1", "wait_g0", "wait_g1", "c0", "c1"])
    ranking = rank_choices(given, GreedyWrap(), memory_limit_bytes=100)
    assert all(choice.timeline.peak_bytes <= 100 for choice in ranking.choices())
    assert INPUT_ORDER not in [choice.plan.policy for choice in ranking.choices()]


def test_no_wrap_has_one_choice() -> None:
    ranking = rank_choices(two_layers(), NoWrap(), memory_limit_bytes=math.inf)
    assert [choice.plan.policy for choice in ranking.choices()] == [INPUT_ORDER]


# The plan itself.

PLAN = Plan("manual, early", (Bucket("b", ("g0", "g1")),), ("b.pack", "b"), ("b",))

COALESCED = Plan("manual, early", (Bucket("b", ("g0", "g1"), "coalesced"),), ("b",), ("b",))


def test_a_plan_survives_json() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert str(PLAN) == "manual, early: 2 collectives in 1 bucket"
    assert Plan.from_json(COALESCED.to_json()) == COALESCED
    assert str(COALESCED) == "manual, early: 2 collectives in 1 bucket, 1 coalesced"


def test_a_plan_of_an_unknown_form_is_refused() -> None:
    text = COALESCED.to_json().replace('"coalesced"', '"stacked"')
    with pytest.raises(ValueError, match="expected the JSON text of a plan"):
        Plan.from_json(text)


def test_the_digest_covers_what_ranks_must_agree_on() -> None:
    """Buckets and issue order; neither the policy's name nor the order of local tasks."""
    same = Plan("another name", PLAN.buckets, ("pad", "b.pack", "b"), PLAN.starts)
    other_payload = Plan("manual", (Bucket("b", ("g1", "g0")),), (), PLAN.starts)
    assert same.digest == PLAN.digest
    other_starts = Plan("manual", PLAN.buckets, (), ("b", "c"))
    no_buckets = Plan("manual", (), (), PLAN.starts)
    other_form = Plan("manual", COALESCED.buckets, (), PLAN.starts)
    digests = {p.digest for p in (PLAN, other_payload, other_starts, no_buckets, other_form)}
    assert len(digests) == 5


def test_a_plan_that_was_edited_says_what_to_do() -> None:
    edited = PLAN.to_json().replace('"g1"', '"g2"')
    with pytest.raises(ValueError, match="delete the digest line after editing a plan"):
        Plan.from_json(edited)
    with pytest.raises(ValueError, match="expected the JSON text of a plan"):
        Plan.from_json("[]")


def test_what_was_tried_before_is_not_tried_again() -> None:
    search = Search(two_layers(), math.inf, 0.0, is_coarse=False)
    first = search.try_one(Proposal("single"))
    assert search.try_one(Proposal("gathers of no latency")) is first
    assert search.try_one(Proposal("single", order=ONE_AHEAD)) is not first
    assert len(search.trials) == 2
