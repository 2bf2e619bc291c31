"""How well a live calibration predicts sizes that it did not measure.

``torchrun --nproc-per-node 2 benchmarks/bench_live_calibration.py`` calibrates the running gloo
group as ``inductor-overlap calibrate live`` does, from sizes that are powers of two, then measures
sizes half-way between them and prints prediction over measurement for every collective.
"""

from __future__ import annotations

import os
import platform
from datetime import date
from statistics import median

import torch
import torch.distributed as dist

from inductor_overlap.cost_model.collective_time import COLLECTIVE_KINDS
from inductor_overlap.cost_model.measure import calibrate_live
from inductor_overlap.cost_model.measure_collectives import measure_collectives

UNSEEN_SIZES = tuple(3 * 2**exponent for exponent in range(9, 25))
"""1.5 KiB to 48 MiB."""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = calibrate_live()
    unseen = measure_collectives(UNSEEN_SIZES, in_flight=cluster.queue_width)
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
            f"median error {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %; "
            f"{within} of {len(errors)} within 20 %"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
