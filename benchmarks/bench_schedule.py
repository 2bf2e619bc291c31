"""How near the bound each way of ordering collectives comes, on traced models and many networks.

``python benchmarks/bench_schedule.py`` traces models on fake ranks and lets six contenders order
their forward and backward graphs on the same prices: the input order, torch's manual and automatic
passes, and our manual, greedy and auto policies. Nothing is run or measured: steps come from our
simulator, gaps from the lower bound, peaks from a replay of the benchmark's own. Four tables:

* Llama 3 8B, 70B and 405B dimensions, 64 ranks, over bandwidth and latency of the network;
* the same plans with costs that are wrong by up to 30 %: each op on its own (seeded draws), and all
  compute or all communication together;
* Llama 3 8B dimensions on clusters from 8 to 4,096 GPUs, sharded on one and on two mesh dimensions;
* GPT-2 (tied weights), Mixtral and BERT as ``transformers`` writes them.

``--quick`` runs a small part of each, ``--tables`` some of them, ``--blocks 32`` the whole depth of
8B, ``--picture FILE`` adds a sweep of the gap over network speed. CPU time: about fifteen minutes,
``--quick`` one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from link_prices import LinkPrices
from schedule_contenders import CONTENDERS, Result, compete, pose
from schedule_replay import Perturbation
from schedule_table import AUTO, MANUAL, Row, perturbed_table, row_table, summary
from traced_models import ModelCase, TracedCase, bert, gpt2, llama, mixtral, trace_case

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.cluster_prices import ClusterCostModel
from inductor_overlap.cost_model.pricing import PricedCluster, as_full
from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.planner import fake_group

NUM_RANKS = 64
NETWORKS = ((350, 40), (200, 60), (90, 60), (45, 80), (200, 1000))
"""Bus bandwidth (GB/s) and latency (us): NVLink-like, NDR, HDR, slow Ethernet, long latency."""
OTHER_NETWORKS = ((200, 60), (45, 80), (200, 1000))
QUICK_NETWORKS = ((90, 60), (200, 1000))
TOKENS = ((2, 4096), (1, 1024))
SWEEP_GB_PER_S = (25, 35, 50, 70, 100, 140, 200, 280, 400)
SWEEP_US = 60
NUM_DRAWS = 4
TOGETHER = (
    {"communication": 0.7},
    {"communication": 1.3},
    {"compute": 0.7},
    {"compute": 1.3},
)


@dataclass(frozen=True)
class ClusterCase:
    """One cluster and how the model is sharded over it."""

    cluster: Cluster
    mesh_shape: tuple[int, ...]

    @property
    def title(self) -> str:
        shape = " x ".join(map(str, self.mesh_shape))
        return f"{self.cluster.gpu} {self.cluster.network or 'NVLink'}, {shape} ranks"


def cluster_cases() -> list[ClusterCase]:
    """Grouped by mesh, since a model is traced once for each."""
    ndr, hdr, efa = map(Cluster.preset, ("h100-ib", "a100-ib", "h100-efa"))
    ethernet = Cluster(gpu="h100", network="eth-100x1")
    return [
        ClusterCase(Cluster.preset("h100-nvlink"), (8,)),
        *(ClusterCase(cluster, (64,)) for cluster in (ndr, hdr, efa, ethernet)),
        *(ClusterCase(cluster, (8, 8)) for cluster in (ndr, ethernet)),
        *(ClusterCase(cluster, (512,)) for cluster in (ndr, efa)),
        ClusterCase(ndr, (64, 64)),
        ClusterCase(ndr, (512, 8)),
    ]


def main() -> None:
    arguments = _arguments()
    # Graphs of a hundred blocks are deeper than Python's default allows.
    sys.setrecursionlimit(100_000)
    torch.set_num_threads(1)
    begin_s = time.process_time()
    print(
        f"torch {torch.__version__}, {date.today()}, one CPU thread, no GPU; {' '.join(sys.argv)}"
    )
    for name in arguments.tables:
        title, rows_of = TABLES[name]
        rows = list(rows_of(arguments))
        _print(summary(title, rows))
        if any(row.perturbed for row in rows):
            _print(perturbed_table(rows))
    if arguments.picture is not None:
        draw_gaps(list(_sweep_rows()), arguments.picture)
    print(f"{time.process_time() - begin_s:.0f} s of CPU time")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small part of each table")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--blocks", type=int, default=8, help="of the Llama models (default: 8)")
    parser.add_argument("--sizes", nargs="+", default=["8B", "70B", "405B"])
    parser.add_argument("--picture", type=Path, metavar="FILE", help="gap over network speed, PNG")
    return parser.parse_args()


def _grid_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    quick = arguments.quick
    networks = QUICK_NETWORKS if quick else NETWORKS
    with fake_group(NUM_RANKS):
        for batch, seq in TOKENS[-1:] if quick else TOKENS:
            for size in arguments.sizes[:1] if quick else arguments.sizes:
                case = llama(size, 2 if quick else arguments.blocks, batch, seq)
                traced = _traced(case, (NUM_RANKS,))
                for network in networks:
                    prices = LinkPrices(*network)
                    yield from _rows(traced, as_full(prices), repr(prices), perturb=True)


def _cluster_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    quick = arguments.quick
    case = llama("8B", 2 if quick else arguments.blocks, 2, 4096)
    cases = cluster_cases()[:: 5 if quick else 1]
    for mesh_shape, items in groupby(cases, key=lambda item: item.mesh_shape):
        # A graph names the process groups that were there when it was traced.
        with fake_group(math.prod(mesh_shape)):
            traced = _traced(case, mesh_shape)
            for item in items:
                yield from _rows(traced, ClusterCostModel(item.cluster), item.title)


def _other_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    quick = arguments.quick
    cases = (gpt2(1),) if quick else (gpt2(), mixtral(), bert())
    with fake_group(NUM_RANKS):
        for case in cases:
            traced = _traced(case, (NUM_RANKS,))
            for network in QUICK_NETWORKS[:1] if quick else OTHER_NETWORKS:
                prices = LinkPrices(*network)
                yield from _rows(traced, as_full(prices), repr(prices))


TABLES: dict[str, tuple[str, Callable[[argparse.Namespace], Iterator[Row]]]] = {
    "grid": ("Llama 3, 64 ranks", _grid_rows),
    "clusters": ("Llama 3 8B on clusters", _cluster_rows),
    "others": ("other models", _other_rows),
}


def _sweep_rows() -> Iterator[Row]:
    with fake_group(NUM_RANKS):
        traced = _traced(llama("8B", 4, *TOKENS[0]), (NUM_RANKS,))
        for gb_per_s in SWEEP_GB_PER_S:
            prices = LinkPrices(gb_per_s, SWEEP_US)
            yield from _rows(traced, as_full(prices), str(gb_per_s))


def _traced(case: ModelCase, mesh_shape: tuple[int, ...]) -> TracedCase:
    begin_s = time.process_time()
    traced = trace_case(case, mesh_shape)
    sizes = " and ".join(str(len(gm.graph.nodes)) for gm in traced.graphs)
    print(f"[{case.name}: {sizes} nodes, traced in {time.process_time() - begin_s:.0f} s]")
    return traced


def _rows(
    traced: TracedCase, prices: PricedCluster, network: str, *, perturb: bool = False
) -> Iterator[Row]:
    """Forward and backward row of one model on one network, printed as they come."""
    for direction, gm in zip(("forward", "backward"), traced.graphs, strict=True):
        problem = pose(f"{traced.case.name}, {direction}", gm, prices, traced)
        results = {name: compete(name, problem) for name in CONTENDERS}
        row = Row(problem, network, results)
        row.rematches.update(_rematches(row))
        if perturb:
            row.perturbed.update(_perturbed(row))
        _print(row_table(row))
        yield row


def _rematches(row: Row) -> Iterator[tuple[str, Result]]:
    """Auto again, with the memory that those took who beat it beyond the limit."""
    for name, result in row.results.items():
        if row.is_over(name) and row.is_lost_to(name):
            yield name, compete(AUTO, replace(row.problem, limit_bytes=result.peak_bytes))


def _perturbed(row: Row) -> dict[str, list[float]]:
    """Contender -> step with wrong costs over that of torch's manual pass, for each draw."""
    draws = Perturbation.of(row.problem.gm, NUM_DRAWS)
    steps: dict[str, list[float]] = {}
    for name, result in row.results.items():
        wrong = [draw.applied(result.schedule, result.collectives) for draw in draws]
        wrong += [result.schedule.scaled(**factors) for factors in TOGETHER]
        steps[name] = [simulate(schedule).step_us for schedule in wrong]
    reference = steps[MANUAL]
    return {
        name: [step / other for step, other in zip(of, reference, strict=True)]
        for name, of in steps.items()
    }


def draw_gaps(rows: Sequence[Row], path: Path) -> None:
    """Draw the gap of forward plus backward over the network's bandwidth.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4))
    speeds = sorted({float(row.network) for row in rows})
    for name in rows[0].results:
        gaps = [_step_gap([row for row in rows if float(row.network) == s], name) for s in speeds]
        axes.plot(speeds, [100 * gap for gap in gaps], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_xticks(speeds, [f"{speed:g}" for speed in speeds])
    axes.minorticks_off()
    axes.set_xlabel(f"bus bandwidth, GB/s (latency {SWEEP_US} us)")
    axes.set_ylabel("step above the lower bound, %")
    axes.set_title(rows[0].problem.traced.case.name + ", 64 ranks, forward and backward")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _step_gap(rows: Sequence[Row], name: str) -> float:
    bound_us = sum(row.problem.bound_us for row in rows)
    return sum(row.step_us(name) for row in rows) / bound_us - 1.0


def _print(lines: Iterator[str]) -> None:
    print("\n".join(lines), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
