"""The rate that no bucket can beat, on prices whose slopes are worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.wire_time import BucketPrice

pytestmark = pytest.mark.quick


def test_latency_plus_size_over_bandwidth() -> None:
    assert BucketPrice(lambda size: 10 + size * 0.25, 1000).us_per_byte == pytest.approx(0.25)


def test_ramp_is_taken_where_it_is_flattest() -> None:
    # sqrt(2 * 100) - sqrt(100) = 4.142 over 100 bytes, on top of 1 per byte
    rate = BucketPrice(lambda size: size + math.sqrt(size), 100).us_per_byte
    assert rate == pytest.approx(1.04142, abs=1e-5)


def test_the_better_of_two_algorithms() -> None:
    # 2 per byte up to size 10, 1 per byte beyond
    rate = BucketPrice(lambda size: min(2.0 * size, 10.0 + size), 1000).us_per_byte
    assert rate == pytest.approx(1.0)


def test_price_that_steepens_counts_its_flat_part() -> None:
    # 1 per byte up to 64, 3 beyond: at 1000 the slope is 3, between 32 and 64 it is 1
    rate = BucketPrice(lambda size: size if size <= 64 else 3.0 * size - 128, 1024).us_per_byte
    assert rate == pytest.approx(1.0)


def test_what_one_collective_takes_longer_than_its_link_is_latency() -> None:
    # Alone 15 per 10 bytes, of which the link is busy for 10; beside them 10 whatever the size.
    price = BucketPrice(lambda size: 10 + size * 1.5, 1000, lambda size: 10 + size)
    assert price.us_per_byte == pytest.approx(1.0)
    assert price.latency_us(100) == pytest.approx(10 + 50)


def test_the_link_is_kept_as_long_as_the_price_model_says() -> None:
    """1.2 a byte below 100 bytes, else 1 and 20 beside; alone 5 longer. Unknown: 1 a byte."""

    def link_us(size: int) -> float:
        return 1.2 * size if size < 100 else size + 20.0

    known = BucketPrice(lambda size: link_us(size) + 5, 1600, link_us)
    assert known.us_per_byte == pytest.approx(1.0)
    assert known.link_us(50) == pytest.approx(60)
    assert known.link_us(800) == pytest.approx(820)
    unknown = BucketPrice(lambda size: link_us(size) + 5, 1600)
    assert unknown.link_us(50) == pytest.approx(50)


def test_nothing_to_send_and_prices_that_fall() -> None:
    assert BucketPrice(lambda size: 5.0, 0).us_per_byte == 0.0
    assert BucketPrice(lambda size: 100.0 - size, 50).us_per_byte == 0.0


@given(
    st.sampled_from(Cluster.presets()),
    st.sampled_from([(1, 8), (2, 8), (64, 8), (8, 1)]),
    st.lists(st.integers(1, 2**32), min_size=2, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_presets_honour_the_contract_of_the_bound(
    preset: str, placement: tuple[int, int], sizes: list[int]
) -> None:
    """A bucket takes at least its members' wire time and the largest of their latencies."""
    nodes, ranks = placement
    cluster = Cluster.preset(preset)

    def price_us(size_bytes: int) -> float:
        return cluster.collective_us(
            "all_gather", size_bytes, num_nodes=nodes, ranks_per_node=ranks
        )

    price = BucketPrice(price_us, sum(sizes))
    latency_us = max(price.latency_us(size) for size in sizes)
    least_us = price.us_per_byte * sum(sizes) + latency_us
    assert price_us(sum(sizes)) >= least_us * (1 - 1e-9)


def test_a_burst_of_small_sizes_does_not_make_all_bytes_cheap() -> None:
    """10 us up to 64 bytes, then 1 per byte: the flat part would say that bytes are free."""
    price = BucketPrice(lambda size: max(10.0, size - 54.0), 1024)
    # At 64 bytes, 10 us: no byte may count for more than 10 / 64.
    assert price.us_per_byte == pytest.approx(10 / 64)
    assert price.latency_us(16) == pytest.approx(0.0)


def test_latency_is_what_every_larger_bucket_has_too() -> None:
    price = BucketPrice(lambda size: 10 + size * 0.25 + 5 * (size < 100), 1024)
    assert price.us_per_byte == pytest.approx(0.25)
    assert price.latency_us(50) == pytest.approx(10)
    assert price.latency_us(1000) == pytest.approx(10)
