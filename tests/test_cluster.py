"""Clusters: names, presets, placement, overrides, identity."""

from __future__ import annotations

import pickle

import pytest

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.curve import Curve

pytestmark = pytest.mark.quick

H100 = Cluster.preset("h100-ib")


@pytest.mark.parametrize("name", Cluster.presets())
def test_every_preset_prices_everything(name: str) -> None:
    cluster = Cluster.preset(name)
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        assert cluster.collective_us(kind, 2**20, num_nodes=2, ranks_per_node=4) > 0
    for dtype in ("bf16", "fp16", "fp8", "tf32", "fp32", "fp64"):
        assert cluster.matmul_us(128, 128, 128, dtype) > 0
    assert cluster.attention_us(1, 8, 8, 128, 128, 64, causal=True, backward=True) > 0


@pytest.mark.parametrize("gpu", Cluster.gpus())
def test_every_gpu_has_every_constant(gpu: str) -> None:
    cluster = Cluster(gpu, "roce-400x8")
    assert cluster.compute_constants.kernel_us > 0
    assert cluster.link_constants(8).node_gb_per_s > 0
    assert cluster.launch_us > 0
    assert cluster.contention_factor >= 1


def test_node_bandwidth_follows_the_nics_in_use() -> None:
    # NDR: 50 GB/s a NIC; 1, 2, 4, 8 GPUs of a node use as many NICs.
    one = H100.link_constants(1).node_gb_per_s
    assert [H100.link_constants(g).node_gb_per_s / one for g in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert one == pytest.approx(50 * H100.constants["efficiency"])
    # 32 NICs of 12.5 GB/s: a GPU has four.
    efa = Cluster.preset("h100-efa")
    assert efa.link_constants(1).node_gb_per_s == pytest.approx(50 * efa.constants["efficiency"])
    # Two NICs for four GPUs: one GPU alone still has a whole one.
    polaris = Cluster("a100", "slingshot11-200x2", gpus_per_node=4)
    assert polaris.link_constants(1).node_gb_per_s == pytest.approx(
        25 * polaris.constants["efficiency"]
    )


def test_placement_matters() -> None:
    def all_gather(num_nodes: int, ranks_per_node: int) -> float:
        return H100.collective_us(
            "all_gather", 2**28, num_nodes=num_nodes, ranks_per_node=ranks_per_node
        )

    assert all_gather(1, 8) < all_gather(2, 4) < all_gather(8, 1)


def test_a_rack_is_one_nvlink_domain() -> None:
    rack = Cluster("gb200", "ib-ndr-400x4", gpus_per_node=4)
    single = Cluster("gb200", None, gpus_per_node=72)
    inside = rack.collective_us("all_gather", 2**28, num_nodes=16, ranks_per_node=4)
    assert inside == single.collective_us("all_gather", 2**28, num_nodes=1, ranks_per_node=64)
    assert rack.collective_us("all_gather", 2**28, num_nodes=32, ranks_per_node=4) > inside


def test_networks_are_spelled_like_the_public_logs() -> None:
    spellings = {
        "ib-ndr-400x8(1 gpu/node)": "ib-ndr",
        "ib/roce-400x8?": "ib",
        "roce-400x8?": "roce",
        "roce-oci-400x8(16x200)": "roce",
        "roce-gib-cross-domain-400x8/node": "roce",
        "efa-100x4": "efa-100x4",
        "efa-100x32": "efa",
        "slingshot11-200x4": "slingshot11",
        "gcp-tcpxo-200x8": "gcp-tcpxo",
        "eth-100-tcp": None,
    }
    for network, fabric in spellings.items():
        if fabric is None:
            with pytest.raises(ValueError, match="is not spelled"):
                Cluster("h100", network)
        else:
            assert Cluster("h100", network).fabric == fabric


def test_mistakes_name_the_near_misses() -> None:
    with pytest.raises(ValueError, match=r"cluster preset 'h100-ibb'; did you mean h100-ib"):
        Cluster.preset("h100-ibb")
    with pytest.raises(ValueError, match=r"unknown gpu 'h10'; did you mean .*h100"):
        Cluster("h10")
    with pytest.raises(ValueError, match=r"unknown fabric 'infiniband'"):
        Cluster("h100", "infiniband-400x8")
    with pytest.raises(ValueError, match="no bandwidth"):
        Cluster("h100", "ib-ndr-0x8")
    with pytest.raises(ValueError, match="gpus_per_node must be at least 1, got 0"):
        Cluster("h100", gpus_per_node=0)
    with pytest.raises(ValueError, match=r"contention is a slowdown.*got 0.5"):
        Cluster("h100", contention=0.5)
    with pytest.raises(ValueError, match=r"unknown constant 'base'; did you mean base_us"):
        Cluster("h100", overrides=(("base", 1.0),))
    with pytest.raises(ValueError, match=r"constant base_us must be finite and >= 0, got nan"):
        Cluster("h100", overrides=(("base_us", float("nan")),))


def test_overrides_replace_constants() -> None:
    slower = Cluster("h100", "ib-ndr-400x8", overrides=(("efficiency", 0.49),))
    assert slower.link_constants(8).node_gb_per_s == pytest.approx(0.49 * 400)


def test_identity_covers_every_number() -> None:
    same = Cluster("h100", "ib-ndr-400x8")
    assert same == H100
    assert hash(H100) == hash(same)
    assert H100.uuid() == same.uuid()
    others = [
        Cluster("h100", "ib-ndr-400x4"),
        Cluster("h200", "ib-ndr-400x8"),
        Cluster("h100", "ib-ndr-400x8", gpus_per_node=4),
        Cluster("h100", "ib-ndr-400x8", contention=1.0),
        Cluster("h100", "ib-ndr-400x8", share_links=False),
        Cluster("h100", "ib-ndr-400x8", overrides=(("base_us", 9.0),)),
    ]
    assert len({H100.uuid(), *(other.uuid() for other in others)}) == len(others) + 1


def test_pickles() -> None:
    copy = pickle.loads(pickle.dumps(H100))
    assert copy == H100
    assert copy.uuid() == H100.uuid()


def test_devices_are_recognised_by_their_runtime_name() -> None:
    assert Cluster.gpu_named("NVIDIA H100 80GB HBM3") == "h100"
    assert Cluster.gpu_named("NVIDIA GH200 480GB") == "gh200"
    assert Cluster.gpu_named("NVIDIA GB200") == "gb200"
    assert Cluster.gpu_named("NVIDIA A100-SXM4-40GB") == "a100-40gb"
    assert Cluster.gpu_named("Quadro") is None


def test_errors_are_larger_for_small_sizes_and_across_nodes() -> None:
    def error(size: int, num_nodes: int) -> float:
        return H100.collective_error("all_gather", size, num_nodes=num_nodes, ranks_per_node=8)

    assert error(2**29, 1) < error(2**23, 1) < error(2**10, 1)
    assert error(2**29, 1) < error(2**29, 2) < error(2**10, 2)
    curve = Curve("all_gather", 2, 8, (1024,), (50.0,))
    calibrated = Cluster("h100", "ib-ndr-400x8", curves=(curve,))
    found = calibrated.collective_error("all_gather", 2**10, num_nodes=2, ranks_per_node=8)
    assert found < error(2**10, 2)
    assert calibrated.collective_error("all_gather", 2**10, num_nodes=4, ranks_per_node=8) == error(
        2**10, 4
    )
