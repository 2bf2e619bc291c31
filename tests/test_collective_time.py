"""Time of one collective: hand-computed cases of each algorithm, and what holds for all."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.collective_time import (
    COLLECTIVE_KINDS,
    LinkConstants,
    collective_expression,
    collective_us,
)

pytestmark = pytest.mark.quick

# Round numbers; no ramps, and the LL protocol so slow that Simple is taken unless a test says so.
PLAIN = LinkConstants(
    base_us=10,
    network_base_us=100,
    local_hop_us=1,
    local_simple_us=2,
    network_hop_us=5,
    network_simple_us=20,
    ring_step_us=0,
    ll_share=0.001,
    network_ll_share=0.001,
    fill_us=0,
    network_fill_us=0,
    local_gb_per_s=100,
    copy_gb_per_s=200,
    tree_gb_per_s=50,
    nvls_gb_per_s=0,
    nvls_us=0,
    p2p_gb_per_s=80,
    p2p_copy_gb_per_s=400,
    message_us=3,
    network_message_us=7,
    node_gb_per_s=50,
    buffer_us=0,
    overlap_order=32,
)
MB = 10**6


def test_ring_in_a_node_moves_all_but_the_own_part_and_copies_that() -> None:
    # 8 MB among 8: 7 MB at 100 GB/s = 70 us, 1 MB copied at 200 GB/s = 5 us, 7 steps of 2 us.
    assert collective_us("all_gather", 8 * MB, 1, 8, PLAIN) == pytest.approx(10 + 70 + 5 + 14)
    assert collective_us("reduce_scatter", 8 * MB, 1, 8, PLAIN) == pytest.approx(99)


def test_ring_all_reduce_goes_round_twice() -> None:
    # 14 MB on the wire = 140 us, the own part once = 5 us, 14 steps = 28 us.
    assert collective_us("all_reduce", 8 * MB, 1, 8, PLAIN) == pytest.approx(10 + 140 + 5 + 28)


def test_small_message_takes_the_protocol_with_the_cheap_step() -> None:
    fast_ll = PLAIN._replace(ll_share=0.5)
    # 800 bytes: LL costs 10 + 7 steps of 1 us + twice the wire time of 7 ns, and a copy of 0.5 ns.
    expected = 17 + 2 * 0.007 + 0.0005
    assert collective_us("all_gather", 800, 1, 8, fast_ll) == pytest.approx(expected)
    assert collective_us("all_gather", 8 * MB, 1, 8, fast_ll) == pytest.approx(99)


def test_the_cheap_protocol_keeps_less_of_the_network_than_of_nvlink() -> None:
    ll = PLAIN._replace(ll_share=0.5, network_ll_share=0.1)
    # 2 nodes of 4, 8000 bytes: 7 kB at a tenth of 50 GB/s = 1.4 us hides the 0.14 us inside; copy
    # 5 ns; 6 local steps of 1 us, 1 between nodes of 5 us.
    expected = 110 + 1.4 + 0.005 + 6 + 5
    assert collective_us("all_gather", 8000, 2, 4, ll) == pytest.approx(expected)
    # All-reduce by the tree: 8 kB at 5 GB/s = 1.6 us; 6 local steps, 2 between nodes.
    assert collective_us("all_reduce", 8000, 2, 4, ll) == pytest.approx(110 + 1.6 + 6 + 10)


def test_ring_across_nodes_runs_at_the_slower_of_nic_and_nvlink() -> None:
    # 2 nodes of 4: 7 MB at the node's 50 GB/s = 140 us, copy 5 us; 6 local steps, 1 between nodes.
    expected = 110 + 140 + 5 + 6 * 2 + 20
    assert collective_us("all_gather", 8 * MB, 2, 4, PLAIN) == pytest.approx(expected)


def test_steps_inside_a_node_cost_more_in_a_ring_that_crosses_nodes() -> None:
    waiting = PLAIN._replace(ring_step_us=6)
    expected = 110 + 140 + 5 + 6 * (2 + 6) + 20
    assert collective_us("all_gather", 8 * MB, 2, 4, waiting) == pytest.approx(expected)
    assert collective_us("all_gather", 8 * MB, 1, 8, waiting) == pytest.approx(99)


def test_ring_across_nodes_is_a_straight_line_from_its_steps_to_the_plateau() -> None:
    ramped = PLAIN._replace(fill_us=3, network_fill_us=3)
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        plain_us = collective_us(kind, 8 * MB, 4, 4, PLAIN)
        assert collective_us(kind, 8 * MB, 4, 4, ramped) == plain_us
    assert collective_us("all_to_all", 8 * MB, 4, 4, ramped) > collective_us(
        "all_to_all", 8 * MB, 4, 4, PLAIN
    )


def test_one_rank_per_node_never_touches_nvlink() -> None:
    slow_nvlink = PLAIN._replace(local_gb_per_s=1e-3)
    # 4 nodes of 1: 3 MB of 4 MB at 50 GB/s = 60 us, copy 1 MB = 5 us.
    expected = 110 + 60 + 5 + 60
    assert collective_us("all_gather", 4 * MB, 4, 1, slow_nvlink) == pytest.approx(expected)


def test_two_stages_of_equal_speed_cost_a_little_more_than_one() -> None:
    tied = PLAIN._replace(node_gb_per_s=100, overlap_order=3)
    # 7 MB at 100 GB/s twice, in the 3-norm: 70 * 2^(1/3) = 88.19 us.
    expected = 110 + 70 * 2 ** (1 / 3) + 5 + 32
    assert collective_us("all_gather", 8 * MB, 2, 4, tied) == pytest.approx(expected)


def test_all_reduce_over_two_nodes_exchanges_instead_of_going_round() -> None:
    # Tree: 8 MB once at the node's 50 GB/s = 160 us; the chain inside relays 16 MB, here at
    # 1000 GB/s = 16 us, hidden; 6 local steps of 2 us, 2 between nodes of 20 us.
    wide = PLAIN._replace(tree_gb_per_s=1000)
    assert collective_us("all_reduce", 8 * MB, 2, 4, wide) == pytest.approx(110 + 160 + 12 + 40)


def test_tree_over_more_nodes_sends_twice_and_loses_to_the_ring_when_large() -> None:
    # 4 nodes of 4, 1.6 GB: ring 2 * 15/16 * 1.6 GB = 3 GB at 50 GB/s = 60 ms, tree 3.2 GB = 64 ms.
    wide = PLAIN._replace(tree_gb_per_s=1000)
    ring = 110 + 60_000 + 500 + 2 * 12 * 2 + 2 * 3 * 20
    assert collective_us("all_reduce", 1600 * MB, 4, 4, wide) == pytest.approx(ring)
    # 1.6 MB: tree 64 us + 6 local steps + 4 between nodes; the ring pays 24 and 6.
    assert collective_us("all_reduce", 1.6 * MB, 4, 4, wide) == pytest.approx(110 + 64 + 12 + 80)


def test_nvls_reduces_in_the_switch() -> None:
    sharp = PLAIN._replace(nvls_gb_per_s=90, nvls_us=4)
    # 8 MB (1 + 1/8) = 9 MB at 90 GB/s = 100 us; a ring would take 183.
    assert collective_us("all_reduce", 8 * MB, 1, 8, sharp) == pytest.approx(10 + 4 + 100)
    assert collective_us("all_gather", 8 * MB, 1, 8, sharp) == pytest.approx(99)


def test_ramp_is_the_optimum_of_a_chunked_pipeline() -> None:
    ramped = PLAIN._replace(fill_us=3, copy_gb_per_s=1e9)
    # Wire 70 us, fill 3 us: 2 sqrt(3 * 70) = 28.98 us more.
    expected = 10 + 70 + 14 + 2 * math.sqrt(210)
    assert collective_us("all_gather", 8 * MB, 1, 8, ramped) == pytest.approx(expected)


def test_all_to_all_shares_the_nic_of_each_gpu() -> None:
    # In a node: 7 MB at 80 GB/s = 87.5 us, own message 1 MB at 400 = 2.5 us, 7 messages of 3 us.
    assert collective_us("all_to_all", 8 * MB, 1, 8, PLAIN) == pytest.approx(10 + 87.5 + 2.5 + 21)
    # 2 nodes of 4: 4 MB leave through a quarter of 50 GB/s = 320 us; 3 and 4 messages.
    expected = 110 + 320 + 2.5 + 3 * 3 + 4 * 7
    assert collective_us("all_to_all", 8 * MB, 2, 4, PLAIN) == pytest.approx(expected)


def test_one_rank_costs_nothing() -> None:
    assert collective_us("all_reduce", 8 * MB, 1, 1, PLAIN) == 0.0


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown collective kind 'broadcast'.*all_to_all"):
        collective_us("broadcast", 1, 1, 2, PLAIN)
    with pytest.raises(ValueError, match="num_nodes=0"):
        collective_us("all_gather", 1, 0, 2, PLAIN)
    with pytest.raises(ValueError, match=r"size_bytes of all_gather must be finite.*-1"):
        collective_us("all_gather", -1, 1, 2, PLAIN)


placements = st.integers(1, 100_000).flatmap(
    lambda ranks: st.tuples(st.integers(1, ranks), st.just(ranks)).map(
        lambda nr: (nr[0], max(1, nr[1] // nr[0]))
    )
)
clusters = st.sampled_from([Cluster.preset(name) for name in Cluster.presets()])


@settings(max_examples=150, deadline=None)
@given(
    cluster=clusters,
    kind=st.sampled_from(COLLECTIVE_KINDS),
    placement=placements,
    sizes=st.lists(st.integers(0, 10**12), min_size=2, max_size=8, unique=True),
)
def test_time_is_finite_and_grows_with_size(
    cluster: Cluster, kind: str, placement: tuple[int, int], sizes: list[int]
) -> None:
    num_nodes, ranks_per_node = placement
    times = [
        cluster.collective_us(kind, size, num_nodes=num_nodes, ranks_per_node=ranks_per_node)
        for size in sorted(sizes)
    ]
    assert all(0 <= time < math.inf for time in times)
    assert all(a <= b for a, b in pairwise(times))


@settings(max_examples=100, deadline=None)
@given(
    cluster=clusters,
    kind=st.sampled_from(COLLECTIVE_KINDS),
    num_nodes=st.integers(1, 300),
    ranks_per_node=st.integers(1, 8),
    parts=st.lists(st.integers(1, 10**10), min_size=2, max_size=6),
)
def test_one_bucket_never_costs_more_than_its_parts(
    cluster: Cluster, kind: str, num_nodes: int, ranks_per_node: int, parts: list[int]
) -> None:
    def time(size: int) -> float:
        return cluster.collective_us(kind, size, num_nodes=num_nodes, ranks_per_node=ranks_per_node)

    assert time(sum(parts)) <= sum(map(time, parts)) * (1 + 1e-9)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize("placement", [(1, 8), (2, 8), (16, 8), (4, 1)])
def test_symbolic_size_gives_the_same_number(kind: str, placement: tuple[int, int]) -> None:
    size = sp.Symbol("s0", positive=True)
    constants = Cluster.preset("h100-ib").link_constants(placement[1])
    expression = collective_expression(kind, *placement, constants, size)
    assert expression.free_symbols == {size}
    for size_bytes in (1000, 10 * MB):
        expected = collective_us(kind, size_bytes, *placement, constants)
        assert float(expression.subs(size, size_bytes)) == pytest.approx(expected)


def test_published_points_are_met() -> None:
    """nccl-tests on one node of eight H100 (github.com/ai-dynamo/aiconfigurator, NCCL 2.29)."""
    h100 = Cluster.preset("h100-ib")
    predicted = h100.collective_us("all_gather", 512 * 2**20, num_nodes=1, ranks_per_node=8)
    # Bus bandwidth 336 GB/s: 7/8 of 512 MiB in 1398 us.
    assert predicted == pytest.approx(1398, rel=0.08)
