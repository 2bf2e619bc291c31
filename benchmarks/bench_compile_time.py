"""How long planning takes: our pass, torch's automatic pass, and a whole ``torch.compile``.

``python benchmarks/bench_compile_time.py`` prints CPU seconds (``time.process_time``, one thread)
for Llama 3 8B dimensions, 64 fake ranks, batch 2 x 4096, forward and backward graph together:

* our auto pass as Inductor's hook runs it (search, rehearsal on a copy, bound, report) and torch's
  automatic pass on the same graphs and prices, over the number of blocks, and the exponent of a
  power law fitted to them (least squares in logarithms);
* of a whole ``torch.compile`` of a small model with two blocks, C++ kernels included, the share of
  our passes (post-grad and scheduler).

``--largest`` adds our pass on 405B dimensions with 126 blocks; tracing that takes minutes.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from statistics import linear_regression
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
from intree_passes import overlap_automatically
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from traced_models import copy_of, llama, trace_case

from inductor_overlap import inductor_passes, plugin
from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.cluster_prices import ClusterCostModel
from inductor_overlap.models.llama3 import Llama3, Llama3Config
from inductor_overlap.optimize import overlap_and_report
from inductor_overlap.planner import fake_group
from inductor_overlap.settings import Settings
from inductor_overlap.simple_fsdp import simple_fsdp

NUM_RANKS = 64
CLUSTER = "h100-ib"
BLOCKS = (2, 8, 16, 32)
LARGEST = ("405B", 126)
BATCH, SEQ = 2, 4096
SMALL = Llama3Config(num_layers=2, max_seq=32)


def main() -> None:
    arguments = _arguments()
    # Graphs of a hundred blocks are deeper than Python's default allows.
    sys.setrecursionlimit(100_000)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {date.today()}, one CPU thread; {' '.join(sys.argv)}")
    print(f"{'blocks':>12}{'nodes':>8}{'trace s':>9}{'ours s':>9}{'torch s':>9}{'ratio':>7}")
    with fake_group(NUM_RANKS):
        points = [_measure("8B", blocks, with_torch=True) for blocks in arguments.blocks]
        if len(points) > 1:
            for column, name in enumerate(("ours", "torch's automatic pass")):
                seconds = [point[column] for point in points]
                print(f"{name}: blocks to the power of {exponent(arguments.blocks, seconds):.2f}")
        if arguments.largest:
            _measure(*LARGEST, with_torch=False)
        print(whole_compile())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS), metavar="N")
    parser.add_argument("--largest", action="store_true", help="405B dimensions, 126 blocks")
    return parser.parse_args()


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent p of the power law ``seconds = c * sizes ** p`` that fits best."""
    return linear_regression([math.log(n) for n in sizes], [math.log(s) for s in seconds]).slope


def _measure(size: str, num_blocks: int, *, with_torch: bool) -> tuple[float, float]:
    """CPU seconds of our pass and of torch's on one model; prints a line."""
    begin_s = time.process_time()
    graphs = trace_case(llama(size, num_blocks, BATCH, SEQ), (NUM_RANKS,)).graphs
    trace_s = time.process_time() - begin_s
    prices = ClusterCostModel(Cluster.preset(CLUSTER))

    def ours(gm: fx.GraphModule) -> None:
        overlap_and_report(gm.graph, Settings(cost_model=prices))

    def torchs(gm: fx.GraphModule) -> None:
        overlap_automatically(gm, prices, NUM_RANKS)

    ours_s = sum(_seconds(ours, gm) for gm in graphs)
    torch_s = sum(_seconds(torchs, gm) for gm in graphs) if with_torch else math.nan
    nodes = sum(len(gm.graph.nodes) for gm in graphs)
    print(
        f"{size + ' ' + str(num_blocks):>12}{nodes:>8}{trace_s:>9.1f}{ours_s:>9.2f}{torch_s:>9.2f}"
        f"{ours_s / torch_s:>7.2f}",
        flush=True,
    )
    return ours_s, torch_s


def _seconds(run: Callable[[fx.GraphModule], None], gm: fx.GraphModule) -> float:
    copy = copy_of(gm)
    begin_s = time.process_time()
    run(copy)
    return time.process_time() - begin_s


def whole_compile() -> str:
    """What our passes take of the first step of a compiled model, in words."""
    spent: list[float] = []
    # One thread: compilers are then this process's own children, and their time is known.
    chosen = {**plugin.options(cluster=CLUSTER), "fx_graph_cache": False, "compile_threads": 1}
    timed = _timed("overlap_and_report", spent), _timed("overlap_snodes", spent)
    with timed[0], timed[1], fresh_cache():
        begin_s = _cpu_s()
        model = simple_fsdp(Llama3(SMALL), init_device_mesh("cpu", (NUM_RANKS,)))
        compiled = torch.compile(model, options=chosen, fullgraph=True, dynamic=False)
        torch.autograd.backward(compiled(torch.zeros(2, 32, dtype=torch.long)).sum())
        total_s = _cpu_s() - begin_s
    return (
        f"torch.compile of {SMALL.num_layers} small blocks, first step: {total_s:.1f} s, of which "
        f"our passes {sum(spent):.2f} s ({100 * sum(spent) / total_s:.1f} %)"
    )


@contextmanager
def _timed(name: str, spent: list[float]) -> Iterator[None]:
    """Adds the CPU seconds of calls of ``inductor_passes.name`` to ``spent``."""
    original: Callable[..., Any] = getattr(inductor_passes, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            spent.append(time.process_time() - begin_s)

    with patch.object(inductor_passes, name, timed):
        yield


def _cpu_s() -> float:
    """CPU seconds of this process and of the compilers it has started."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
