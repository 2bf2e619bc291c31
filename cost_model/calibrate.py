"""Fit a cluster to measurements of its own collectives.

Two things are learned. The constants of the formulas are moved until they fit (``fit``): that also
improves sizes, kinds and placements that were not measured. And for each measured placement the
times themselves are kept as a curve, because a log of the very machine knows what no formula does;
between two measured sizes the curve is a power law, beyond them the formula follows on.

Noise is not kept: a time that is larger than that of a larger size is lowered to it. Refused
(``ValueError``): a log without a table, one whose collective cannot be told, no measurements.

The nccl-tests table is described in
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.collective_time import check_collective
from inductor_overlap.cost_model.curve import Curve
from inductor_overlap.cost_model.fit import fit_constants

LOCAL_CONSTANTS = (
    "base_us",
    "local_hop_us",
    "local_simple_us",
    "ll_share",
    "fill_us",
    "local_efficiency",
    "copy_gb_per_s",
    "p2p_efficiency",
    "p2p_copy_gb_per_s",
    "message_us",
    "nvls_efficiency",
    "nvls_us",
)
"""Constants that a collective inside a node tells about."""
NETWORK_CONSTANTS = (
    "efficiency",
    "pcie4_efficiency",
    "network_base_us",
    "network_hop_us",
    "network_simple_us",
    "ring_step_us",
    "network_fill_us",
    "buffer_us",
    "network_message_us",
)
"""Constants that a collective across nodes tells about."""
_SHARES = {
    name: 1.0
    for name in (*LOCAL_CONSTANTS, *NETWORK_CONSTANTS)
    if name.endswith(("efficiency", "share"))
}
_PROGRAMS = {
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}
_RANK_LINE = re.compile(r"#\s+Rank\s+\d+\s+.*?Pid\s+\d+\s+on\s+(?P<host>\S+)\s+device")
# size, count, type, redop, root, then out-of-place time, algbw and busbw
_TABLE_LINE = re.compile(
    r"^\s*(?P<size>\d+)\s+\d+\s+\w+\s+(?P<redop>\w+)\s+-?\d+\s+"
    r"(?P<time>[\d.]+)\s+(?P<algbw>[\d.]+)\s+(?P<busbw>[\d.]+)"
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured collective; sizes as nccl-tests counts them."""

    kind: str
    size_bytes: int
    num_nodes: int
    ranks_per_node: int
    time_us: float

    def __post_init__(self) -> None:
        check_collective(self.kind, self.num_nodes, self.ranks_per_node)
        if self.size_bytes <= 0 or not 0 < self.time_us < float("inf"):
            raise ValueError(
                f"a measurement needs a positive size and a positive finite time; got "
                f"{self.size_bytes} bytes in {self.time_us} us"
            )


def read_nccl_tests(text: str, kind: str | None = None) -> list[Measurement]:
    """The out-of-place times of an nccl-tests log.

    Args:
        text: the log, with its "# Rank" lines: they tell nodes and ranks per node.
        kind: which collective it is; None: read from the log (program name, or the reduction
            column with the ratio of bus to algorithm bandwidth).

    Raises:
        ValueError: no rank lines, no table, or the collective cannot be told.
    """
    hosts = Counter(match["host"] for match in _RANK_LINE.finditer(text))
    if not hosts:
        raise ValueError(
            'the log has no "# Rank ... Pid ... on HOST device" lines, which tell the placement; '
            "pass the whole output of nccl-tests"
        )
    lines = [match for line in text.splitlines() if (match := _TABLE_LINE.match(line))]
    rows = [line for line in lines if int(line["size"]) > 0 and float(line["time"]) > 0]
    if not rows:
        raise ValueError(
            "the log has no nccl-tests table (size, count, type, redop, root, time, algbw, busbw)"
        )
    found = kind or _told_by_name(text) or _told_by_table(rows, hosts.total())
    placement = len(hosts), max(hosts.values())
    return [Measurement(found, int(row["size"]), *placement, float(row["time"])) for row in rows]


def _told_by_name(text: str) -> str | None:
    """The collective that the log names (program or test name), if it names one only."""
    named = {
        kind
        for word, kind in _PROGRAMS.items()
        if re.search(rf"(?<![a-z]){word}(_perf|[^a-z_]|$)", text, re.IGNORECASE | re.MULTILINE)
    }
    return named.pop() if len(named) == 1 else None


def _told_by_table(rows: Sequence[re.Match[str]], ranks: int) -> str:
    """The collective by its reduction and by bus over algorithm bandwidth.

    The ratio is 2 (n-1)/n for all-reduce and (n-1)/n for the others.
    """
    if all(row["redop"] == "none" for row in rows):
        raise ValueError(
            "the log does not name its collective and has no reduction: all-gather and all-to-all "
            'look alike; pass kind="all_gather" or kind="all_to_all"'
        )
    fastest = max(rows, key=lambda row: float(row["busbw"]))
    ratio = float(fastest["busbw"]) / max(1e-9, float(fastest["algbw"]))
    return "all_reduce" if ratio > 1.5 * (ranks - 1) / ranks else "reduce_scatter"


def calibrate(cluster: Cluster, measurements: Iterable[Measurement]) -> Cluster:
    """``cluster`` with constants and curves that fit ``measurements``.

    Raises:
        ValueError: no measurements, or a placement that the cluster cannot hold.
    """
    measured = list(measurements)
    if not measured:
        raise ValueError("nothing was measured: a calibration needs at least one collective")
    _check_placements(cluster, measured)
    formula = replace(cluster, curves=())
    start = _start(formula, measured)
    constants = fit_constants(
        lambda trial: [predicted_us(_with_constants(formula, trial), m) for m in measured],
        [m.time_us for m in measured],
        start,
        upper={name: _SHARES[name] for name in start if name in _SHARES},
    )
    return replace(_with_constants(formula, constants), curves=_curves(measured))


def predicted_us(cluster: Cluster, measurement: Measurement) -> float:
    """What ``cluster`` says a measured collective takes."""
    return cluster.collective_us(
        measurement.kind,
        measurement.size_bytes,
        num_nodes=measurement.num_nodes,
        ranks_per_node=measurement.ranks_per_node,
    )


def _check_placements(cluster: Cluster, measured: Sequence[Measurement]) -> None:
    nodes = max(m.num_nodes for m in measured)
    if nodes > 1 and cluster.network is None:
        raise ValueError(
            f"collectives over {nodes} nodes were measured, but the cluster is a single node; "
            'name its network, as in Cluster(gpu="h100", network="ib-ndr-400x8")'
        )
    local = max(m.ranks_per_node for m in measured)
    if local > cluster.gpus_per_node:
        raise ValueError(
            f"{local} ranks on one node were measured, but gpus_per_node={cluster.gpus_per_node}"
        )


def _start(cluster: Cluster, measured: Sequence[Measurement]) -> dict[str, float]:
    """The constants that the measurements tell about, as they are now."""
    names: list[str] = []
    if any(m.num_nodes == 1 or m.ranks_per_node > 1 for m in measured):
        names += LOCAL_CONSTANTS
    if any(m.num_nodes > 1 for m in measured):
        names += NETWORK_CONSTANTS
    return {name: cluster.constants[name] for name in names if cluster.constants[name] > 0}


def _with_constants(cluster: Cluster, constants: Mapping[str, float]) -> Cluster:
    merged = dict(cluster.overrides) | dict(constants)
    return replace(cluster, overrides=tuple(sorted(merged.items())))


def _curves(measured: Sequence[Measurement]) -> tuple[Curve, ...]:
    """Per kind and placement the median time of each size, never falling with size."""
    times: dict[tuple[str, int, int], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for m in measured:
        times[m.kind, m.num_nodes, m.ranks_per_node][m.size_bytes].append(m.time_us)
    return tuple(
        Curve(*placement, *_rising({size: median(each) for size, each in by_size.items()}))
        for placement, by_size in sorted(times.items())
    )


def _rising(time_by_size: Mapping[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Sizes in order and their times, each lowered to the least time of any larger size."""
    sizes = sorted(time_by_size)
    times: list[float] = []
    least = float("inf")
    for size in reversed(sizes):
        least = min(least, time_by_size[size])
        times.append(least)
    return tuple(sizes), tuple(reversed(times))
