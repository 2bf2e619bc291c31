"""Live measurement on two gloo ranks, and the calibration that follows."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from inductor_overlap.cost_model.calibrate import Measurement, calibrate, predicted_us
from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.measure import measure_collectives

SIZES = (4096, 65536, 1048576)


def measure() -> tuple[list[Measurement], list[tuple[int, int]], str]:
    """What one rank measures, the progress it saw, and the identity of what it fits."""
    seen: list[tuple[int, int]] = []
    measured = measure_collectives(SIZES, progress=lambda done, total: seen.append((done, total)))
    return measured, seen, calibrate(Cluster.preset("cpu-gloo"), measured).uuid()


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
    (first, seen, identity), (second, _, other) = run_ranks(measure, 2)
    assert first == second
    assert identity == other
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    assert [(m.kind, m.size_bytes) for m in first] == [(k, s) for k in kinds for s in SIZES]
    assert {(m.num_nodes, m.ranks_per_node) for m in first} == {(1, 2)}
    assert seen == [(i, 60) for i in range(1, 61)]
    fitted = calibrate(Cluster.preset("cpu-gloo"), first)
    largest = [m for m in first if m.size_bytes == SIZES[-1]]
    assert [predicted_us(fitted, m) for m in largest] == pytest.approx([m.time_us for m in largest])


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
