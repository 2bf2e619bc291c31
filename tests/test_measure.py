"""Live measurement on two gloo ranks, and the calibration that follows."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from inductor_overlap.cost_model import measure_compute
from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.detect import Surroundings, read_surroundings
from inductor_overlap.cost_model.measure import calibrate_live
from inductor_overlap.cost_model.measure_collectives import measure_collectives
from inductor_overlap.cost_model.measure_compute import ComputeTimes
from inductor_overlap.cost_model.measure_contention import measure_contention
from inductor_overlap.cost_model.profile_file import read_profile

ROOT = Path(__file__).parents[1]
SIZES = (4096, 65536, 1048576)
KINDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


@dataclass
class Seen:
    """What one rank detected, was refused and fitted, and the progress it saw."""

    detected: Cluster
    surroundings: Surroundings
    refused: list[str]
    fitted: Cluster
    progress: list[tuple[str, float]]
    bounded: list[int]
    kernels_us: list[float]


def look() -> Seen:
    progress: list[tuple[str, float]] = []
    fitted = calibrate_live(
        sizes_bytes=SIZES,
        budget_s=1.0,
        progress=lambda what, share: progress.append((what, share)),
    )
    bounded = measure_collectives((4096, 4097, 2**16, 2**28), ("all_reduce",), budget_s=1e-3)
    return Seen(
        detected=Cluster.detect(),
        surroundings=read_surroundings(),
        refused=[_refusal((4,), "all_gather"), _refusal((4096,), "broadcast"), _no_budget()],
        fitted=fitted,
        progress=progress,
        bounded=[m.size_bytes for m in bounded],
        kernels_us=_times_through_a_fast_phase(),
    )


def _times_through_a_fast_phase() -> list[float]:
    """Times of all kernels on a machine on which a run takes 1 ms in the second phase, else 2."""
    phases = iter([2000.0, 1000.0, 2000.0])
    with patch.object(measure_compute, "mean_us", lambda *_: 2000.0):
        kernels = ComputeTimes(3, budget_s=1.0)
    for run_us in phases:
        with patch.object(measure_compute, "mean_us", lambda *_, run_us=run_us: run_us):
            kernels.take_phase()
    return [m.time_us for m in kernels.measurements()]


def _refusal(sizes: tuple[int, ...], kind: str) -> str:
    with pytest.raises(ValueError) as refused:
        measure_collectives(sizes, (kind,))
    return str(refused.value)


def _no_budget() -> str:
    with pytest.raises(ValueError) as refused:
        calibrate_live(budget_s=0.0)
    return str(refused.value)


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    return run_ranks(look, 2)


@pytest.mark.gloo
def test_all_ranks_measure_the_same_and_fit_the_same_cluster(seen: list[Seen]) -> None:
    first, second = seen
    assert first.fitted == second.fitted
    curves = first.fitted.curves
    assert [(c.kind, c.sizes_bytes) for c in curves] == [(kind, SIZES) for kind in KINDS]
    assert {(c.num_nodes, c.ranks_per_node) for c in curves} == {(1, 2)}
    assert [len(c.link_us) for c in curves] == [len(SIZES)] * len(KINDS)  # gloo runs two at once
    whats = {what for what, _ in first.fitted.errors}
    assert whats == {"attention", "collective", "matmul", "memory"}
    assert first.fitted.contention is not None
    assert first.fitted.contention >= 1.0
    assert "collective_launch_us" in dict(first.fitted.overrides)


@pytest.mark.gloo
def test_progress_ends_at_all_of_it(seen: list[Seen]) -> None:
    last = dict(seen[0].progress)
    assert last == {"sizes": 1.0, "collectives": 1.0, "compute": 1.0}


@pytest.mark.gloo
def test_a_phase_in_which_the_machine_is_fast_counts_for_nothing(seen: list[Seen]) -> None:
    for rank in seen:
        assert set(rank.kernels_us) == {2000.0}


@pytest.mark.gloo
def test_sizes_end_where_the_budget_does(seen: list[Seen]) -> None:
    for rank in seen:
        assert rank.bounded[0] == 4096
        assert rank.bounded.count(4096) == 1  # 4097 bytes are not to be shared equally
        assert 2**28 not in rank.bounded


@pytest.mark.gloo
def test_sizes_kinds_and_budget_are_checked_on_every_rank(seen: list[Seen]) -> None:
    for rank in seen:
        too_small, unknown, no_budget = rank.refused
        assert "a size of 4 bytes is less than 8, one item a rank" in too_small
        assert "unknown collective kind 'broadcast'" in unknown
        assert no_budget == "budget_s must be seconds, positive and finite; got 0.0"


@pytest.mark.gloo
def test_all_ranks_of_a_group_detect_the_same(seen: list[Seen]) -> None:
    for rank in seen:
        assert rank.detected == Cluster.preset("cpu-gloo")
        assert rank.surroundings == Surroundings(None, 2, 2)


@pytest.mark.quick
def test_measuring_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    message = "needs a running process group of at least two ranks"
    with pytest.raises(ValueError, match=message):
        measure_collectives()
    with pytest.raises(ValueError, match=message):
        measure_contention(lambda kind, size: 1.0, 1.0)
    with pytest.raises(ValueError, match=message):
        calibrate_live()


@pytest.mark.gloo
def test_the_command_measures_the_group_that_torchrun_starts(tmp_path: Path) -> None:
    profile = tmp_path / "site.toml"
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    arguments = ["inductor_overlap", "calibrate", "live", "--budget=1", f"--output={profile}"]
    done = subprocess.run(
        [sys.executable, "-m", *command, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # One rank reports.
    assert done.stdout.count("median distance") == 1
    cluster = read_profile(profile)
    assert {curve.kind for curve in cluster.curves} == set(KINDS)
    assert (cluster.gpu, cluster.network) == ("cpu", None)
    assert "measured on 2 ranks, gloo, torch" in profile.read_text()
