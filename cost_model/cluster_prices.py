"""Prices by a `Cluster`: what each node of an FX graph and each collective costs on it.

Matmuls and attentions by FLOPs, all else by the bytes Inductor will move, fused chains where they
store. Prices depend on shapes, static hints and the profile alone, so that all ranks compute the
same. Nothing here raises on a graph: an op without a formula costs its bytes and is counted in
``fallbacks``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.fx as fx

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.collective_time import COLLECTIVE_KINDS
from inductor_overlap.cost_model.compute_time import dtype_name, has_8_bits, peak_format
from inductor_overlap.cost_model.errors import (
    SMALL_BYTES,
    PricedCollective,
    PriceErrors,
    weighted,
)
from inductor_overlap.cost_model.fusion import (
    OpKind,
    is_virtual,
    node_bytes,
    op_kind,
    op_name,
    stored_inputs,
)
from inductor_overlap.cost_model.op_shapes import read_attention, read_matmul
from inductor_overlap.cost_model.placement import slowest_placement, world_size
from inductor_overlap.cost_model.schedule import Machine


class ClusterCostModel:
    """Prices by a `Cluster`'s formulas.

    ``name``: what the user called the cluster; None: its own description.
    """

    def __init__(self, cluster: Cluster, name: str | None = None) -> None:
        self.cluster = cluster
        self.name = name or ", ".join(filter(None, (cluster.gpu, cluster.network)))
        self._unknown: set[tuple[str, object]] = set()
        self._compute_us: dict[str, float] = defaultdict(float)

    @property
    def fallbacks(self) -> Counter[str]:
        """Ops that had no formula, by name; a node counts once, however often it is priced."""
        return Counter(name for name, _ in self._unknown)

    def __repr__(self) -> str:
        return f"ClusterCostModel({self.cluster!r})"

    def uuid(self) -> str:
        return f"{type(self).__name__}:{self.cluster.uuid()}"

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        """Time (us) of a collective, or 0 for one rank; an unknown kind is priced as all-to-all."""
        if kind not in COLLECTIVE_KINDS:
            self._unknown.add((kind, (size_bytes, *ranks)))
            kind = "all_to_all"
        return self.cluster.collective_us(kind, size_bytes, **self._placed(ranks))

    def link_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        if kind not in COLLECTIVE_KINDS:
            return self.collective_us(kind, size_bytes, ranks)
        return self.cluster.link_us(kind, size_bytes, **self._placed(ranks))

    def coalesced_us(self, kind: str, sizes_bytes: Sequence[int], ranks: Sequence[int]) -> float:
        return self.cluster.coalesced_us(kind, sizes_bytes, **self._placed(ranks))

    def _placed(self, ranks: Sequence[int]) -> dict[str, int]:
        """How many nodes hold ``ranks``, and how many of them each, as arguments of `Cluster`.

        Of all groups like it, that of the slowest.
        """
        num_nodes, ranks_per_node = slowest_placement(
            tuple(ranks), self.cluster.gpus_per_node, world_size()
        )
        return {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node}

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
            collective_launch_us=cluster.collective_launch_us,
        )

    def errors(self, collectives: Iterable[PricedCollective]) -> PriceErrors:
        of_collectives: list[tuple[float, float]] = []
        num_rough = 0
        priced = list(collectives)
        for kind, size_bytes, ranks in priced:
            known = kind if kind in COLLECTIVE_KINDS else "all_to_all"
            where = self._placed(ranks)
            error = self.cluster.collective_error(known, size_bytes, **where)
            of_collectives.append((self.collective_us(known, size_bytes, ranks), error))
            is_small = size_bytes < SMALL_BYTES and len(ranks) > 1
            num_rough += is_small and not self.cluster.has_curve(known, **where)
        of_compute = ((us, self.cluster.compute_error(w)) for w, us in self._compute_us.items())
        return PriceErrors(
            self.name,
            weighted(of_collectives),
            weighted(of_compute),
            num_rough,
            (*self.about_machine(), self._about_launches(), *self._about_missing_network(priced)),
        )

    def about_machine(self) -> tuple[str, str]:
        """How `machine` has collectives disturb compute and each other, one phrase each."""
        return self._about_contention(), self._about_links()

    def _about_missing_network(self, collectives: Iterable[PricedCollective]) -> Iterator[str]:
        """That groups of several nodes were priced without a network, if some were."""
        cluster = self.cluster
        beyond: set[tuple[int, int]] = set()
        for kind, _, ranks in collectives:
            where = self._placed(ranks)
            if cluster.lacks_network(where["num_nodes"]) and not cluster.has_curve(kind, **where):
                beyond.add((where["num_nodes"], where["ranks_per_node"]))
        if beyond:
            num_nodes, ranks_per_node = max(beyond)
            yield (
                f"{num_nodes} nodes of {ranks_per_node} ranks are priced as one, since the cluster "
                'has no network: name it, as in Cluster(network="ib-ndr-400x8")'
            )

    def _about_contention(self) -> str:
        factor = self.cluster.contention_factor
        if factor == 1.0:
            return "collectives do not slow compute"
        return f"compute is {factor:.3g} times slower beside collectives"

    def _about_launches(self) -> str:
        ratio = self.cluster.constants["aggregation_ratio"]
        if ratio <= 1.0:
            return "a grouped launch runs its collectives one after the other"
        return f"a grouped launch joins collectives within {ratio:g} times of each other's size"

    def _about_links(self) -> str:
        shared = "share" if self.cluster.share_links else "do not share"
        return f"communicators on one link {shared} its bandwidth"

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
            self._unknown.add((op_name(node), node.name))
        if is_virtual(node):
            return 0.0
        return self._bytes_us(node, kind)

    def _counted(self, what: str, time_us: float) -> float:
        self._compute_us[what] += time_us
        return time_us

    def _matmul_us(self, node: fx.Node) -> float:
        shape = read_matmul(node)
        dtype = None if shape is None else _rate_of(shape.dtype)
        if shape is None or dtype is None:
            return self._fallback_us(node)
        once_us = self.cluster.sustained_matmul_us(
            shape.m, shape.n, shape.k, dtype, batch=shape.batch
        )
        what = f"matmul_{peak_format(dtype)}" if has_8_bits(dtype) else "matmul"
        return self._counted(what, once_us * shape.repeats)

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
        what = "attention_backward" if shape.backward else "attention"
        return self._counted(what, dense_us * shape.density)

    def _fallback_us(self, node: fx.Node) -> float:
        self._unknown.add((op_name(node), node.name))
        return self._bytes_us(node, OpKind.MEMORY)

    def _bytes_us(self, node: fx.Node, kind: OpKind) -> float:
        written = node_bytes(node)
        read_bytes = sum(stored_inputs(node).values())
        if kind is OpKind.MEMORY and is_gather(node):
            # A gather touches the rows it picks, not the table.
            read_bytes = written
        return self._counted("memory", self.cluster.memory_us(written + read_bytes))


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


def _link(ranks: tuple[int, ...], cluster: Cluster) -> str:
    num_nodes, _ = slowest_placement(ranks, cluster.gpus_per_node, world_size())
    return "network" if num_nodes > 1 and cluster.network is not None else "nvlink"
