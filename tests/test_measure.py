"""Live measurement on two gloo ranks, and the calibration that follows."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.measure import calibrate_live
from inductor_overlap.cost_model.measure_collectives import measure_collectives

SIZES = (4096, 65536, 1048576)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def calibrated() -> tuple[Cluster, list[tuple[str, float]]]:
    """What one rank fits, and the progress it saw."""
    seen: list[tuple[str, float]] = []
    fitted = calibrate_live(
        sizes_bytes=SIZES, budget_s=2.0, progress=lambda what, share: seen.append((what, share))
    )
    return fitted, seen


def refuse() -> list[str]:
    messages: list[str] = []
    for sizes, kinds in (((4,), ("all_gather",)), ((4096,), ("broadcast",))):
        try:
            measure_collectives(sizes, kinds)
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.gloo
def test_all_ranks_measure_the_same_and_fit_the_same_cluster() -> None:
    (first, seen), (second, _) = run_ranks(calibrated, 2)
    assert first == second
    assert [(c.kind, c.sizes_bytes) for c in first.curves] == [(k, SIZES) for k in sorted(KINDS)]
    assert {(c.num_nodes, c.ranks_per_node) for c in first.curves} == {(1, 2)}
    assert [share for what, share in seen if what == "sizes"][-1] == 1.0
    assert [share for what, share in seen if what == "compute"][-1] == 1.0
    assert {what for what, _ in first.errors} == {"attention", "collective", "matmul", "memory"}
    assert first.contention is not None


@pytest.mark.gloo
def test_sizes_and_kinds_are_checked_on_every_rank() -> None:
    for too_small, unknown in run_ranks(refuse, 2):
        assert "a size of 4 bytes is less than 8, one item a rank" in too_small
        assert "unknown collective kind 'broadcast'" in unknown


@pytest.mark.quick
def test_measuring_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="needs a running process group of at least two ranks"):
        measure_collectives()
    with pytest.raises(ValueError, match="needs a running process group of at least two ranks"):
        calibrate_live()
