"""How far from the truth predicted times are expected to be.

Errors are relative: 0.1 is 10 %, the median of its kind. Those of the profiles are in
``profiles/errors.toml``, from predictions for machines that were not fitted; a calibration replaces
them by the residuals of its own fit (`Cluster.errors`). What was never compared with a measurement
has an assumed error, and that is said.

Prices of one graph are off in the same direction rather than at random (a link is slower than its
profile says for all collectives alike), so the error of a sum is the mean error weighted by time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inductor_overlap.cost_model.profile_tables import read_table

PricedCollective = tuple[str, int, Sequence[int]]
"""Kind, nccl-tests size and global ranks of a collective."""
SMALL_BYTES = 1e6
"""Below this size times are latencies, which differ from site to site."""
LARGE_BYTES = 32e6


@dataclass(frozen=True, slots=True)
class PriceErrors:
    """What is known about the prices of one graph.

    Attributes:
        prices: where they are from: the cluster's name, or the user's cost model.
        collectives: relative error of communication time; None if nothing is known.
        compute: the same of compute time.
        num_rough: collectives below 1 MB that no calibration covers.
        assumptions: how collectives disturb compute and each other, and what stands in for what
            was not given, one phrase each.
    """

    prices: str
    collectives: float | None = None
    compute: float | None = None
    num_rough: int = 0
    assumptions: tuple[str, ...] = ()


def collective_error(
    size_bytes: float, num_nodes: int, gpu: str, fabric: str | None, measured: float | None
) -> float:
    """Relative error of one collective's time.

    Args:
        size_bytes: nccl-tests size.
        num_nodes: nodes of its group.
        gpu: device, as profiles name it.
        fabric: fabric between nodes, as profiles name it; None on one node.
        measured: residual of the calibration that covers it; None if there is none.
    """
    errors = read_table("errors")
    if measured is not None:
        # Between two sizes of a curve, however well the curve fits at the sizes themselves.
        return max(measured, float(errors["calibrated"]["any_size"]))
    by_size = errors["single_node" if num_nodes == 1 else "multi_node"]
    error = float(by_size[_size_band(size_bytes)])
    assumed = errors["assumed"]
    known = gpu in assumed["gpus"] or (num_nodes > 1 and fabric in assumed["fabrics"])
    return max(error, float(assumed["error"])) if known else error


def _size_band(size_bytes: float) -> str:
    if size_bytes < SMALL_BYTES:
        return "below_1_mb"
    return "from_1_mb_to_32_mb" if size_bytes < LARGE_BYTES else "from_32_mb"


def compute_error(what: str, gpu: str, measured: Mapping[str, float]) -> float:
    """Relative error of a kernel's time.

    Args:
        what: "matmul", "matmul_fp8", "matmul_int8", "attention", "attention_backward" or "memory".
        gpu: device, as profiles name it.
        measured: residuals of a calibration by what was measured; empty if there is none.
    """
    told = measured.get(what, measured.get(what.split("_")[0]))
    if told is not None:
        return told
    errors: dict[str, Any] = read_table("errors")
    error = float(errors["compute"][what])
    assumed = errors["assumed"]
    return max(error, float(assumed["error"])) if gpu in assumed["gpus"] else error


def measured_kinds() -> frozenset[str]:
    """What a calibration may know the error of: "collective", and the kinds of kernels."""
    return frozenset({"collective", *read_table("errors")["compute"]})


def weighted(errors: Iterable[tuple[float, float]]) -> float | None:
    """Mean of (time, error) pairs by time; None if nothing takes time."""
    pairs = list(errors)
    total_us = sum(time_us for time_us, _ in pairs)
    if total_us <= 0.0:
        return None
    return sum(time_us * error for time_us, error in pairs) / total_us
