"""How well a live calibration predicts sizes that it did not measure.

``torchrun --nproc-per-node 2 benchmarks/bench_live_calibration.py`` calibrates the running gloo
group as ``inductor-overlap calibrate live`` does, from two sizes an octave, and prints prediction
over measurement for sizes between them. These are measured before and after, and their mean counts:
a machine that slows down or speeds up is no error of a prediction. The ranks keep the memory that
they free: glibc by default returns it to the kernel by rules that depend on what was allocated
before, and touching it anew takes as long as moving it does here.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import replace
from datetime import date
from statistics import median, quantiles

import torch
import torch.distributed as dist

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.collective_time import COLLECTIVE_KINDS
from inductor_overlap.cost_model.measure import calibrate_live
from inductor_overlap.cost_model.measure_collectives import (
    BUDGET_S,
    ROUNDS,
    measure_collectives,
)
from inductor_overlap.cost_model.measurements import CollectiveMeasurement

UNSEEN_SIZES = tuple(3 * 2**exponent for exponent in range(9, 25))
"""1.5 KiB to 48 MiB."""
UNSEEN_ROUNDS = 3 * ROUNDS
"""What is compared with has no neighbours that make up for its noise."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's mallopt, from malloc.h."""


def main() -> None:
    torch.set_num_threads(1)
    _keep_memory()
    dist.init_process_group("gloo")
    before = _measure_unseen()
    cluster = calibrate_live()
    after = _measure_unseen()
    unseen = [
        replace(a, time_us=(a.time_us + b.time_us) / 2) for a, b in zip(before, after, strict=True)
    ]
    errors: list[float] = []
    lines: list[str] = []
    for kind in COLLECTIVE_KINDS:
        cells: list[str] = []
        for one in (one for one in unseen if one.kind == kind):
            ratio = one.predicted_us(cluster) / one.time_us
            errors.append(abs(ratio - 1))
            cells.append(f"{ratio:6.2f}")
        lines.append(f"{kind:<15}{' '.join(cells)}")
    if dist.get_rank() == 0:
        cores = len(os.sched_getaffinity(0))
        print(
            f"{dist.get_world_size()} gloo ranks, torch {torch.__version__}, {date.today()}, "
            f"{cores} cores, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}"
        )
        print("predicted / measured at sizes not measured, 1.5 KiB to 48 MiB in steps of 2")
        print("\n".join(lines))
        within = sum(error <= 0.2 for error in errors)
        print(
            f"median error {100 * median(errors):.1f} %, 90th percentile "
            f"{100 * quantiles(errors, n=10)[-1]:.1f} %, worst {100 * max(errors):.1f} %; "
            f"{within} of {len(errors)} within 20 %"
        )
    dist.destroy_process_group()


def _measure_unseen() -> list[CollectiveMeasurement]:
    """As a calibration measures: how long one takes depends on what was in flight before it."""
    width = Cluster.detect().queue_width
    return measure_collectives(
        UNSEEN_SIZES, budget_s=BUDGET_S, rounds=UNSEEN_ROUNDS, in_flight=width
    )


def _keep_memory() -> None:
    """Has glibc keep what is freed, however large; another C library is left as it is.

    Of one arena: those of gloo's threads give a heap back when it is empty, whatever is set.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


if __name__ == "__main__":
    main()
