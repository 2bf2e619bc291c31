"""Calibrate the cluster that this process group runs on, by measuring it.

`calibrate_live` times collectives and, on CPUs, kernels and how they disturb each other; then it
fits the cluster to that. Every rank must call it, and every rank gets the same cluster. It takes
about a minute on any network. Refused (``ValueError``): no process group, a single rank, a cluster
that cannot hold the ranks.
"""

# torch.distributed is partially typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from inductor_overlap.cost_model.calibrate import calibrate
from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.collective_time import COLLECTIVE_KINDS
from inductor_overlap.cost_model.measure_collectives import (
    BUDGET_S,
    DEFAULT_SIZES,
    ROUNDS,
    Progress,
    check_process_group,
    measure_collectives,
)
from inductor_overlap.cost_model.measure_compute import ComputeTimes
from inductor_overlap.cost_model.measure_contention import Contention, measure_contention
from inductor_overlap.cost_model.placement import placement

_PHASES = ROUNDS + 2
"""Kernels are timed before each round of collectives, before contention and after it."""


def calibrate_live(
    cluster: Cluster | None = None,
    *,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES,
    kinds: Sequence[str] = COLLECTIVE_KINDS,
    budget_s: float = BUDGET_S,
    progress: Progress | None = None,
) -> Cluster:
    """The cluster of the default process group, with what was measured on it.

    Args:
        cluster: what is known of it; None: `Cluster.detect()`.
        sizes_bytes: nccl-tests sizes of the collectives to time.
        kinds: collectives to time.
        budget_s: about how long these may take; on CPUs a third of it comes on top for compute.
        progress: called with what is being measured and the share of it that is done.

    Raises:
        ValueError: no process group of at least two ranks, ``cluster`` cannot hold its ranks, or
            ``budget_s`` is not positive and finite.
    """
    check_process_group()
    if not 0.0 < budget_s < math.inf:
        raise ValueError(f"budget_s must be seconds, positive and finite; got {budget_s}")
    known = cluster or Cluster.detect()
    where = placement(tuple(range(dist.get_world_size())), known.gpus_per_node)
    on_cpu = "nccl" not in dist.get_backend()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    in_flight = known.queue_width
    kernels = ComputeTimes(_PHASES, budget_s / 6) if on_cpu and known.gpu == "cpu" else None

    def measure_kernels() -> None:
        if kernels is not None:
            kernels.take_phase(progress)

    collectives = measure_collectives(
        sizes_bytes,
        kinds,
        device,
        progress,
        budget_s,
        where,
        in_flight,
        between=measure_kernels,
    )
    measure_kernels()
    contention: Contention | None = None
    if on_cpu and known.contention is None:
        by_size = calibrate(known, collectives)
        contention = measure_contention(
            lambda kind, size_bytes: by_size.collective_us(
                kind, size_bytes, num_nodes=where[0], ranks_per_node=where[1]
            ),
            budget_s / 8,
            in_flight,
        )
    measure_kernels()
    compute = [] if kernels is None else kernels.measurements()
    fitted = calibrate(known, [*collectives, *compute])
    return fitted if contention is None else _with_contention(fitted, contention)


def _with_contention(cluster: Cluster, contention: Contention) -> Cluster:
    launch = {"collective_launch_us": contention.launch_us}
    overrides = tuple(sorted((dict(cluster.overrides) | launch).items()))
    return replace(cluster, contention=contention.factor, overrides=overrides)
