"""What each node of an FX graph costs on a cluster.

`CostModel` is the protocol a user can implement; `PricedCluster` is what the passes use, the same
plus copies, the machine of the simulator and an identity. `ClusterCostModel` prices with a
`Cluster`: matmuls and attentions by FLOPs, all else by the bytes Inductor will move, fused chains
where they store. `as_full` completes and checks a user's model.

Prices depend on shapes, static hints and the profile alone, so that all ranks compute the same.
Nothing here raises on a graph: an op without a formula costs its bytes and is counted in
``fallbacks``. A user's model that raises, or returns what is no time, is an error naming the op.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch
import torch.fx as fx

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.collective_time import COLLECTIVE_KINDS
from inductor_overlap.cost_model.compute_time import dtype_name
from inductor_overlap.cost_model.fusion import (
    OpKind,
    is_fusible,
    is_virtual,
    node_bytes,
    op_kind,
    op_name,
    stored_inputs,
)
from inductor_overlap.cost_model.op_shapes import read_attention, read_matmul
from inductor_overlap.cost_model.profile_file import read_profile
from inductor_overlap.cost_model.schedule import Machine

__all__ = [
    "ClusterCostModel",
    "CostModel",
    "CostModelError",
    "PricedCluster",
    "as_full",
    "default_cluster",
    "is_fusible",
    "is_virtual",
    "resolve_cost_model",
]


MAX_TIME_US = 1e12
"""Longest time (us) a user's model may answer, 11 days: beside longer ones, others round away."""


class CostModelError(ValueError):
    """A user's cost model raised, or returned something that is no time or no identity."""


@runtime_checkable
class CostModel(Protocol):
    """Bring your own device: what a node and a collective cost.

    Optional members: ``uuid() -> str``, the model's identity for the compile cache (without it the
    cache is bypassed); ``copy_us(size_bytes) -> float``; ``machine(groups) -> Machine``.
    """

    def compute_us(self, node: fx.Node) -> float:
        """Time (us) of a node that is no collective; 0 for views and fused nodes."""
        ...

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        """Time (us) of a collective of ``kind`` among the global ``ranks``; nccl-tests size."""
        ...


class PricedCluster(Protocol):
    """A complete cost model: what the passes ask."""

    fallbacks: Counter[str]
    """Ops that had no formula, by name."""

    def compute_us(self, node: fx.Node) -> float: ...
    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float: ...
    def copy_us(self, size_bytes: int) -> float:
        """Time (us) of a device copy that reads and writes ``size_bytes`` each."""
        ...

    def machine(self, groups: Mapping[str, Sequence[int]]) -> Machine:
        """The simulator's machine for communicators ``groups`` (name -> global ranks)."""
        ...

    def uuid(self) -> str | None:
        """Identity for the compile cache; None if there is none."""
        ...


class ClusterCostModel:
    """Prices by a `Cluster`'s formulas."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fallbacks: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"ClusterCostModel({self.cluster!r})"

    def uuid(self) -> str:
        return f"{type(self).__name__}:{self.cluster.uuid()}"

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        """Time (us) of a collective, or 0 for one rank; an unknown kind is priced as all-to-all."""
        if kind not in COLLECTIVE_KINDS:
            self.fallbacks[kind] += 1
            kind = "all_to_all"
        num_nodes, ranks_per_node = placement(tuple(ranks), self.cluster.gpus_per_node)
        return self.cluster.collective_us(
            kind, size_bytes, num_nodes=num_nodes, ranks_per_node=ranks_per_node
        )

    def copy_us(self, size_bytes: int) -> float:
        return self.cluster.memory_us(2 * size_bytes)

    def machine(self, groups: Mapping[str, Sequence[int]]) -> Machine:
        cluster = self.cluster
        links: dict[str, str] = {}
        if cluster.share_links:
            links = {name: _link(tuple(ranks), cluster) for name, ranks in groups.items()}
        return Machine(
            launch_us=cluster.launch_us,
            contention=cluster.contention_factor,
            queue_width=cluster.queue_width,
            links=links,
        )

    def compute_us(self, node: fx.Node) -> float:
        """Time (us) of the kernel that ends in ``node``; 0 if none does."""
        kind = op_kind(node)
        if kind is OpKind.FREE:
            return 0.0
        if kind is OpKind.MATMUL:
            return self._matmul_us(node)
        if kind is OpKind.ATTENTION:
            return self._attention_us(node)
        if kind is OpKind.UNKNOWN:
            self.fallbacks[op_name(node)] += 1
        if is_virtual(node):
            return 0.0
        return self._bytes_us(node, kind)

    def _matmul_us(self, node: fx.Node) -> float:
        shape = read_matmul(node)
        dtype = None if shape is None else _rate_of(shape.dtype)
        if shape is None or dtype is None:
            return self._fallback_us(node)
        once_us = self.cluster.sustained_matmul_us(
            shape.m, shape.n, shape.k, dtype, batch=shape.batch
        )
        return once_us * shape.repeats

    def _attention_us(self, node: fx.Node) -> float:
        shape = read_attention(node)
        dtype = None if shape is None else _rate_of(shape.dtype)
        if shape is None or dtype is None:
            return self._fallback_us(node)
        dense_us = self.cluster.attention_us(
            shape.batch,
            shape.q_heads,
            shape.kv_heads,
            shape.seq_q,
            shape.seq_kv,
            shape.head_dim,
            dtype,
            head_dim_v=shape.head_dim_v,
            causal=shape.causal,
            backward=shape.backward,
            flash2=shape.flash2,
        )
        return dense_us * shape.density

    def _fallback_us(self, node: fx.Node) -> float:
        self.fallbacks[op_name(node)] += 1
        return self._bytes_us(node, OpKind.MEMORY)

    def _bytes_us(self, node: fx.Node, kind: OpKind) -> float:
        written = node_bytes(node)
        read = stored_inputs(node)
        if kind is OpKind.MEMORY and is_gather(node):
            # A gather touches the rows it picks, not the table.
            return self.cluster.memory_us(2 * written)
        return self.cluster.memory_us(written + sum(read.values()))


_GATHERS = frozenset({"aten.embedding", "aten.index", "aten.index_select", "aten.gather"})


def is_gather(node: fx.Node) -> bool:
    """True for ops that pick elements of a larger tensor by index."""
    return op_name(node) in _GATHERS


def _rate_of(dtype: torch.dtype) -> str | None:
    """The FLOP rate a dtype runs at: fp32 is tf32 where torch allows it. None: no such rate."""
    try:
        name = dtype_name(dtype)
    except ValueError:
        return None
    if name == "fp32" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return name


@lru_cache(maxsize=1024)
def placement(ranks: tuple[int, ...], gpus_per_node: int) -> tuple[int, int]:
    """(nodes that hold a rank, most ranks on one of them); ranks are numbered node by node."""
    per_node = Counter(rank // gpus_per_node for rank in ranks)
    return max(1, len(per_node)), max(per_node.values(), default=1)


def _link(ranks: tuple[int, ...], cluster: Cluster) -> str:
    num_nodes, _ = placement(ranks, cluster.gpus_per_node)
    return "network" if num_nodes > 1 and cluster.network is not None else "nvlink"


class _CheckedCostModel:
    """A user's model, checked at every call and completed by a cluster where it is silent."""

    def __init__(self, model: CostModel, fallback: Cluster) -> None:
        self.model = model
        self.fallback = ClusterCostModel(fallback)
        self.fallbacks: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"checked {self.model!r}"

    def uuid(self) -> str | None:
        own: Callable[[], object] | None = getattr(self.model, "uuid", None)
        if own is None:
            return None
        where = f"{type(self.model).__qualname__}.uuid"
        try:
            identity = own()
        except Exception as error:
            raise CostModelError(f"{where} raised {type(error).__name__}: {error}") from error
        if identity is None:
            return None
        if not isinstance(identity, str):
            raise CostModelError(f"{where} returned {identity!r}; expected a string, or None")
        return f"{type(self.model).__qualname__}:{identity}:{self.fallback.uuid()}"

    def compute_us(self, node: fx.Node) -> float:
        return self._checked("compute_us", f"{op_name(node)} (node {node.name})", node)

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        what = f"{kind} of {size_bytes} bytes among {len(ranks)} ranks"
        return self._checked("collective_us", what, kind, size_bytes, ranks)

    def copy_us(self, size_bytes: int) -> float:
        if not hasattr(self.model, "copy_us"):
            return self.fallback.copy_us(size_bytes)
        return self._checked("copy_us", f"a copy of {size_bytes} bytes", size_bytes)

    def machine(self, groups: Mapping[str, Sequence[int]]) -> Machine:
        own: Callable[[Mapping[str, Sequence[int]]], Machine] | None
        own = getattr(self.model, "machine", None)
        return self.fallback.machine(groups) if own is None else own(groups)

    def _checked(self, method: str, what: str, *args: Any) -> float:
        where = f"{type(self.model).__qualname__}.{method} for {what}"
        try:
            value = getattr(self.model, method)(*args)
        except Exception as error:
            raise CostModelError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(value, Real) or not 0 <= _float(value) <= MAX_TIME_US:
            raise CostModelError(
                f"{where} returned {value!r}; expected a number of microseconds between 0 and "
                f"{MAX_TIME_US:g}"
            )
        return float(value)


def _float(value: Real) -> float:
    """``value`` as a float; inf for an int that is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def as_full(cost_model: CostModel, fallback: Cluster | None = None) -> PricedCluster:
    """``cost_model`` with all that the passes need.

    What a user's model does not answer (copies, the machine) comes from ``fallback``, by default
    the preset "h100-ib".

    Raises:
        ValueError: ``cost_model`` lacks one of the two methods of `CostModel`.
    """
    if isinstance(cost_model, ClusterCostModel | _CheckedCostModel):
        return cost_model
    if isinstance(cost_model, type):
        raise ValueError(f"cost_model {cost_model.__qualname__} is a class; pass an instance of it")
    missing = [m for m in ("compute_us", "collective_us") if not hasattr(cost_model, m)]
    if missing:
        raise ValueError(
            f"cost_model {cost_model!r} has no {' and no '.join(missing)}; a cost model defines "
            "compute_us(node) and collective_us(kind, size_bytes, ranks)"
        )
    return _CheckedCostModel(cost_model, fallback or Cluster.preset("h100-ib"))


def default_cluster(device_type: str) -> Cluster:
    """The cluster assumed when the user names none, by the device type of the graph's tensors.

    "cpu" is gloo on this machine; "cuda" is the usual cluster of the model that the CUDA runtime
    names if one of the profiles is it, else H100s on InfiniBand. The model's name is the only fact
    that is read from a device; a job of mixed models must name its cluster.

    Raises:
        ValueError: no profile is for this device type.
    """
    if device_type == "cpu":
        return Cluster.preset("cpu-gloo")
    if device_type not in ("cuda", "meta"):
        raise ValueError(
            f"no cluster profile is for device type {device_type!r}; pass cluster= (one of "
            f"{', '.join(Cluster.presets())}) or your own cost_model="
        )
    return Cluster.usual(_visible_gpu() if device_type == "cuda" else None)


def _visible_gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    return Cluster.gpu_named(torch.cuda.get_device_name(0))


def resolve_cost_model(
    cluster: str | Cluster | None,
    cost_model: CostModel | None,
    device_type: str = "cuda",
) -> PricedCluster:
    """The cost model meant by the ``cluster=`` and ``cost_model=`` of the public API.

    Args:
        cluster: a preset's name, the path of a calibrated profile (``*.toml``), a `Cluster`, or
            None.
        cost_model: the user's own model, or None.
        device_type: of the graph's tensors; decides if both are None.

    Raises:
        ValueError: both are given, the preset is unknown, or one of them is something else.
    """
    if cluster is not None and cost_model is not None:
        raise ValueError(
            f"cluster={cluster!r} and cost_model={cost_model!r} are two sources of the same "
            "prices; pass one of them"
        )
    if cost_model is not None:
        return as_full(cost_model)
    if cluster is None:
        return ClusterCostModel(default_cluster(device_type))
    if isinstance(cluster, str):
        is_file = cluster.endswith(".toml")
        cluster = read_profile(cluster) if is_file else Cluster.preset(cluster)
    if not isinstance(cluster, Cluster):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"cluster must be a preset's name, the path of a profile (*.toml), a Cluster or None; "
            f"got {cluster!r}; prices of your own go into cost_model="
        )
    return ClusterCostModel(cluster)
