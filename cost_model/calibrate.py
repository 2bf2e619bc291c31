"""Fit a cluster to measurements of its own collectives and kernels.

Two things are learned. The constants of the formulas are moved until they fit (``fit``): that also
improves sizes, kinds and placements that were not measured. And for each measured placement the
times of its collectives are kept as a curve, because a log of the very machine knows what no
formula does.

Noise is not kept: as the size grows neither times fall nor latencies, what is left of times without
their bytes (`_smooth`). A plan merges collectives to save latencies, and noise must not look like
one that can be saved. How far the fitted cluster is from its measurements is kept with it, as the
error to expect.

Refused (``ValueError``): no measurements, a placement that the cluster cannot hold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.curve import Curve
from inductor_overlap.cost_model.fit import fit_constants
from inductor_overlap.cost_model.measurements import (
    CollectiveMeasurement,
    Measurement,
    plateau_constant,
)

_TOLERANCE = 0.05
"""How far smoothing may move a time: what repeated nccl-tests runs differ by."""
_RATES_OF_A_CPU = {
    "fp32_tflop_per_s": ("tf32_tflop_per_s", "fp16_tflop_per_s", "fp64_tflop_per_s"),
    "bf16_tflop_per_s": ("fp8_tflop_per_s", "int8_tflop_per_s"),
}
"""Rates that are not measured and move with one that is."""


def calibrate(cluster: Cluster, measurements: Iterable[Measurement]) -> Cluster:
    """``cluster`` with constants, curves and errors that fit ``measurements``.

    Raises:
        ValueError: no measurements, or a placement that the cluster cannot hold.
    """
    measured = list(measurements)
    if not measured:
        raise ValueError("nothing was measured: a calibration needs at least one time")
    collectives = [m for m in measured if isinstance(m, CollectiveMeasurement)]
    _check_placements(cluster, collectives)
    fitted = replace(cluster, curves=())
    for part in (collectives, [m for m in measured if m not in collectives]):
        fitted = _fit(fitted, part)
    fitted = replace(fitted, curves=_curves(collectives))
    return replace(fitted, errors=_errors(fitted, measured))


def _fit(cluster: Cluster, measured: Sequence[Measurement]) -> Cluster:
    """``cluster`` with the constants that ``measured`` tell about moved to fit them."""
    if not measured:
        return cluster
    names = dict.fromkeys(name for m in measured for name in m.constants(cluster))
    start = {name: cluster.constants[name] for name in names if cluster.constants[name] > 0}
    start |= _plateaus(cluster, measured)
    constants = fit_constants(
        lambda trial: [m.predicted_us(_with_constants(cluster, trial)) for m in measured],
        [m.time_us for m in measured],
        start,
        upper={name: 1.0 for name in start if name.endswith(("efficiency", "share"))},
    )
    for measured_rate, others in _RATES_OF_A_CPU.items():
        if measured_rate in constants:
            factor = constants[measured_rate] / cluster.constants[measured_rate]
            constants |= {name: factor * cluster.constants[name] for name in others}
    return _with_constants(cluster, constants)


def _plateaus(cluster: Cluster, measured: Sequence[Measurement]) -> dict[str, float]:
    """Bandwidths to start a fit from: those that the largest measured collectives reach.

    A link may be a hundred times slower than its profile says (a rate limit, another network);
    from so far away a fit would not find it.
    """
    start: dict[str, float] = {}
    for across_nodes in (False, True):
        sizes = [
            m
            for m in measured
            if isinstance(m, CollectiveMeasurement) and m.is_across_nodes(cluster) == across_nodes
        ]
        if sizes:
            largest = max(sizes, key=lambda m: (m.size_bytes, m.time_us))
            name = plateau_constant(cluster, across_nodes=across_nodes)
            reached = cluster.constants[name] * largest.predicted_us(cluster) / largest.time_us
            start[name] = min(1.0, reached) if name.endswith("efficiency") else reached
    return start


def _check_placements(cluster: Cluster, measured: Sequence[CollectiveMeasurement]) -> None:
    nodes = max((m.num_nodes for m in measured), default=1)
    if nodes > 1 and cluster.network is None:
        raise ValueError(
            f"collectives over {nodes} nodes were measured, but the cluster is a single node; "
            'name its network, as in Cluster(gpu="h100", network="ib-ndr-400x8")'
        )
    local = max((m.ranks_per_node for m in measured), default=1)
    if local > cluster.gpus_per_node:
        raise ValueError(
            f"{local} ranks on one node were measured, but gpus_per_node={cluster.gpus_per_node}"
        )


def _with_constants(cluster: Cluster, constants: Mapping[str, float]) -> Cluster:
    merged = dict(cluster.overrides) | dict(constants)
    return replace(cluster, overrides=tuple(sorted(merged.items())))


def _errors(cluster: Cluster, measured: Sequence[Measurement]) -> tuple[tuple[str, float], ...]:
    """Median relative distance of predictions from measurements, by what was measured."""
    distances: dict[str, list[float]] = defaultdict(list)
    for m in measured:
        distances[m.what].append(abs(math.log(m.predicted_us(cluster) / m.time_us)))
    return tuple((what, median(each)) for what, each in sorted(distances.items()))


def _curves(measured: Sequence[CollectiveMeasurement]) -> tuple[Curve, ...]:
    """Per kind and placement the median time of each size, without noise."""
    found: dict[tuple[str, int, int], dict[int, list[CollectiveMeasurement]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for m in measured:
        found[m.kind, m.num_nodes, m.ranks_per_node][m.size_bytes].append(m)
    curves: list[Curve] = []
    for placement, by_size in sorted(found.items()):
        sizes = sorted(by_size)
        alone_us = _smooth(sizes, [median(m.time_us for m in by_size[size]) for size in sizes])
        busy_us: tuple[float, ...] = ()
        if any(m.link_us is not None for each in by_size.values() for m in each):
            busy_us = _smooth(sizes, [median(map(_link_us, by_size[size])) for size in sizes])
            busy_us = tuple(map(min, busy_us, alone_us))
        curves.append(Curve(*placement, tuple(sizes), alone_us, busy_us))
    return tuple(curves)


def _link_us(measured: CollectiveMeasurement) -> float:
    return measured.time_us if measured.link_us is None else measured.link_us


def _smooth(sizes: Sequence[int], times_us: Sequence[float]) -> tuple[float, ...]:
    """Times of rising sizes that do not fall, nor do their latencies as far as the times allow.

    A latency is what is left of a time without its bytes at the rate of large sizes; that rate is
    lowered where it would move times further than `_TOLERANCE`: then a step in the times is no
    noise but the collective's own (another algorithm or protocol).
    """
    rising = _with_rising_latencies(sizes, times_us, 0.0)
    rate = _cheapest_us_per_byte(sizes, rising)
    for share in (1.0, 0.75, 0.5, 0.25):
        smooth = _with_rising_latencies(sizes, rising, share * rate)
        if all(abs(a / b - 1) <= _TOLERANCE for a, b in zip(smooth, rising, strict=True)):
            return smooth
    return rising


def _with_rising_latencies(
    sizes: Sequence[int], times_us: Sequence[float], us_per_byte: float
) -> tuple[float, ...]:
    """Times whose excess over ``us_per_byte`` does not fall, as near as can be to ``times_us``.

    Neighbours that fall are given their mean, each weighted by its relative precision (pool
    adjacent violators: the least-squares answer for a rising sequence).
    """
    pools: list[tuple[float, float, int]] = []
    for size, time_us in zip(sizes, times_us, strict=True):
        pool = (time_us - us_per_byte * size, time_us**-2.0, 1)
        while pools and pools[-1][0] > pool[0]:
            pool = _merged(pools.pop(), pool)
        pools.append(pool)
    excess = [excess_us for excess_us, _, count in pools for _ in range(count)]
    return tuple(e + us_per_byte * size for e, size in zip(excess, sizes, strict=True))


def _merged(
    left: tuple[float, float, int], right: tuple[float, float, int]
) -> tuple[float, float, int]:
    weight = left[1] + right[1]
    return (left[0] * left[1] + right[0] * right[1]) / weight, weight, left[2] + right[2]


def _cheapest_us_per_byte(sizes: Sequence[int], times_us: Sequence[float]) -> float:
    """The rate of large sizes: the least slope where bytes are most of the time.

    At most what any size takes with no latency at all; 0 if bytes are never most of the time.
    """
    points = pairwise(zip(sizes, times_us, strict=True))
    slopes = [((b_us - a_us) / (b - a), b, b_us) for (a, a_us), (b, b_us) in points]
    by_bytes = [slope for slope, b, b_us in slopes if slope * b > 0.5 * b_us]
    if not by_bytes:
        return 0.0
    return min(*by_bytes, *(t / size for size, t in zip(sizes, times_us, strict=True)))
