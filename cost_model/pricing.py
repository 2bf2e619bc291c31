"""The cost model of a graph: the cluster's, or the user's own.

`CostModel` is the protocol a user can implement; `PricedCluster` is what the passes use, the same
plus copies, the machine of the simulator and an identity; `RatedPrices`, which reports use, know
their errors too. `resolve_cost_model` finds the one that options mean; `as_full` completes and
checks a user's model.

A user's model that raises, or returns what is no time, is an error naming the op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
import torch.fx as fx

from inductor_overlap.cost_model.checks import is_number
from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.cluster_prices import ClusterCostModel
from inductor_overlap.cost_model.errors import PricedCollective, PriceErrors
from inductor_overlap.cost_model.fusion import op_name
from inductor_overlap.cost_model.profile_file import read_profile
from inductor_overlap.cost_model.schedule import Machine

MAX_TIME_US = 1e12
"""Longest time (us) a user's model may answer, 11 days: beside longer ones, others round away."""


class CostModelError(ValueError):
    """A user's cost model raised, or returned something that is no time or no identity."""


@runtime_checkable
class CostModel(Protocol):
    """Bring your own device: what a node and a collective cost.

    Optional members: ``uuid() -> str``, the model's identity for the compile cache (without it the
    cache is bypassed); ``copy_us(size_bytes) -> float``; ``machine(groups) -> Machine``;
    ``coalesced_us(kind, sizes_bytes, ranks) -> float``, the time of one launch of several
    collectives, by default the sum of theirs; ``link_us(kind, size_bytes, ranks) -> float``, for
    how long a collective keeps its link busy, by default all of its time.
    """

    def compute_us(self, node: fx.Node) -> float:
        """Time (us) of a node that is no collective; 0 for views and fused nodes."""
        ...

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        """Time (us) of a collective of ``kind`` among the global ``ranks``; nccl-tests size.

        ``ranks`` are those of the first group of its mesh dimension, the same on all ranks.
        """
        ...


class PricedCluster(Protocol):
    """A complete cost model: what the passes ask."""

    @property
    def fallbacks(self) -> Counter[str]:
        """Ops that had no formula, by name."""
        ...

    def compute_us(self, node: fx.Node) -> float: ...
    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float: ...
    def link_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        """For how long (us) a collective keeps its link busy; at most its ``collective_us``."""
        ...

    def coalesced_us(self, kind: str, sizes_bytes: Sequence[int], ranks: Sequence[int]) -> float:
        """Time (us) of one launch of several collectives of one kind, group and dtype.

        At least that of one collective of all their bytes, or the sum of theirs: what the lower
        bound assumes of a bucket.
        """
        ...

    def copy_us(self, size_bytes: int) -> float:
        """Time (us) of a device copy that reads and writes ``size_bytes`` each."""
        ...

    def machine(self, groups: Mapping[str, Sequence[int]]) -> Machine:
        """The simulator's machine for communicators ``groups`` (name -> global ranks)."""
        ...

    def uuid(self) -> str | None:
        """Identity for the compile cache; None if there is none."""
        ...


class RatedPrices(PricedCluster, Protocol):
    """Prices that know how far off they are: what a report asks besides."""

    def errors(self, collectives: Iterable[PricedCollective]) -> PriceErrors:
        """Errors to expect of ``collectives``, and of all compute priced so far."""
        ...


class _CheckedCostModel:
    """A user's model, checked at every call and completed by a cluster where it is silent."""

    def __init__(self, model: CostModel, fallback: Cluster) -> None:
        self.model = model
        self.fallback = ClusterCostModel(fallback)
        self.fallbacks: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"checked {self.model!r}"

    def uuid(self) -> str | None:
        if not hasattr(self.model, "uuid"):
            return None
        where = f"{type(self.model).__qualname__}.uuid"
        identity = self._called("uuid", where)
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

    def link_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        whole_us = self.collective_us(kind, size_bytes, ranks)
        if not hasattr(self.model, "link_us"):
            return whole_us
        what = f"the link of a {kind} of {size_bytes} bytes among {len(ranks)} ranks"
        return min(whole_us, self._checked("link_us", what, kind, size_bytes, ranks))

    def coalesced_us(self, kind: str, sizes_bytes: Sequence[int], ranks: Sequence[int]) -> float:
        if not hasattr(self.model, "coalesced_us"):
            return sum(self.collective_us(kind, size_bytes, ranks) for size_bytes in sizes_bytes)
        what = f"{len(sizes_bytes)} {kind}s of {sum(sizes_bytes)} bytes among {len(ranks)} ranks"
        least_us = self.collective_us(kind, sum(sizes_bytes), ranks)
        return max(least_us, self._checked("coalesced_us", what, kind, tuple(sizes_bytes), ranks))

    def copy_us(self, size_bytes: int) -> float:
        if not hasattr(self.model, "copy_us"):
            return self.fallback.copy_us(size_bytes)
        return self._checked("copy_us", f"a copy of {size_bytes} bytes", size_bytes)

    def errors(self, collectives: Iterable[PricedCollective]) -> PriceErrors:
        """Nothing is known of a user's prices but whose they are, and what was put beside them."""
        return PriceErrors(type(self.model).__qualname__, assumptions=tuple(self._assumed()))

    def _assumed(self) -> Iterator[str]:
        """What the model does not answer, and what was taken for it."""
        if not hasattr(self.model, "machine"):
            where = f"{self.fallback.name}, since the cost model has no machine(groups)"
            yield from self.fallback.about_machine()
            yield f"these and the times of launches are those of {where}"
        if not hasattr(self.model, "coalesced_us"):
            yield "a grouped launch runs its collectives one after the other"
        if not hasattr(self.model, "copy_us"):
            yield f"copies take as long as on {self.fallback.cluster.gpu}"

    def machine(self, groups: Mapping[str, Sequence[int]]) -> Machine:
        if not hasattr(self.model, "machine"):
            return self.fallback.machine(groups)
        where = f"{type(self.model).__qualname__}.machine"
        found = self._called("machine", where, groups)
        if not isinstance(found, Machine):
            raise CostModelError(f"{where} returned {found!r}; expected a Machine")
        return found

    def _checked(self, method: str, what: str, *args: Any) -> float:
        where = f"{type(self.model).__qualname__}.{method} for {what}"
        value = self._called(method, where, *args)
        if not is_number(value) or not 0 <= value <= MAX_TIME_US:
            raise CostModelError(
                f"{where} returned {value!r}; expected a number of microseconds between 0 and "
                f"{MAX_TIME_US:g}"
            )
        return float(value)

    def _called(self, method: str, where: str, *args: Any) -> object:
        """What the model's ``method`` answers; an exception of its own names ``where``."""
        try:
            return getattr(self.model, method)(*args)
        except Exception as error:
            raise CostModelError(f"{where} raised {type(error).__name__}: {error}") from error


def as_full(cost_model: CostModel, fallback: Cluster | None = None) -> RatedPrices:
    """``cost_model`` with all that the passes need.

    What a user's model does not answer (copies, the machine) comes from ``fallback``, by default
    the preset "h100-ib"; reports say so.

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
    names if one of the profiles is it, else H100s on InfiniBand, with a warning. The model's name
    is the only fact that is read from a device; a job of mixed models must name its cluster.

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
    if device_type == "cuda" and torch.cuda.is_available():
        return _usual_of_device(torch.cuda.get_device_name(0))
    return Cluster.usual(None)


@cache
def _usual_of_device(device_name: str) -> Cluster:
    """`Cluster.usual_of_device`; what it warns of is the same for every graph, and said once."""
    return Cluster.usual_of_device(device_name)


def resolve_cost_model(
    cluster: str | Cluster | None,
    cost_model: CostModel | None,
    device_type: str = "cuda",
) -> RatedPrices:
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
        named = read_profile(cluster) if is_file else Cluster.preset(cluster)
        return ClusterCostModel(named, cluster)
    if not isinstance(cluster, Cluster):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"cluster must be a preset's name, the path of a profile (*.toml), a Cluster or None; "
            f"got {cluster!r}; prices of your own go into cost_model="
        )
    return ClusterCostModel(cluster)
