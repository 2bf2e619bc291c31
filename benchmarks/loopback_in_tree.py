"""Torch's own overlap passes, at their best on this machine: what the plugin is compared with.

Two passes ship with torch 2.13, off by default: automatic overlap scheduling with bucketing
(``torch/_inductor/fx_passes/overlap_scheduling.py``) and manual bucketing by module
(``overlap_manual_scheduling.py`` beside it). Both schedule by estimates of GPUs and NCCL; here they
get the calibrated prices of this machine, the same the plugin plans with. The automatic one asks
Triton for the GPU's memory speed even where an estimate is given, and cannot run without Triton;
`priced_by` puts our prices in that place, in this process only.

Both gather parameters again in backward, as FSDP2 does, by the plugin's joint-graph pass: without
it they would send less and keep the whole model gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.fx as fx
from torch._C._distributed_c10d import (
    _resolve_process_group,  # pyright: ignore[reportPrivateUsage]
)
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import overlap_scheduling
from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
from torch.distributed.distributed_c10d import get_process_group_ranks

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.fusion import node_bytes
from inductor_overlap.cost_model.pricing import ClusterCostModel, PricedCluster
from inductor_overlap.inductor_passes import ReshardParameters
from inductor_overlap.passes.fx_ops import arguments, collective_kind, is_start, is_wait, payload
from inductor_overlap.settings import Settings

_OPTIONS = "aten_distributed_optimizations."
_SATURATED = 0.9
"""Share of the best bandwidth at which torch's pre-bucketing calls a bucket large enough
(``compute_pre_bucket_cap_mb`` in ``torch/_inductor/fx_passes/fsdp.py``)."""
_MIB = 2**20


def gathered_again() -> dict[str, Any]:
    """Inductor options that gather parameters again in backward, and do nothing else."""
    return {"joint_custom_post_pass": ReshardParameters(Settings())}


def automatic(cluster: Cluster, num_ranks: int) -> dict[str, Any]:
    """Inductor options for torch's automatic overlap scheduling with our prices."""
    estimate = priced_by(cluster)
    chosen = {
        "enable_overlap_scheduling": True,
        "collective_bucketing": True,
        "insert_overlap_deps": True,
        # By default it raises where its extra dependences form a cycle, as they do for some prices.
        "overlap_scheduling_autofix_cycles": True,
        "custom_runtime_estimation": estimate,
        "compute_estimator": "analytical",
        # Our prices charge fused kernels once already.
        "enable_fusion_regions": False,
        "pre_bucketing_fsdp_collectives_bucket_cap_mb": saturating_bytes(
            estimate.prices, num_ranks, most=2**26
        )
        / _MIB,
    }
    return {**gathered_again(), **{_OPTIONS + key: value for key, value in chosen.items()}}


def manual(wrap: Sequence[str | list[str]]) -> dict[str, Any]:
    """Inductor options for torch's manual bucketing, one bucket for each entry of `wrap`."""
    return {**gathered_again(), "post_grad_custom_post_pass": BucketModules(wrap)}


class BucketModules(CustomGraphPass):
    """Torch's manual overlap bucketing as a post-grad pass."""

    def __init__(self, wrap: Sequence[str | list[str]]) -> None:
        self.wrap = list(wrap)

    def __call__(self, graph: fx.Graph) -> None:
        module = cast("fx.GraphModule", graph.owning_module)
        manual_overlap_bucketing(module, self.wrap, insert_overlap_deps=True)

    def uuid(self) -> str:
        return f"torch's manual overlap bucketing {self.wrap}"


class Estimate:
    """Torch's ``custom_runtime_estimation``: milliseconds of a node by any prices."""

    def __init__(self, prices: PricedCluster) -> None:
        self.prices = prices

    def __call__(self, node: fx.Node, override_size: int | None = None) -> float:
        if is_wait(node) or node.op != "call_function":
            return 0.0
        if not is_start(node):
            return self.prices.compute_us(node) / 1e3
        kind = collective_kind(node)
        gathers = kind == "all_gather"
        own_bytes = node_bytes(node) if gathers else sum(map(node_bytes, payload(node)))
        size_bytes = own_bytes if override_size is None else override_size
        group = _resolve_process_group(arguments(node)["group_name"])
        ranks = get_process_group_ranks(group)
        return self.prices.collective_us(kind, size_bytes, ranks) / 1e3


def priced_by(cluster: Cluster) -> Estimate:
    """Makes torch's scheduler estimate by `cluster` wherever it estimates; returns the estimate."""
    estimate = Estimate(ClusterCostModel(cluster))
    overlap_scheduling.estimate_roofline_runtime_ms = estimate
    return estimate


def saturating_bytes(prices: PricedCluster, num_ranks: int, *, most: int) -> int:
    """The smallest gather (bytes, a power of two) close to the best bandwidth up to ``most``."""
    sizes = [2**exponent for exponent in range(14, most.bit_length())]
    ranks = range(num_ranks)

    def bytes_per_us(size: int) -> float:
        return size / prices.collective_us("all_gather", size, ranks)

    best = max(map(bytes_per_us, sizes))
    return next(size for size in sizes if bytes_per_us(size) >= _SATURATED * best)
