"""Prices of a network that is nothing but a bandwidth and a latency; compute as on an H100.

Used for the grid of the schedule benchmark, where the network varies and nothing else does: a
collective takes ``latency + bytes * (n - 1) / n / bandwidth`` (twice the bytes for an all-reduce),
the cost model of ring collectives with nccl-tests' bus bandwidth
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.fx as fx

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.cluster_prices import ClusterCostModel
from inductor_overlap.cost_model.schedule import Machine

COMPUTE = "h100-ib"
"""The preset whose GPU computes."""


class LinkPrices:
    """A `CostModel`: bus bandwidth and latency of every collective, compute of `COMPUTE`."""

    def __init__(self, gb_per_s: float, latency_us: float) -> None:
        self.gb_per_s = gb_per_s
        self.latency_us = latency_us
        self._gpu = ClusterCostModel(Cluster.preset(COMPUTE))

    def __repr__(self) -> str:
        return f"{self.gb_per_s:g} GB/s, {self.latency_us:g} us"

    def compute_us(self, node: fx.Node) -> float:
        return self._gpu.compute_us(node)

    def copy_us(self, size_bytes: int) -> float:
        return self._gpu.copy_us(size_bytes)

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        rounds = 2 if kind == "all_reduce" else 1
        on_the_wire = rounds * size_bytes * (len(ranks) - 1) / len(ranks)
        return self.latency_us + on_the_wire / (self.gb_per_s * 1e3)

    def link_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return self.collective_us(kind, size_bytes, ranks)

    def coalesced_us(self, kind: str, sizes_bytes: Sequence[int], ranks: Sequence[int]) -> float:
        """Nothing is known of grouped launches on a link that is only a bandwidth and a latency."""
        return sum(self.collective_us(kind, size_bytes, ranks) for size_bytes in sizes_bytes)

    def machine(self, groups: Mapping[str, Sequence[int]]) -> Machine:
        """One queue for each group, launches free, no contention; groups share no link."""
        return Machine()

    def uuid(self) -> str:
        return repr(self)
