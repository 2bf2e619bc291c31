"""The cluster a job runs on, told by facts that all of its ranks share."""

from __future__ import annotations

import logging

import pytest
import torch
from support.ranks import fake_process_group

from inductor_overlap.cost_model import detect
from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.detect import Surroundings, read_surroundings
from inductor_overlap.cost_model.pricing import default_cluster

pytestmark = pytest.mark.quick

VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No torchrun, and no device that this machine may have."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


def on_gpu(monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, local: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    for variable, count in zip(VARIABLES, (ranks, local), strict=True):
        monkeypatch.setenv(variable, str(count))


def test_without_a_job_it_is_this_machine(alone: pytest.MonkeyPatch) -> None:
    assert read_surroundings() == Surroundings(None, 1, 1)
    assert Cluster.detect() == Cluster.preset("cpu-gloo")


def test_one_node_needs_no_network(alone: pytest.MonkeyPatch) -> None:
    on_gpu(alone, "NVIDIA H200", ranks=4, local=4)
    assert Cluster.detect() == Cluster("h200", None, gpus_per_node=8)


def test_several_nodes_get_the_usual_network_and_a_warning(
    alone: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_gpu(alone, "NVIDIA GB200", ranks=16, local=4)
    with caplog.at_level(logging.WARNING, "inductor_overlap"):
        assert Cluster.detect() == Cluster("gb200", "ib-ndr-400x4", gpus_per_node=4)
    assert "4 nodes of 4 ranks" in caplog.text
    assert "taken for 'ib-ndr-400x4': name yours" in caplog.text


@pytest.mark.parametrize("name", ["Imaginary 9000", "NVIDIA H100 NVL"])
def test_an_unknown_device_is_an_h100_and_a_warning(
    name: str, alone: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_gpu(alone, name, ranks=8, local=8)
    with caplog.at_level(logging.WARNING, "inductor_overlap"):
        assert Cluster.detect().gpu == "h100"
    assert f"no profile is for device {name!r}; it is priced as 'h100'" in caplog.text


def test_a_compile_on_an_unknown_device_warns_once(
    alone: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_gpu(alone, "Imaginary 9001", ranks=8, local=8)
    alone.setattr(torch.cuda, "get_device_name", lambda _: "Imaginary 9001")
    with caplog.at_level(logging.WARNING, "inductor_overlap"):
        assert default_cluster("cuda") == default_cluster("cuda") == Cluster.preset("h100-ib")
    assert caplog.text.count("no profile is for device 'Imaginary 9001'") == 1


def test_ranks_of_a_fake_group_are_all_as_this_one(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("LOCAL_WORLD_SIZE", "2")
    with fake_process_group(8):
        assert read_surroundings() == Surroundings(None, 8, 2)
        assert Cluster.detect() == Cluster("cpu", "eth-10x1", gpus_per_node=2)


def test_ranks_on_different_devices_are_refused(alone: pytest.MonkeyPatch) -> None:
    ranks = [detect._Rank(name, "host", None) for name in ("NVIDIA H100", "NVIDIA H200")]  # pyright: ignore[reportPrivateUsage]
    alone.setattr(detect, "_all_ranks", lambda: ranks)
    with pytest.raises(ValueError, match=r"different devices \(NVIDIA H100, NVIDIA H200\)"):
        read_surroundings()
