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
    for dtype in ("bf16", "fp16", "fp8", "int8", "tf32", "fp32", "fp64"):
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
        "tcpxo-200x8": "gcp-tcpxo",
        "tcpx-200x4": "gcp-tcpx",
        "slingshot-11-200x4": "slingshot11",
        "slingshot11-200x1": "slingshot11",
        "ib-hdr-200x8": "ib-hdr",
        "ib-xdr-800x8": "ib-xdr",
        "eth-100x1": "eth",
        "pcie-512x1": "pcie",
        "none": None,
        "ib-ndr-400x8.5": "",
        "ib-ndr-400x8 GPUs": "",
        "eth-100-tcp": "",
    }
    for network, fabric in spellings.items():
        if fabric == "":
            with pytest.raises(ValueError, match="is not spelled"):
                Cluster("h100", network)
        else:
            assert Cluster("h100", network).fabric == fabric


def test_names_are_the_same_in_any_case() -> None:
    assert Cluster.preset("H100-IB") == Cluster("H100", "IB-NDR-400X8") == H100
    assert Cluster("h100", "None") == Cluster("h100")
    assert Cluster.usual("GB300") == Cluster.preset("gb300-nvl72")


def test_a_network_across_domains_is_not_nvlink() -> None:
    for device in ("gb200", "gb300"):
        rack = Cluster(device, "roce-400x8", gpus_per_node=4)
        assert not rack.leaves_nvlink(2, 4)
        for network in ("roce-gib-cross-domain-400x8/node", "roce-cross-domain-400x8"):
            across = Cluster(device, network, gpus_per_node=4)
            assert across.leaves_nvlink(2, 4)
            assert across.link_constants(4) == rack.link_constants(4)


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


def test_some_fabrics_differ_on_pcie_4() -> None:
    on_pcie4 = Cluster("a100", "slingshot11-200x4").constants["efficiency"]
    assert on_pcie4 < Cluster("gh200", "slingshot11-200x4").constants["efficiency"]
    same = [Cluster(gpu, "ib-ndr-400x8").constants["efficiency"] for gpu in ("a100", "h100")]
    assert same[0] == same[1]


def test_the_usual_cluster_of_a_device_is_a_preset() -> None:
    assert Cluster.usual("b200") == Cluster.preset("b200-ib")
    assert Cluster.usual("gb300") == Cluster.preset("gb300-nvl72")
    assert Cluster.usual("cpu") == Cluster.preset("cpu-gloo")
    assert Cluster.usual("l40s") == Cluster("l40s", "ib-ndr-400x8")
    assert Cluster.usual(None) == H100


def test_sizes_and_counts_are_checked() -> None:
    curve = Curve("all_gather", 1, 8, (1024,), (50.0,))
    measured = Cluster("h100", curves=(curve,))
    for cluster in (H100, measured):
        with pytest.raises(ValueError, match="size_bytes of all_gather must be finite and >= 0"):
            cluster.collective_us("all_gather", -1, num_nodes=1, ranks_per_node=8)
    with pytest.raises(ValueError, match=r"in whole numbers; got num_nodes=1.5"):
        H100.collective_us("all_gather", 1, num_nodes=1.5, ranks_per_node=8)  # pyright: ignore
    with pytest.raises(ValueError, match=r"sizes of a matmul must be >= 0, .* got .*k=-3"):
        H100.matmul_us(1, 2, -3)
    with pytest.raises(ValueError, match=r"sizes of an attention must be >= 0, .* got .*seq_q=-5"):
        H100.attention_us(1, 1, 1, -5, 5, 8)
    with pytest.raises(ValueError, match="size_bytes of a memory kernel must be finite and >= 0"):
        H100.memory_us(-1)
    # Bytes may be an average or a share.
    assert H100.memory_us(0.5) > 0
    assert H100.collective_us("all_gather", 0.5, num_nodes=1, ranks_per_node=8) > 0
    assert H100.matmul_us(0, 2, 3) == H100.attention_us(1, 1, 1, 0, 5, 8) == H100.memory_us(0) == 0


@pytest.mark.parametrize(
    ("device_name", "gpu"),
    [
        ("Tesla V100-SXM2-32GB", "v100"),
        ("A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        # The 96 GB part has no more to its name; every other H100 has.
        ("NVIDIA H100", "h100-96gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 120GB", "gh200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA L40S", "l40s"),
        # Other products, and a slice of one.
        ("Tesla V100-PCIE-16GB", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H20-3e", None),
        ("NVIDIA GH200 144G HBM3e", None),
        ("Quadro", None),
    ],
)
def test_devices_are_recognised_by_their_runtime_name(device_name: str, gpu: str | None) -> None:
    assert Cluster.gpu_named(device_name) == gpu


def test_errors_are_larger_for_small_sizes_and_across_nodes() -> None:
    def error(size: int, num_nodes: int) -> float:
        return H100.collective_error("all_gather", size, num_nodes=num_nodes, ranks_per_node=8)

    assert error(2**29, 1) < min(error(2**23, 1), error(2**10, 1))
    assert error(2**29, 1) < error(2**29, 2) < error(2**10, 2)
    curve = Curve("all_gather", 2, 8, (1024,), (50.0,))
    calibrated = Cluster(
        "h100", "ib-ndr-400x8", curves=(curve,), errors=(("collective", 0.05), ("matmul", 0.1))
    )
    found = calibrated.collective_error("all_gather", 2**10, num_nodes=2, ranks_per_node=8)
    assert found == 0.05
    assert calibrated.compute_error("matmul_fp8") == 0.1
    assert calibrated.compute_error("memory") == H100.compute_error("memory")
    assert calibrated.collective_error("all_gather", 2**10, num_nodes=4, ranks_per_node=8) == error(
        2**10, 4
    )


def test_what_was_never_measured_has_a_larger_error() -> None:
    def error(cluster: Cluster, num_nodes: int) -> float:
        return cluster.collective_error("all_gather", 2**29, num_nodes=num_nodes, ranks_per_node=8)

    ethernet = Cluster("h100", "eth-100x1")
    assert error(ethernet, 2) > error(H100, 2)
    assert error(ethernet, 1) == error(H100, 1)
    assert error(Cluster("l40s"), 1) > error(H100, 1)
    assert Cluster("l40s").compute_error("matmul") > H100.compute_error("matmul")
