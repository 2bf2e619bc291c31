"""Torch's own overlap passes on one traced graph, with given prices: no codegen, no Triton.

The automatic pass is ``torch/_inductor/fx_passes/overlap_scheduling.py`` with collective bucketing,
the manual one ``overlap_manual_scheduling.py`` beside it. Both plan by the same prices as ours and
keep their default limits of memory; the order of nodes they leave is what counts, so dependences
that would only pin it are not inserted. Pre-bucketing closes a bucket at the size that saturates
the network by those prices, within torch's own bounds (10 to 500 MB).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch.fx as fx
from loopback_in_tree import Estimate, saturating_bytes
from torch._inductor.fx_passes import fsdp, overlap_scheduling
from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

from inductor_overlap.cost_model.pricing import PricedCluster

_MIB = 2**20
_CAP_MIB = (10, 500)
"""Torch's floor and ceiling of a pre-bucket (``torch/_inductor/config.py``,
``pre_bucketing_fsdp_collectives_{min,max}_bucket_cap_mb``)."""


def overlap_automatically(gm: fx.GraphModule, prices: PricedCluster, num_ranks: int) -> None:
    """Bucket and reorder ``gm`` in place by torch's automatic pass.

    Args:
        gm: post-grad graph.
        prices: what the pass plans by.
        num_ranks: of the group whose bandwidth decides how large pre-buckets are.
    """
    with _priced_by(prices) as estimate:
        overlap_scheduling.schedule_overlap_bucketing(
            gm,
            collective_bucketing=True,
            custom_runtime_estimation=estimate,
            compute_estimator="analytical",
            pre_bucketing_fsdp_collectives_bucket_cap_mb=saturating_mib(prices, num_ranks),
        )


def overlap_by_module(
    gm: fx.GraphModule, prices: PricedCluster, modules: Sequence[str | list[str]]
) -> None:
    """Bucket ``gm`` in place by torch's manual pass, one bucket for each entry of ``modules``."""
    with _priced_by(prices):
        manual_overlap_bucketing(gm, list(modules))


def saturating_mib(prices: PricedCluster, num_ranks: int) -> float:
    """The smallest gather (MiB, a power of two) near the best bandwidth, within torch's bounds."""
    smallest = saturating_bytes(prices, num_ranks, most=2**30)
    floor, ceiling = _CAP_MIB
    return min(max(smallest / _MIB, floor), ceiling)


@contextmanager
def _priced_by(prices: PricedCluster) -> Iterator[Callable[..., float]]:
    """Torch's scheduler estimates by ``prices``; its own estimate needs Triton."""
    estimate = Estimate(prices)
    quiet = patch.object(fsdp.logger, "disabled", True)
    with quiet, patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", estimate):
        yield estimate
    # Keyed by node, it would keep every graph alive.
    overlap_scheduling.get_group_name.cache_clear()
