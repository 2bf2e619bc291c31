"""What a calibration is fitted to: one measured collective, matmul, attention or memory kernel.

Each kind says which constants of a cluster it tells about, and what the cluster predicts for it; a
calibration needs no more. A CPU has no data-sheet rates, so its rates themselves are fitted; of a
GPU the shares of its peaks are. Refused (``ValueError``): sizes and times that are not positive,
collectives that mean nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.collective_time import check_collective
from inductor_overlap.cost_model.compute_time import dtype_name, has_8_bits, peak_format

LOCAL_CONSTANTS = (
    "base_us",
    "local_hop_us",
    "local_simple_us",
    "ll_share",
    "fill_us",
    "copy_gb_per_s",
    "p2p_efficiency",
    "p2p_copy_gb_per_s",
    "message_us",
    "nvls_efficiency",
    "nvls_us",
)
"""Constants that a collective inside a node tells about, beside the plateau."""
NETWORK_CONSTANTS = (
    "efficiency",
    "network_ll_share",
    "network_base_us",
    "network_hop_us",
    "network_simple_us",
    "ring_step_us",
    "network_fill_us",
    "buffer_us",
    "network_message_us",
)
"""Constants that a collective across nodes tells about."""


class Measurement(Protocol):
    """One measured time and what it tells."""

    @property
    def time_us(self) -> float: ...

    @property
    def what(self) -> str:
        """The kind of error it is counted under: "collective", "matmul", ..."""
        ...

    def constants(self, cluster: Cluster) -> tuple[str, ...]:
        """Names of the constants of ``cluster`` that it tells about."""
        ...

    def predicted_us(self, cluster: Cluster) -> float:
        """What ``cluster`` says it takes."""
        ...


@dataclass(frozen=True, slots=True)
class CollectiveMeasurement:
    """One measured collective; sizes as nccl-tests counts them.

    ``link_us``: its time where as many are in flight as its queue runs at once, for each of them;
    None: not measured. ``noise``: relative standard error of both; 0: not known.
    """

    kind: str
    size_bytes: int
    num_nodes: int
    ranks_per_node: int
    time_us: float
    link_us: float | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_collective(self.kind, self.num_nodes, self.ranks_per_node)
        _check_positive(self.kind, self.size_bytes, self.time_us)
        if self.link_us is not None:
            _check_positive(self.kind, self.size_bytes, self.link_us)

    @property
    def what(self) -> str:
        return "collective"

    def constants(self, cluster: Cluster) -> tuple[str, ...]:
        across_nodes = self.is_across_nodes(cluster)
        names = (*NETWORK_CONSTANTS,) if across_nodes else ()
        if not across_nodes or self.ranks_per_node > 1:
            names += (plateau_constant(cluster, across_nodes=False), *LOCAL_CONSTANTS)
        return names

    def is_across_nodes(self, cluster: Cluster) -> bool:
        """Whether it uses the network between nodes."""
        return cluster.leaves_nvlink(self.num_nodes, self.ranks_per_node)

    def predicted_us(self, cluster: Cluster) -> float:
        return cluster.collective_us(
            self.kind,
            self.size_bytes,
            num_nodes=self.num_nodes,
            ranks_per_node=self.ranks_per_node,
        )


def plateau_constant(cluster: Cluster, *, across_nodes: bool) -> str:
    """The constant that moves the bandwidth of large collectives."""
    if across_nodes:
        return "efficiency"
    return "local_gb_per_s" if cluster.gpu == "cpu" else "local_efficiency"


@dataclass(frozen=True, slots=True)
class MatmulMeasurement:
    """``batch`` products (m, k) x (k, n) in one kernel.

    ``sustained``: in the middle of other work, as a profiler sees it, not in a burst.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    time_us: float
    sustained: bool = False

    def __post_init__(self) -> None:
        dtype_name(self.dtype)
        _check_positive("matmul", min(self.batch, self.m, self.n, self.k), self.time_us)

    @property
    def what(self) -> str:
        return "matmul"

    def constants(self, cluster: Cluster) -> tuple[str, ...]:
        name = dtype_name(self.dtype)
        if cluster.gpu == "cpu":
            return (f"{peak_format(name)}_tflop_per_s", "kernel_us")
        return ("fp8_efficiency",) if has_8_bits(name) else ("matmul_efficiency",)

    def predicted_us(self, cluster: Cluster) -> float:
        predict = cluster.sustained_matmul_us if self.sustained else cluster.matmul_us
        return predict(self.m, self.n, self.k, self.dtype, batch=self.batch)


@dataclass(frozen=True, slots=True)
class AttentionMeasurement:
    """Fused causal attention with as many key heads as query heads on (batch, heads, seq, dim)."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    dtype: str
    backward: bool
    time_us: float

    def __post_init__(self) -> None:
        dtype_name(self.dtype)
        least = min(self.batch, self.heads, self.seq, self.head_dim)
        _check_positive("attention", least, self.time_us)

    @property
    def what(self) -> str:
        return "attention"

    def constants(self, cluster: Cluster) -> tuple[str, ...]:
        return ("attention_backward_efficiency" if self.backward else "attention_efficiency",)

    def predicted_us(self, cluster: Cluster) -> float:
        return cluster.attention_us(
            self.batch,
            self.heads,
            self.heads,
            self.seq,
            self.seq,
            self.head_dim,
            self.dtype,
            causal=True,
            backward=self.backward,
        )


@dataclass(frozen=True, slots=True)
class MemoryMeasurement:
    """A kernel that reads and writes ``size_bytes`` in all."""

    size_bytes: int
    time_us: float

    def __post_init__(self) -> None:
        _check_positive("a memory kernel", self.size_bytes, self.time_us)

    @property
    def what(self) -> str:
        return "memory"

    def constants(self, cluster: Cluster) -> tuple[str, ...]:
        return ("hbm_gb_per_s", "kernel_us") if cluster.gpu == "cpu" else ("hbm_efficiency",)

    def predicted_us(self, cluster: Cluster) -> float:
        return cluster.memory_us(self.size_bytes)


def _check_positive(what: str, size: int, time_us: float) -> None:
    if size <= 0 or not 0 < time_us < math.inf:
        raise ValueError(
            f"a measurement needs a positive size and a positive finite time; got {what} of size "
            f"{size} in {time_us} us"
        )
