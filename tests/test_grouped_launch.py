"""Several collectives in one launch: size classes and their price."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.cluster_prices import ClusterCostModel
from inductor_overlap.cost_model.grouped_launch import size_classes
from inductor_overlap.cost_model.pricing import as_full
from inductor_overlap.cost_model.wire_time import BucketPrice

pytestmark = pytest.mark.quick

H100 = Cluster.preset("h100-ib")


def test_a_class_ends_at_four_times_its_smallest() -> None:
    assert size_classes([40, 10, 39, 10], 4) == [[10, 10, 39], [40]]
    assert size_classes([10, 30, 90, 159, 160], 4) == [[10, 30], [90, 159, 160]]
    assert size_classes([5, 5], 0) == [[5], [5]]
    assert size_classes([], 4) == []


def test_nccl_runs_a_class_as_one_collective() -> None:
    price = partial(H100.collective_us, "all_gather", num_nodes=8, ranks_per_node=8)
    launched = H100.coalesced_us("all_gather", [2**24, 2**25, 2**28], num_nodes=8, ranks_per_node=8)
    assert launched == price(2**24 + 2**25) + price(2**28)
    model = ClusterCostModel(H100)
    assert model.coalesced_us("all_gather", [2**24, 2**25, 2**28], range(64)) == launched


def test_gloo_runs_one_after_another() -> None:
    model = ClusterCostModel(Cluster.preset("cpu-gloo"))
    single = [model.collective_us("all_reduce", size, range(2)) for size in (1000, 1100)]
    assert model.coalesced_us("all_reduce", [1000, 1100], range(2)) == sum(single)


def test_the_cluster_that_aggregates_otherwise_has_another_identity() -> None:
    other = Cluster("h100", "ib-ndr-400x8", overrides=(("aggregation_ratio", 0.0),))
    assert other.uuid() != H100.uuid()


class OwnPrices:
    def compute_us(self, node: object) -> float:
        return 1.0

    def collective_us(self, kind: str, size_bytes: int, ranks: object) -> float:
        return 10.0 + size_bytes


class OwnLaunches(OwnPrices):
    price_us = 15.0

    def coalesced_us(self, kind: str, sizes_bytes: object, ranks: object) -> float:
        return self.price_us


def test_a_users_model_saves_nothing_unless_it_says_so() -> None:
    assert as_full(OwnPrices()).coalesced_us("all_gather", [1, 2], [0, 1]) == 23.0
    assert as_full(OwnLaunches()).coalesced_us("all_gather", [1, 2], [0, 1]) == 15.0


class OwnLink(OwnPrices):
    busy_us = 8.0

    def link_us(self, kind: str, size_bytes: int, ranks: object) -> float:
        return self.busy_us


def test_a_users_link_is_busy_for_all_of_the_price_unless_it_says_less() -> None:
    assert as_full(OwnPrices()).link_us("all_gather", 5, [0, 1]) == 15.0
    assert as_full(OwnLink()).link_us("all_gather", 5, [0, 1]) == 8.0
    model = OwnLink()
    model.busy_us = 99.0
    assert as_full(model).link_us("all_gather", 5, [0, 1]) == 15.0


def test_no_launch_is_faster_than_one_collective_of_all_its_bytes() -> None:
    """13 us: the lower bound of a step counts on it."""
    model = OwnLaunches()
    model.price_us = 2.0
    assert as_full(model).coalesced_us("all_gather", [1, 2], [0, 1]) == 13.0


@given(
    st.sampled_from(Cluster.presets()),
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.sampled_from([1, 2, 8, 64]),
    st.lists(st.integers(1, 2**32), min_size=2, max_size=6),
)
@settings(max_examples=60)
def test_presets_honour_the_contract_of_the_bound(
    preset: str, kind: str, num_nodes: int, sizes: list[int]
) -> None:
    """A launch takes at least its members' wire time and the largest of their latencies."""
    cluster = Cluster.preset(preset)
    ranks = range(num_nodes * cluster.gpus_per_node)
    model = ClusterCostModel(cluster)
    price = BucketPrice(lambda size: model.collective_us(kind, size, ranks), sum(sizes))
    latency_us = max(price.latency_us(size) for size in sizes)
    least_us = price.us_per_byte * sum(sizes) + latency_us
    assert model.coalesced_us(kind, sizes, ranks) >= least_us * (1 - 1e-9)
