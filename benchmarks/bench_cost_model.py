"""How far predicted times are from measured ones, beside torch's own model.

``python benchmarks/bench_cost_model.py`` prints, for public measurements, the median absolute
error and the bias (both of log(predicted / measured), so 0.1 is about 10 %):

* collectives, leave-one-source-out: the constants of the GPU family and of the fabric are fitted
  without the source that is then predicted. Families start from the same round numbers, fabrics
  from one set of constants that fits all fabrics, fitted without that source too;
* the same rows by the shipped profiles, and by torch's in-tree model;
* sizes of a log by a calibration on every second size of that log; and how many of all sizes are
  within 5 % after a calibration on all of them, beside the most that any curve can come to whose
  times do not fall as the size grows;
* matmuls and attentions by the shipped profiles.

``--shipped`` leaves out the slow parts (leave-one-source-out, calibrations; some minutes).
``--fit`` prints constants fitted to all rows, as the profiles hold them.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar
from unittest.mock import patch

from cost_model_points import (
    SIZE_BANDS,
    AttentionPoint,
    CollectivePoint,
    MatmulPoint,
    read_attentions,
    read_collectives,
    read_matmuls,
)
from torch._inductor import comm_analysis

from inductor_overlap.cost_model.calibrate import calibrate
from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.fit import fit_constants
from inductor_overlap.cost_model.measurements import CollectiveMeasurement

# Where every family and the fit of all fabrics together start: round numbers.
FAMILY_START = {
    "base_us": 8.0,
    "local_hop_us": 1.0,
    "local_simple_us": 5.0,
    "ll_share": 0.35,
    "fill_us": 2.0,
    "local_efficiency": 0.88,
    "copy_gb_per_s": 900.0,
    "p2p_efficiency": 0.82,
    "p2p_copy_gb_per_s": 900.0,
    "message_us": 0.6,
    "nvls_efficiency": 0.69,
    "nvls_us": 15.0,
}
FABRIC_START = {
    "efficiency": 0.95,
    "network_ll_share": 0.02,
    "network_base_us": 10.0,
    "network_hop_us": 4.0,
    "network_simple_us": 20.0,
    "network_fill_us": 5.0,
    "buffer_us": 200.0,
    "network_message_us": 8.0,
}
SHARES = {n: 0.99 for n in (*FAMILY_START, *FABRIC_START) if n.endswith(("efficiency", "share"))}
_FAMILIES = {"v": "volta", "a": "ampere", "h": "hopper", "b": "blackwell", "g": "blackwell"}
_GENERATIONS = {
    "volta": comm_analysis.NVIDIA_GPU_TYPE.VOLTA,
    "ampere": comm_analysis.NVIDIA_GPU_TYPE.AMPERE,
    "hopper": comm_analysis.NVIDIA_GPU_TYPE.HOPPER,
    "blackwell": comm_analysis.NVIDIA_GPU_TYPE.BLACKWELL,
}
_KINDS = {
    "all_gather": comm_analysis.NCCL_COLL.ALL_GATHER,
    "reduce_scatter": comm_analysis.NCCL_COLL.REDUCE_SCATTER,
    "all_reduce": comm_analysis.NCCL_COLL.ALL_REDUCE,
    "all_to_all": comm_analysis.NCCL_COLL.ALL_TO_ALL,
}
T = TypeVar("T")


def family_of(point: CollectivePoint) -> str:
    return "hopper" if point.gpu == "gh200" else _FAMILIES[point.gpu[0]]


def fabric_of(point: CollectivePoint) -> str | None:
    """The fabric whose constants a point tells about; PCIe 4 hosts count apart (other plateau)."""
    if point.num_nodes == 1 or point.cluster.network is None:
        return None
    name = point.cluster.fabric or ""
    return f"{name} pcie4" if family_of(point) == "ampere" else name


def predict(point: CollectivePoint, cluster: Cluster | None = None) -> float:
    """Predicted time (us) on ``cluster``; None: the point's, with the shipped profiles."""
    return (cluster or point.cluster).collective_us(
        point.kind,
        point.size_bytes,
        num_nodes=point.num_nodes,
        ranks_per_node=point.ranks_per_node,
    )


def _with_constants(cluster: Cluster, constants: Mapping[str, float]) -> Cluster:
    """``cluster`` with those of ``constants`` that it has; none gains an NVLink SHARP."""
    own = [
        (name, value)
        for name, value in constants.items()
        if name in cluster.constants
        and not (name == "nvls_efficiency" and cluster.constants[name] == 0)
    ]
    return replace(cluster, overrides=(*cluster.overrides, *own))


def torch_predict(point: CollectivePoint) -> float:
    """torch's in-tree analytical model (us) for the same GPU generation and group size."""
    generation = _GENERATIONS[family_of(point)]
    with patch.object(comm_analysis, "get_gpu_type", return_value=generation):
        time_ms = comm_analysis.estimate_nccl_collective_runtime_impl(
            point.size_bytes, point.num_nodes * point.ranks_per_node, _KINDS[point.kind]
        )
    return max(1e-3, time_ms * 1e3)


class ProfileFit:
    """Constants of some families and fabrics, fitted together to the points that use them."""

    def __init__(self, points: Sequence[CollectivePoint], families: set[str], fabrics: set[str]):
        typical = typical_fabric(points) if fabrics else {}
        start = {f"{f}|{n}": v for f in sorted(families) for n, v in FAMILY_START.items()}
        start |= {f"{f}|{n}": v for f in sorted(fabrics) for n, v in typical.items()}
        concerned = [p for p in points if family_of(p) in families or fabric_of(p) in fabrics]
        self.constants = _fit(concerned, start, _blocks)

    def predict(self, point: CollectivePoint) -> float:
        return _predict_all([point], self.constants, _blocks)[0]


def typical_fabric(points: Sequence[CollectivePoint]) -> dict[str, float]:
    """Constants of one fabric that stands for all; only the plateaus are each fabric's own.

    Where a fabric starts: what its own logs do not tell, other fabrics do.
    """
    across = [p for p in points if fabric_of(p) is not None]
    start = {f"{_TYPICAL}|{n}": v for n, v in FABRIC_START.items() if n != "efficiency"}
    start |= {f"{fabric_of(p)}|efficiency": FABRIC_START["efficiency"] for p in across}
    constants = _fit(across, start, lambda p: (_TYPICAL, fabric_of(p)))
    return FABRIC_START | _of_block(_TYPICAL, constants)


_TYPICAL = "typical"
Blocks = Callable[[CollectivePoint], tuple[str | None, ...]]
"""The blocks, families or fabrics, whose constants a point uses."""


def _blocks(point: CollectivePoint) -> tuple[str | None, ...]:
    return family_of(point), fabric_of(point)


def _fit(
    points: Sequence[CollectivePoint], start: dict[str, float], blocks: Blocks
) -> dict[str, float]:
    """The constants of ``start``, named ``block|name``, that fit ``points``."""
    if not points:
        return start
    return fit_constants(
        lambda constants: _predict_all(points, constants, blocks),
        [p.time_us for p in points],
        start,
        upper={key: SHARES[key.split("|")[1]] for key in start if _is_share(key)},
        weights=[p.weight for p in points],
        # Many constants, few logs: a fabric that one log shows stays near the start.
        prior_weight=0.1,
    )


def _predict_all(
    points: Sequence[CollectivePoint], constants: Mapping[str, float], blocks: Blocks
) -> list[float]:
    clusters: dict[tuple[Cluster, tuple[str | None, ...]], Cluster] = {}
    times: list[float] = []
    for point in points:
        key = point.cluster, blocks(point)
        if key not in clusters:
            own: dict[str, float] = {}
            for block in key[1]:
                own |= _of_block(block, constants)
            clusters[key] = _with_constants(point.cluster, own)
        times.append(predict(point, clusters[key]))
    return times


def _of_block(block: str | None, constants: Mapping[str, float]) -> dict[str, float]:
    prefix = f"{block}|"
    return {k[len(prefix) :]: v for k, v in constants.items() if k.startswith(prefix)}


def _is_share(key: str) -> bool:
    return key.split("|")[1] in SHARES


def leave_one_source_out(points: Sequence[CollectivePoint]) -> dict[CollectivePoint, float]:
    """Predicted time of every point by constants that have not seen its source."""
    folds: dict[str, list[CollectivePoint]] = defaultdict(list)
    for point in points:
        folds[point.held_out_with].append(point)
    predicted: dict[CollectivePoint, float] = {}
    for name, held_out in folds.items():
        known = [p for p in points if p.held_out_with != name]
        families = {family_of(p) for p in held_out}
        fabrics = {f for p in held_out if (f := fabric_of(p)) is not None}
        fit = ProfileFit(known, families, fabrics)
        predicted |= {p: fit.predict(p) for p in held_out}
    return predicted


def error(predicted_us: float, measured_us: float) -> float:
    return math.log(predicted_us / measured_us)


def print_table(
    title: str,
    points: Iterable[T],
    groups: Callable[[T], str],
    columns: dict[str, Callable[[T], float]],
) -> None:
    """Rows of groups; for each column the median absolute error and the bias in per cent."""
    by_group: dict[str, list[T]] = defaultdict(list)
    for point in points:
        by_group[groups(point)].append(point)
    print(f"\n{title}\n{'':44s} {'points':>6s}" + "".join(f" {name:>22s}" for name in columns))
    for group in sorted(by_group):
        cells: list[str] = []
        for column in columns.values():
            errors = [column(point) for point in by_group[group]]
            size = median(abs(e) for e in errors)
            cells.append(f"{100 * size:12.1f} ({100 * median(errors):+7.1f})")
        print(f"{group:44s} {len(by_group[group]):6d}" + " ".join(["", *cells]))


def bench_collectives(shipped_only: bool) -> None:
    points = read_collectives()
    columns: dict[str, Callable[[CollectivePoint], float]] = {}
    if not shipped_only:
        unseen = leave_one_source_out(points)
        columns["unseen source"] = lambda p: error(unseen[p], p.time_us)
    columns["shipped profiles"] = lambda p: error(predict(p), p.time_us)
    columns["torch in-tree"] = lambda p: error(torch_predict(p), p.time_us)

    def nodes(point: CollectivePoint) -> str:
        return "single node" if point.num_nodes == 1 else "multi-node"

    order = {band: i for i, band in enumerate(SIZE_BANDS)}
    print("median |error| (bias), per cent")
    print_table(
        "collectives by size",
        points,
        lambda p: f"{nodes(p)} {order[p.size_band]} {p.size_band}",
        columns,
    )
    print_table("by kind", points, lambda p: f"{nodes(p)} {p.kind}", columns)
    print_table("by GPU", points, lambda p: f"{nodes(p)} {p.gpu}", columns)
    print_table(
        "by fabric", points, lambda p: f"{fabric_of(p) or 'in the node'} {p.size_band}", columns
    )


def bench_own_logs() -> None:
    """What a calibration makes of the very log it was given, whole or every second size of it."""
    logs: dict[tuple[object, ...], list[CollectivePoint]] = defaultdict(list)
    for point in read_collectives():
        placement = point.num_nodes, point.ranks_per_node
        logs[point.source, point.cluster, point.kind, placement].append(point)
    sizes = near = whole = most = can_be_whole = 0
    between: dict[CollectivePoint, float] = {}
    for points in logs.values():
        by_size = _median_by_size(points)
        curve = _calibrated(by_size)
        met = sum(abs(predict(p, curve) / p.time_us - 1) < OWN_LOG for p in by_size)
        possible = most_rising([p.time_us for p in by_size], OWN_LOG)
        sizes, near, most = sizes + len(by_size), near + met, most + possible
        whole += met == len(by_size)
        can_be_whole += possible == len(by_size)
        if len(by_size) >= SPLIT_FROM:
            held_out = by_size[1:-1:2]
            curve = _calibrated([p for p in by_size if p not in held_out])
            between |= {p: predict(p, curve) for p in held_out}
    print_table(
        "calibrated on a log: sizes between those it was given",
        list(between),
        lambda p: p.size_band,
        {"every second size": lambda p: error(between[p], p.time_us)},
    )
    print(
        f"\ncalibrated on a log, its own sizes: {near} of {sizes} within {100 * OWN_LOG:g} % (at "
        f"most {most} can be, as times that do not fall), all sizes of {whole} of {len(logs)} logs "
        f"(at most {can_be_whole})"
    )


OWN_LOG = 0.05
SPLIT_FROM = 6
"""Sizes of a log from which on half of them are held out."""


def _median_by_size(points: Iterable[CollectivePoint]) -> list[CollectivePoint]:
    """One point for each size, rising."""
    times: dict[int, list[CollectivePoint]] = defaultdict(list)
    for point in points:
        times[point.size_bytes].append(point)
    return [
        replace(times[size][0], time_us=median(p.time_us for p in times[size]))
        for size in sorted(times)
    ]


def _calibrated(points: Sequence[CollectivePoint]) -> Cluster:
    return calibrate(
        points[0].cluster,
        [
            CollectiveMeasurement(p.kind, p.size_bytes, p.num_nodes, p.ranks_per_node, p.time_us)
            for p in points
        ],
    )


def most_rising(times: Sequence[float], tolerance: float) -> int:
    """How many of ``times`` a sequence that does not fall can have within ``tolerance`` of it.

    The longest chain in which the top of each, its tolerance included, reaches the bottoms of all
    before it.
    """
    # least[n]: the lowest that a sequence must have come to which is near n + 1 of them
    least: list[float] = []
    for time in times:
        low, high = time * (1 - tolerance), time * (1 + tolerance)
        for count in range(len(least), -1, -1):
            before = least[count - 1] if count else 0.0
            if before <= high:
                reached = max(before, low)
                if count == len(least):
                    least.append(reached)
                else:
                    least[count] = min(least[count], reached)
    return len(least)


def bench_compute() -> None:
    matmuls = read_matmuls()

    def matmul_error(p: MatmulPoint) -> float:
        cluster = Cluster(p.gpu)
        return error(cluster.matmul_us(p.m, p.n, p.k, p.dtype), p.time_us)

    print_table(
        "matmul",
        matmuls,
        lambda p: f"{p.gpu} {p.dtype} {'from' if p.flop >= 1e10 else 'below'} 10 GFLOP",
        {"shipped profiles": matmul_error},
    )

    def attention_error(p: AttentionPoint) -> float:
        predicted = Cluster(p.gpu).attention_us(
            *p.shape,
            p.dtype,
            head_dim_v=p.head_dim_v,
            causal=p.causal,
            backward=p.backward,
            flash2=p.flash2,
        )
        return error(predicted, p.time_us)

    print_table(
        "attention",
        read_attentions(),
        lambda p: " ".join(
            [p.gpu, p.dtype, "backward" if p.backward else "forward", "FA2" if p.flash2 else ""]
        ),
        {"shipped profiles": attention_error},
    )


def print_fit() -> None:
    points = read_collectives()
    families = {family_of(p) for p in points}
    fabrics = {f for p in points if (f := fabric_of(p)) is not None}
    constants = ProfileFit(points, families, fabrics).constants
    for key, value in constants.items():
        block, name = key.split("|")
        print(f"{block:24s} {name} = {value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of the cost model on public measurements")
    parser.add_argument("--shipped", action="store_true", help="shipped profiles only (fast)")
    parser.add_argument("--fit", action="store_true", help="print constants fitted to all rows")
    options = parser.parse_args()
    if options.fit:
        print_fit()
        return
    bench_collectives(options.shipped)
    if not options.shipped:
        bench_own_logs()
    bench_compute()


if __name__ == "__main__":
    main()
