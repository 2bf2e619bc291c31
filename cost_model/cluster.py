"""The cluster that is planned for: GPUs, how a node joins them, NICs and fabric.

A `Cluster` is a name for constants: the devices, fabrics and presets of ``profiles/*.toml``, where
each number has its source. It answers what one collective, one matmul or one attention costs.
Nothing is read from a device: two ranks that build the same `Cluster` get the same numbers. Names
are the same in any case: "H100" is "h100".

Refused (``ValueError`` naming the near misses): an unknown GPU, fabric or preset, a network that
is not spelled ``<fabric>-<Gbit/s per NIC>x<NICs per node>``, an override that names no constant,
an error of what is not priced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from typing import cast

import torch

from inductor_overlap.cost_model.checks import check_size, is_count, is_number
from inductor_overlap.cost_model.collective_time import (
    LinkConstants,
    check_collective,
    collective_us,
)
from inductor_overlap.cost_model.compute_time import (
    ComputeConstants,
    attention_us,
    dtype_name,
    matmul_us,
    memory_us,
)
from inductor_overlap.cost_model.curve import Curve
from inductor_overlap.cost_model.detect import read_surroundings
from inductor_overlap.cost_model.errors import collective_error, compute_error, measured_kinds
from inductor_overlap.cost_model.grouped_launch import size_classes
from inductor_overlap.cost_model.profile_tables import (
    device_constants,
    device_names,
    device_profiles,
    fabric_name,
    known_name,
    network_constants,
    read_table,
    unknown_name,
)

_log = logging.getLogger("inductor_overlap")

# Overlap of two pipelined stages that are equally long; see LinkConstants.overlap_order.
OVERLAP_ORDER = 3.56
# The chain inside a node of the all-reduce tree against a ring: every GPU relays two streams.
TREE_SHARE = 0.786
_BRAND = re.compile(r"^(NVIDIA|Tesla) ")


@dataclass(frozen=True)
class Cluster:
    """GPUs, network and how many GPUs a node holds.

    Attributes:
        gpu: a device of ``profiles/gpus.toml`` (``"h100"``, ``"b200"``, ``"cpu"``, ...).
        network: ``<fabric>-<Gbit/s per NIC>x<NICs per node>``, as in ``"ib-ndr-400x8"``; ``None``
            (or "none") is a single node: groups larger than a node are priced as if NVLink joined
            them, and reports say so. ``"roce-cross-domain-400x4"``: NVLink does not join its nodes,
            though the device's racks are NVLink domains.
        gpus_per_node: GPUs (ranks) of a node.
        share_links: whether communicators on the same NICs or NVLink share their bandwidth.
        contention: factor on compute while a collective is in flight; None: the profile's.
        overrides: constants that replace those of the profiles, as (name, value) pairs.
        curves: measured times that replace the formulas for their kind and placement.
        errors: relative errors to expect instead of the profiles', as (what, value) pairs:
            "collective", or a kind of kernel as in `compute_error`. A calibration writes all three.
    """

    gpu: str = "h100"
    network: str | None = None
    gpus_per_node: int = 8
    share_links: bool = True
    contention: float | None = None
    overrides: tuple[tuple[str, float], ...] = ()
    curves: tuple[Curve, ...] = ()
    errors: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, str) or not isinstance(self.network, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"gpu must be a name, and network a name or None; got gpu={self.gpu!r}, "
                f"network={self.network!r}"
            )
        object.__setattr__(self, "gpu", known_name("gpu", self.gpu, device_names()))
        network = None if self.network is None else self.network.lower()
        object.__setattr__(self, "network", None if network == "none" else network)
        if not is_count(self.gpus_per_node):
            raise ValueError(
                f"gpus_per_node must be at least 1, got {self.gpus_per_node!r}; expected an int"
            )
        # numpy's numbers do not go into a file or an identity.
        object.__setattr__(self, "gpus_per_node", int(self.gpus_per_node))
        if not isinstance(self.share_links, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"share_links must be True or False, got {self.share_links!r}")
        if self.contention is not None and not (
            is_number(self.contention) and self.contention >= 1.0
        ):
            raise ValueError(
                f"contention is a slowdown, a finite number >= 1, or None; got {self.contention!r}"
            )
        if self.contention is not None:
            object.__setattr__(self, "contention", float(self.contention))
        _check_overrides(self.overrides, set(self._profiled))
        _check_errors(self.errors)
        curves = cast("object", self.curves)
        if not isinstance(curves, tuple) or not all(isinstance(c, Curve) for c in self.curves):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"curves are a tuple of Curve objects, of a calibration; got {self.curves!r}"
            )

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """The cluster named in ``profiles/presets.toml``.

        Raises:
            ValueError: no such preset; the message lists those that are spelled alike.
        """
        presets = read_table("presets")
        return cls(**presets[known_name("cluster preset", name, presets)])

    @classmethod
    def detect(cls) -> Cluster:
        """The cluster that this job runs on, as far as its ranks can tell; all get the same.

        From the running process group (else torchrun's environment): the device's name and how
        many ranks a node holds. What cannot be told is assumed, and a warning says so: a device
        without a profile is an H100, and the network between nodes is the one of the device's
        usual cluster (``ib-ndr-400x8`` for most, ``eth-10x1`` for CPUs). Collective: every rank
        must call it.

        Raises:
            ValueError: ranks run on devices of different names.
        """
        found = read_surroundings()
        device = found.device_name
        usual = cls.usual("cpu") if device is None else cls.usual_of_device(device)
        if found.num_nodes == 1:
            room = max(usual.gpus_per_node, found.ranks_per_node)
            return replace(usual, network=None, gpus_per_node=room)
        network = usual.network or "eth-10x1"
        _log.warning(
            "%d nodes of %d ranks were found; the network between them is taken for %r: name "
            "yours, as in Cluster(network=...), or calibrate",
            found.num_nodes,
            found.ranks_per_node,
            network,
        )
        return replace(usual, network=network, gpus_per_node=found.ranks_per_node)

    @classmethod
    def usual(cls, gpu: str | None) -> Cluster:
        """The preset that ``gpu`` is most often found in; None, or one in no preset: an H100's."""
        if gpu is not None:
            gpu = known_name("gpu", gpu, device_names())
        presets = (f"{gpu}-ib", f"{gpu}-nvl72", f"{gpu}-slingshot", f"{gpu}-gloo")
        known = next((name for name in presets if name in cls.presets()), None)
        if known is not None:
            return cls.preset(known)
        return replace(cls.preset("h100-ib"), gpu=gpu or "h100")

    @classmethod
    def usual_of_device(cls, device_name: str) -> Cluster:
        """`usual` of what the CUDA runtime calls ``device_name``; warns if no profile is for it."""
        gpu = cls.gpu_named(device_name)
        usual = cls.usual(gpu)
        if gpu is None:
            _log.warning(
                "no profile is for device %r; it is priced as %r. Name the nearest, as in "
                "Cluster(gpu=...), or calibrate",
                device_name,
                usual.gpu,
            )
        return usual

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names that `preset` accepts."""
        return tuple(sorted(read_table("presets")))

    @staticmethod
    def gpus() -> tuple[str, ...]:
        """Devices that ``gpu`` accepts."""
        return device_names()

    @staticmethod
    def gpu_named(device_name: str) -> str | None:
        """The profile of the device that the CUDA runtime calls ``device_name``; None if none.

        Only whole names count, beside the brand: "NVIDIA H100 NVL" is another product than "NVIDIA
        H100", and a MIG slice has the name of its GPU and more.
        """
        return device_profiles().get(_BRAND.sub("", device_name))

    def collective_us(
        self, kind: str, size_bytes: float, *, num_nodes: int, ranks_per_node: int
    ) -> float:
        """Time (us) of one collective over ``num_nodes`` x ``ranks_per_node`` ranks.

        Args:
            kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
            size_bytes: nccl-tests size: gathered bytes, scattered input, or a rank's buffer.
            num_nodes: nodes that hold ranks of the group.
            ranks_per_node: its ranks on each of them.

        Raises:
            ValueError: an unknown kind, an empty group, a size that is negative or no number.
        """
        check_collective(kind, num_nodes, ranks_per_node)
        curve = self._curves.get((kind, num_nodes, ranks_per_node))
        if curve is not None:
            check_size(kind, size_bytes)
            return curve.time_us(size_bytes, self._formula_us)
        return self._formula_us(kind, size_bytes, num_nodes, ranks_per_node)

    def link_us(
        self, kind: str, size_bytes: float, *, num_nodes: int, ranks_per_node: int
    ) -> float:
        """For how long (us) the same collective keeps its link busy; at most `collective_us`.

        Less where a calibration has found that several in flight use the link better than one.
        """
        whole_us = self.collective_us(
            kind, size_bytes, num_nodes=num_nodes, ranks_per_node=ranks_per_node
        )
        curve = self._link_curves.get((kind, num_nodes, ranks_per_node))
        busy_us = math.inf if curve is None else curve.time_us(size_bytes, self._formula_us)
        return min(whole_us, busy_us)

    def coalesced_us(
        self, kind: str, sizes_bytes: Iterable[int], *, num_nodes: int, ranks_per_node: int
    ) -> float:
        """Time (us) of several collectives of one kind, launched together; see `grouped_launch`."""
        return sum(
            self.collective_us(kind, sum(sizes), num_nodes=num_nodes, ranks_per_node=ranks_per_node)
            for sizes in size_classes(sizes_bytes, self.constants["aggregation_ratio"])
        )

    def collective_error(
        self, kind: str, size_bytes: float, *, num_nodes: int, ranks_per_node: int
    ) -> float:
        """Relative error to expect of `collective_us`: 0.1 is 10 %, the median of its kind.

        See ``errors``: for machines that were not fitted, or of a calibration of this one.
        """
        check_collective(kind, num_nodes, ranks_per_node)
        covered = self.has_curve(kind, num_nodes, ranks_per_node)
        measured = dict(self.errors).get("collective", 0.0) if covered else None
        return collective_error(size_bytes, num_nodes, self.gpu, self.fabric, measured)

    def compute_error(self, what: str) -> float:
        """Relative error to expect of a kernel's time; ``what`` as in `errors.compute_error`."""
        return compute_error(what, self.gpu, dict(self.errors))

    def has_curve(self, kind: str, num_nodes: int, ranks_per_node: int) -> bool:
        """Whether a calibration covers this kind and placement."""
        return (kind, num_nodes, ranks_per_node) in self._curves

    def _formula_us(
        self, kind: str, size_bytes: float, num_nodes: int, ranks_per_node: int
    ) -> float:
        nodes, local = self._domains(num_nodes, ranks_per_node)
        return collective_us(kind, size_bytes, nodes, local, self.link_constants(local))

    def matmul_us(
        self, m: int, n: int, k: int, dtype: str | torch.dtype = "bf16", *, batch: int = 1
    ) -> float:
        """Time (us) of ``batch`` products (m, k) x (k, n) in one kernel, run as a short burst.

        ``dtype`` as in ``compute_time.dtype_name``.

        Raises:
            ValueError: a size that is negative or no whole number, or a dtype that is not
                multiplied.
        """
        return matmul_us(batch, m, n, k, dtype_name(dtype), self.compute_constants)

    def sustained_matmul_us(
        self, m: int, n: int, k: int, dtype: str | torch.dtype = "bf16", *, batch: int = 1
    ) -> float:
        """The same in the middle of a training step, at the clocks that power allows then."""
        name = dtype_name(dtype)
        return matmul_us(batch, m, n, k, name, self.compute_constants, sustained=True)

    def attention_us(
        self,
        batch: int,
        q_heads: int,
        kv_heads: int,
        seq_q: int,
        seq_kv: int,
        head_dim: int,
        dtype: str | torch.dtype = "bf16",
        *,
        head_dim_v: int | None = None,
        causal: bool = False,
        backward: bool = False,
        flash2: bool = False,
    ) -> float:
        """Time (us) of fused attention, forward or backward, on (batch, heads, seq, dim).

        ``flash2``: PyTorch's own FlashAttention 2 kernel instead of the GPU's best one.

        Raises:
            ValueError: a size that is negative or no whole number, or a dtype that is not
                multiplied.
        """
        return attention_us(
            batch,
            q_heads,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            head_dim if head_dim_v is None else head_dim_v,
            dtype_name(dtype),
            causal=causal,
            backward=backward,
            constants=self.compute_constants,
            flash2=flash2,
        )

    def memory_us(self, size_bytes: float) -> float:
        """Time (us) of a kernel that moves ``size_bytes`` (read plus written) of device memory."""
        return memory_us(size_bytes, self.compute_constants)

    def uuid(self) -> str:
        """Digest of every number a price depends on: the cluster's part of a cache key."""
        content = {
            "constants": dict(self.constants),
            "network": self.network,
            "gpus_per_node": self.gpus_per_node,
            "share_links": self.share_links,
            "contention": self.contention,
            "curves": [astuple(curve) for curve in self.curves],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def launch_us(self) -> float:
        return self.constants["launch_us"]

    @property
    def collective_launch_us(self) -> float:
        return self.constants["collective_launch_us"]

    @property
    def queue_width(self) -> int:
        return int(self.constants["queue_width"])

    @property
    def contention_factor(self) -> float:
        if self.contention is not None:
            return self.contention
        return self.constants["contention"]

    @cached_property
    def compute_constants(self) -> ComputeConstants:
        table = self.constants
        return ComputeConstants(**{f.name: table[f.name] for f in fields(ComputeConstants)})

    def link_constants(self, ranks_per_node: int) -> LinkConstants:
        """What the ranks of a group see of the links; a "node" is an NVLink domain here."""
        known = self._links.get(ranks_per_node)
        if known is None:
            known = self._links[ranks_per_node] = _link_constants(self, ranks_per_node)
        return known

    @cached_property
    def _links(self) -> dict[int, LinkConstants]:
        return {}

    def leaves_nvlink(self, num_nodes: int, ranks_per_node: int) -> bool:
        """Whether a group uses the network: nodes of one NVLink domain do not."""
        return self._domains(num_nodes, ranks_per_node)[0] > 1

    def lacks_network(self, num_nodes: int) -> bool:
        """Whether a group of several nodes is priced by NVLink for want of a network.

        Nodes of one NVL72 rack have NVLink.
        """
        return self.network is None and num_nodes > self._nodes_per_domain

    def _domains(self, num_nodes: int, ranks_per_node: int) -> tuple[int, int]:
        """Placement in NVLink domains: an NVL72 rack is one, whatever its trays."""
        ranks = num_nodes * ranks_per_node
        if self.network is None:
            return 1, ranks
        domains = -(-num_nodes // self._nodes_per_domain)
        return domains, -(-ranks // domains)

    @property
    def _nodes_per_domain(self) -> int:
        return max(1, int(self.constants["nvlink_domain"]) // self.gpus_per_node)

    @cached_property
    def _curves(self) -> dict[tuple[str, int, int], Curve]:
        return {(c.kind, c.num_nodes, c.ranks_per_node): c for c in self.curves}

    @cached_property
    def _link_curves(self) -> dict[tuple[str, int, int], Curve]:
        return {key: curve.of_link() for key, curve in self._curves.items() if curve.link_us}

    @cached_property
    def _profiled(self) -> dict[str, float]:
        """Constants of the device and, if there is one, of the network, by name."""
        device = device_constants(self.gpu)
        if self.network is None:
            return device
        return device | network_constants(self.network, device["pcie_generation"])

    @cached_property
    def constants(self) -> Mapping[str, float]:
        """Every number a price depends on, by the name it has in the profiles."""
        return self._profiled | dict(self.overrides)

    @property
    def fabric(self) -> str | None:
        """The table of ``profiles/fabrics.toml`` that the network's constants are from."""
        return None if self.network is None else fabric_name(self.network)


def _check_pairs(field: str, what: str, pairs: object, known: Collection[str]) -> None:
    """Raise ``ValueError`` for what is no tuple of (name, value), a known name and a number."""
    spelled = f"{field} are (name, value) pairs, as in tuple(dict.items())"
    if not isinstance(pairs, tuple):
        raise ValueError(f"{spelled}; got {pairs!r}")
    for pair in cast("tuple[object, ...]", pairs):
        if not isinstance(pair, tuple) or len(cast("tuple[object, ...]", pair)) != 2:
            raise ValueError(f"{spelled}; got {pair!r} among them")
        name, value = cast("tuple[object, object]", pair)
        if not isinstance(name, str) or name not in known:
            raise ValueError(unknown_name(what, name, known))
        if not is_number(value) or value < 0:
            raise ValueError(f"{what} {name} must be finite and >= 0, got {value!r}")


def _check_errors(errors: tuple[tuple[str, float], ...]) -> None:
    """Raise ``ValueError`` for what is no relative error of something that is priced."""
    _check_pairs("errors", "error", errors, measured_kinds())


def _check_overrides(overrides: tuple[tuple[str, float], ...], known: set[str]) -> None:
    """Raise ``ValueError`` for what is no (name, value) pair of a known constant and a number."""
    _check_pairs("overrides", "constant", overrides, known)
    for name, value in overrides:
        if value == 0 and name.endswith(("_gb_per_s", "_tflop_per_s")):
            raise ValueError(f"constant {name} is a rate and must be > 0, got {value!r}")
        if name == "queue_width" and value < 1:
            raise ValueError(f"constant queue_width must be at least 1, got {value!r}")


def _link_constants(cluster: Cluster, ranks_per_node: int) -> LinkConstants:
    table = cluster.constants
    peak_gb_per_s = table["local_gb_per_s"]
    ring_gb_per_s = peak_gb_per_s * table["local_efficiency"]
    derived = {
        "local_gb_per_s": ring_gb_per_s,
        "tree_gb_per_s": ring_gb_per_s * TREE_SHARE,
        "nvls_gb_per_s": peak_gb_per_s * table["nvls_efficiency"],
        "p2p_gb_per_s": peak_gb_per_s * table["p2p_efficiency"],
        "node_gb_per_s": _node_gb_per_s(table, ranks_per_node, cluster.gpus_per_node),
        "overlap_order": OVERLAP_ORDER,
    }
    names = LinkConstants._fields
    return LinkConstants(**{n: derived[n] if n in derived else table.get(n, 0.0) for n in names})


def _node_gb_per_s(table: Mapping[str, float], ranks_per_node: int, gpus_per_node: int) -> float:
    """Plateau of a node into the fabric: ranks use the NICs beside them, at least one.

    More ranks than a node has GPUs are an NVLink domain of several nodes, with all their NICs.
    """
    if "num_nics" not in table:
        return table["local_gb_per_s"]
    nics = max(1.0, table["num_nics"] * ranks_per_node / gpus_per_node)
    return table["efficiency"] * table["nic_gb_per_s"] * nics
