"""What the planning benchmarks compute besides planning: replay, wrong costs, tables, exponents."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from support.benchmarks import import_benchmark
from support.graphs import GraphBuilder, two_linear_layers
from support.schedules import compute, schedule, schedules, start, wait

from inductor_overlap.cost_model.memory import memory_profile
from inductor_overlap.cost_model.pricing import as_full
from inductor_overlap.cost_model.schedule import Buffer, Schedule
from inductor_overlap.passes.collectives import find_collectives

compile_time: Any = import_benchmark("bench_compile_time")
bench: Any = import_benchmark("bench_schedule")
contenders: Any = import_benchmark("schedule_contenders")
intree: Any = import_benchmark("intree_passes")
links: Any = import_benchmark("link_prices")
replay: Any = import_benchmark("schedule_replay")
table: Any = import_benchmark("schedule_table")

pytestmark = pytest.mark.quick


def test_replay_holds_a_collective_until_its_wait() -> None:
    # shard (2) and full (8) until the wait; an unread input (1) to the end.
    case = schedule(
        start("s", 1, reads=("shard",), writes=("full",)),
        compute("other", 1, writes=("y",)),
        wait("s"),
        compute("use", 1, reads=("full", "y"), writes=("out",)),
        buffers=(
            Buffer("unread", 1, is_input=True),
            Buffer("shard", 2, is_input=True),
            Buffer("full", 8),
            Buffer("y", 4),
            Buffer("out", 5, is_output=True),
        ),
    )
    # During "other" 1 + 2 + 8 + 4; during "use" 1 + 8 + 4 + 5.
    assert replay.replay_peak(case) == 18
    assert replay.replay_peak(case.reordered(["s", "wait_s", "other", "use"])) == 18


@given(schedules())
@settings(max_examples=100)
def test_replay_and_the_product_agree(case: Schedule) -> None:
    assert replay.replay_peak(case) == max(memory_profile(case))


def test_link_prices_are_latency_and_ring_bandwidth() -> None:
    prices = links.LinkPrices(100, 10)
    # 1 MB among 4 ranks: 3/4 of it at 100 GB/s = 1e5 bytes per us; an all-reduce sends it twice.
    assert prices.collective_us("all_gather", 1_000_000, range(4)) == pytest.approx(10 + 7.5)
    assert prices.collective_us("all_reduce", 1_000_000, range(4)) == pytest.approx(10 + 15)


@pytest.mark.parametrize(
    ("gb_per_s", "latency_us", "mib"),
    [
        # A latency of 1 us at 1 GB/s saturates far below torch's floor of 10 MiB.
        (1, 1, 10),
        # 90 % of the best of the sizes tried: a 1 GiB gather takes 10.6 ms and 60 us. 64 MiB: 9 %
        # of its time is latency, against 0.6 % there.
        (100, 60, 64),
        (200, 1000, 500),
    ],
)
def test_pre_buckets_saturate_within_torchs_bounds(
    gb_per_s: float, latency_us: float, mib: float
) -> None:
    prices = as_full(links.LinkPrices(gb_per_s, latency_us))
    assert intree.saturating_mib(prices, 64) == mib


def test_a_merged_collective_errs_like_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    build = GraphBuilder()
    x = build.input("x", 8, 8)
    for fqn, width in (("narrow.weight", 8), ("wide.weight", 16)):
        x = build.mm(x, build.gather(build.parameter(fqn, 2, width)))
    build.output(x)
    gathers = [c for c in find_collectives(build.graph) if c.kind == "all_gather"]
    wrong, other = replay.Perturbation.of(SimpleNamespace(graph=build.graph), 2)
    alone = [wrong._of_collective(c) for c in gathers]
    assert len(set(alone)) == len(gathers) == 2
    assert alone != [other._of_collective(c) for c in gathers]
    assert all(0.7 <= factor <= 1.3 for factor in alone)
    # Inputs of both, as a bucket of both has them.
    inputs = frozenset(name for c in gathers for name in replay.served(c))
    assert len(inputs) == 2
    monkeypatch.setattr(replay, "served", lambda collective: inputs)
    sizes = [c.size_bytes for c in gathers]
    merged = SimpleNamespace(name="bucket", kind="all_gather")
    expected = sum(s * f for s, f in zip(sizes, alone, strict=True)) / sum(sizes)
    assert wrong._of_collective(merged) == pytest.approx(expected)


class Case:
    """A traced model as far as contenders and tables ask for it."""

    modules = ("layers.0", "layers.1")
    name = "two layers"


def small_row() -> Any:
    build = GraphBuilder()
    gm = two_linear_layers(build)
    traced = SimpleNamespace(case=Case, mesh_shape=(4,))
    problem = contenders.pose("two layers, forward", gm, as_full(links.LinkPrices(1, 5)), traced)
    names = ("input order", "ours manual", "ours greedy", "ours auto")
    return table.Row(problem, "slow", {name: contenders.compete(name, problem) for name in names})


def test_contenders_keep_the_limit_and_leave_the_graph_alone() -> None:
    row = small_row()
    calls = [n.name for n in row.problem.gm.graph.nodes if n.op == "call_function"]
    given = two_linear_layers(GraphBuilder()).graph
    assert calls == [node.name for node in given.nodes if node.op == "call_function"]
    input_us = row.step_us("input order")
    for name in contenders.OURS:
        assert not row.is_over(name)
        assert row.problem.bound_us <= row.step_us(name) <= input_us


def result(step_us: float, peak_bytes: int) -> Any:
    timeline = SimpleNamespace(step_us=step_us, exposed_us=1.0)
    return SimpleNamespace(timeline=timeline, peak_bytes=peak_bytes, collectives=(), pass_s=0.5)


def row_of(rematches: Any = None, **results: Any) -> Any:
    problem = SimpleNamespace(name="model", bound_us=100.0, limit_bytes=1000)
    named = {name.replace("_", " "): value for name, value in results.items()}
    return table.Row(problem, "net", named, rematches or {})


def test_losses_and_broken_limits_are_named() -> None:
    row = row_of(
        {"torch manual": result(99.0, 2000)},
        torch_manual=result(110.0, 2000),
        torch_auto=result(120.0, 1000),
        ours_manual=result(150.0, 900),
        ours_greedy=result(150.0, 1100),
        ours_auto=result(121.0, 1000),
    )
    assert list(table.losses_of(row)) == [
        "model; net: auto 10.00 % above torch manual "
        "(100.0 % over the limit; auto with as much: -10.00 %)",
        "model; net: auto 0.83 % above torch auto (within the limit)",
        "model; net: ours greedy is 10.00 % over the limit",
    ]


def test_the_mean_gap_is_geometric() -> None:
    rows = [
        row_of(ours_manual=result(100.0, 1), ours_greedy=result(100.0, 1), ours_auto=result(s, 1))
        for s in (100.0, 144.0)
    ]
    # sqrt(1.00 * 1.44) = 1.2
    line = next(line for line in table.summary("two", rows) if line.startswith("  ours auto"))
    assert line.split() == ["ours", "auto", "20.00", "44.00", "1.0"]


def test_exponents_are_fitted_in_logarithms() -> None:
    assert compile_time.exponent([2, 4, 8], [3 * 2**1.5, 3 * 4**1.5, 3 * 8**1.5]) == pytest.approx(
        1.5
    )


def test_every_table_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_schedule.py"])
    assert bench._arguments().tables == ["grid", "clusters", "others"]
    monkeypatch.setattr(sys, "argv", ["bench_schedule.py", "--tables", "others", "--quick"])
    assert (bench._arguments().tables, bench._arguments().quick) == (["others"], True)
