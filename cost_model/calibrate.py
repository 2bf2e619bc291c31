"""Fit a cluster to measurements of its own collectives and kernels.

Two things are learned. The constants of the formulas are moved until they fit (``fit``): that also
improves sizes, kinds and placements that were not measured. And for each measured placement the
times of its collectives are kept as a curve, because a log of the very machine knows what no
formula does.

Noise is not kept (`smooth`): a noisy time is averaged with its neighbours', and as the size grows
neither times fall nor latencies. A plan merges collectives to save latencies, and noise must not
look like one that can be saved. How far the fitted cluster is from its measurements is kept too, as
the error to expect.

Refused (``ValueError``): no measurements, a placement that the cluster cannot hold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.curve import Curve
from inductor_overlap.cost_model.fit import fit_constants
from inductor_overlap.cost_model.measurements import (
    CollectiveMeasurement,
    Measurement,
    plateau_constant,
)
from inductor_overlap.cost_model.smooth import average_neighbours, rising

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
    fitted = replace(fitted, curves=_curves(fitted, collectives))
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


def _curves(cluster: Cluster, measured: Sequence[CollectiveMeasurement]) -> tuple[Curve, ...]:
    """Per kind and placement the median time of each size, without noise.

    ``cluster`` has formulas only: times follow them between sizes, but for what is averaged.
    """
    found: dict[tuple[str, int, int], dict[int, list[CollectiveMeasurement]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for m in measured:
        found[m.kind, m.num_nodes, m.ranks_per_node][m.size_bytes].append(m)
    return tuple(
        _curve(cluster, placement, by_size) for placement, by_size in sorted(found.items())
    )


def _curve(
    cluster: Cluster,
    placement: tuple[str, int, int],
    by_size: Mapping[int, Sequence[CollectiveMeasurement]],
) -> Curve:
    sizes = sorted(by_size)
    same = [by_size[size] for size in sizes]
    formula_us = [each[0].predicted_us(cluster) for each in same]
    noises = [median(m.noise for m in each) for each in same]

    def smooth(times_us: Sequence[float]) -> tuple[float, ...]:
        return rising(sizes, average_neighbours(sizes, times_us, noises, formula_us))

    alone_us = smooth([median(m.time_us for m in each) for each in same])
    busy_us: tuple[float, ...] = ()
    if any(m.link_us is not None for each in same for m in each):
        busy_us = smooth([median(map(_link_us, each)) for each in same])
        busy_us = tuple(map(min, busy_us, alone_us))
    return Curve(*placement, tuple(sizes), alone_us, busy_us)


def _link_us(measured: CollectiveMeasurement) -> float:
    return measured.time_us if measured.link_us is None else measured.link_us
