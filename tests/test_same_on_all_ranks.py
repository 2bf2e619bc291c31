"""Plans and predictions that must not depend on the rank: groups, padding, what is fused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from support.graphs import GraphBuilder, aten, decided
from support.ranks import fake_process_group
from torch.distributed.device_mesh import init_device_mesh

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.cluster_prices import ClusterCostModel
from inductor_overlap.cost_model.placement import groups_like, placement, slowest_placement
from inductor_overlap.passes.auto_wrap import parse_wrap
from inductor_overlap.passes.collectives import find_collectives
from inductor_overlap.passes.post_grad import overlap_graph

pytestmark = pytest.mark.quick

H100 = Cluster.preset("h100-ib")
ONE_BUCKET = [["layers.*"]]


def test_a_placement_is_counted_by_nodes() -> None:
    assert placement(range(16), 8) == (2, 8)
    assert placement((0, 8, 16), 8) == (3, 1)
    assert placement((6, 7, 8), 8) == (2, 2)


def test_groups_of_one_mesh_dimension_are_found_from_one_of_them() -> None:
    """A 4 x 3 mesh cuts 12 ranks into rows of three and columns of four."""
    rows = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    columns = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    for groups in (rows, columns):
        for group in groups:
            assert [list(like) for like in groups_like(tuple(group), 12)] == groups
    assert [list(like) for like in groups_like((2,), 4)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("ranks", "num_ranks"),
    [([0, 1, 3], 12), ([1, 2, 3], 12), ([0, 1, 2], 0), ([3, 2, 1], 12)],
)
def test_a_group_that_no_mesh_has_is_like_itself_only(ranks: list[int], num_ranks: int) -> None:
    assert [list(like) for like in groups_like(tuple(ranks), num_ranks)] == [ranks]


def test_a_mesh_may_leave_out_the_last_ranks() -> None:
    assert groups_like((3, 4, 5), 8) == (range(3), range(3, 6))


def test_the_slowest_of_the_groups_decides() -> None:
    """On 8 ranks a node, of the rows of a 4 x 3 mesh only 6, 7, 8 is on two nodes."""
    assert slowest_placement((0, 1, 2), 8, num_ranks=12) == (2, 2)
    assert slowest_placement((0, 1, 2), 8, num_ranks=0) == (1, 3)
    assert slowest_placement(tuple(range(8)), 8, num_ranks=64) == (1, 8)


@pytest.mark.parametrize("rank", [0, 2, 6, 11])
def test_all_ranks_read_the_same_groups_and_prices(rank: int) -> None:
    with fake_process_group(12, rank):
        mesh = init_device_mesh("cpu", (4, 3), mesh_dim_names=("replicate", "shard"))
        b = GraphBuilder(group_size=3)
        shard = b.parameter("w", 2, 8)
        x = b.input("tangents_1", 6, 8)
        shards, replicas = (mesh.get_group(name).group_name for name in ("shard", "replicate"))
        gathered = b.gather(shard, shards)
        scattered = b.scatter(b.call(aten.mul.Tensor, x, gathered), shards)
        result = b.all_reduce(scattered, replicas)
        found = find_collectives(b.output(result).graph)
        prices = ClusterCostModel(H100)
        assert [c.ranks for c in found] == [(0, 1, 2), (0, 1, 2), (0, 3, 6, 9)]
        expected = H100.collective_us("all_gather", 192, num_nodes=2, ranks_per_node=2)
        assert found[0].price_us(prices) == expected
        links = prices.machine({c.group_name: c.ranks for c in found}).links
        assert set(links.values()) == {"network"}


def planned(gm: fx.GraphModule, wrap: object) -> tuple[object, ...]:
    outcome = overlap_graph(
        gm.graph, ClusterCostModel(H100), parse_wrap(wrap), memory_limit_bytes=math.inf
    )
    if wrap == ONE_BUCKET:
        assert outcome.plan.buckets
    return decided(outcome)


def wide_value(rows: int, count: int) -> fx.GraphModule:
    """A value with two readers, and between them ``count`` gradients of the first, unpadded."""
    b = GraphBuilder(2)
    shards = [b.parameter(f"layers.{i}.w", rows, 64) for i in range(count)]
    tangents, x = b.input("tangents_1", 4096, 63), b.input("x", 4096, 64)
    value = b.call(aten.tanh.default, tangents)
    first = b.call(aten.mul.Tensor, value, tangents)
    columns = b.transpose(first)
    outputs: list[fx.Node] = []
    for shard in shards:
        full = b.pad_rows(b.mm(columns, x), 64)
        reduced = b.wait(b.stamp(b.scatter_start(full, op="avg"), shard))
        outputs.append(b.first_rows(reduced, rows))
    second = b.call(aten.mul.Tensor, value, value)
    return b.output(b.mm(b.transpose(second), x), *outputs)


def read_shard(rows: int, count: int) -> fx.GraphModule:
    """Compute reads the padded shards that are gathered."""
    b = GraphBuilder(2)
    x = b.input("x", 64, 64)
    outputs: list[fx.Node] = []
    for index in range(count):
        shard = b.cast(b.parameter(f"layers.{index}.w", rows, 64), torch.bfloat16)
        padded = b.pad_rows(shard, 32)
        outputs.append(b.call(aten.sum.default, padded))
        x = b.mm(x, b.cast(b.gather(padded), x.meta["val"].dtype))
    return b.output(x, *outputs)


@pytest.mark.parametrize("count", [2, 13, 40])
@pytest.mark.parametrize("build", [wide_value, read_shard])
@pytest.mark.parametrize("wrap", ["auto", ONE_BUCKET])
def test_padding_decides_nothing(
    build: Callable[[int, int], fx.GraphModule], count: int, wrap: object
) -> None:
    """Of 63 rows on two ranks one has 32, the other 31."""
    assert planned(build(31, count), wrap) == planned(build(32, count), wrap)
