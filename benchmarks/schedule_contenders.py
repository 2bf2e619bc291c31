"""The contenders of the schedule benchmark: six ways to order one traced graph.

Each gets its own copy of the graph and the same prices; the graph it leaves is read and simulated
by our simulator, so that torch's passes pay for the copies that take their buckets apart, as ours
do. Ours are held to the memory limit, torch's keep their own limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.fx as fx
from intree_passes import overlap_automatically, overlap_by_module
from schedule_replay import replay_peak
from traced_models import TracedCase, copy_of

from inductor_overlap.cost_model.lower_bound import lower_bound
from inductor_overlap.cost_model.pricing import PricedCluster
from inductor_overlap.cost_model.schedule import Schedule
from inductor_overlap.cost_model.simulate import Timeline, simulate
from inductor_overlap.optimize import optimize
from inductor_overlap.passes.collectives import Collective
from inductor_overlap.passes.graph_schedule import read_graph
from inductor_overlap.settings import GIB, Wrap

HEADROOM = 1.05
"""The memory limit, relative to the peak of the input order."""


@dataclass(frozen=True)
class Problem:
    """One graph to order.

    Attributes:
        name: model, direction.
        gm: the graph; contenders work on copies.
        prices: what ops cost.
        limit_bytes: peak that ours must keep.
        bound_us: no order takes less.
        traced: the model it was traced from.
    """

    name: str
    gm: fx.GraphModule
    prices: PricedCluster
    limit_bytes: float
    bound_us: float
    traced: TracedCase


@dataclass(frozen=True)
class Result:
    """What one contender made of a problem; ``pass_s`` is CPU time."""

    contender: str
    schedule: Schedule
    collectives: tuple[Collective, ...]
    timeline: Timeline
    peak_bytes: int
    pass_s: float


def pose(name: str, gm: fx.GraphModule, prices: PricedCluster, traced: TracedCase) -> Problem:
    """The problem of ordering ``gm``: its limit is the input's peak and 5 %."""
    program = read_graph(gm.graph, prices).program
    limit_bytes = replay_peak(program.schedule) * HEADROOM
    bound_us = lower_bound(program.for_bound()).step_us
    return Problem(name, gm, prices, limit_bytes, bound_us, traced)


def compete(contender: str, problem: Problem) -> Result:
    """Runs the contender on a copy of the graph.

    Raises:
        KeyError: No such contender.
    """
    gm = copy_of(problem.gm)
    begin_s = time.process_time()
    CONTENDERS[contender](gm, problem)
    pass_s = time.process_time() - begin_s
    left = read_graph(gm.graph, problem.prices)
    schedule = left.program.schedule
    schedule.validate()
    timeline = simulate(schedule)
    return Result(contender, schedule, left.collectives, timeline, replay_peak(schedule), pass_s)


def _input_order(gm: fx.GraphModule, problem: Problem) -> None:
    pass


def _torch_manual(gm: fx.GraphModule, problem: Problem) -> None:
    modules = [e if isinstance(e, str) else list(e) for e in problem.traced.case.modules]
    overlap_by_module(gm, problem.prices, modules)


def _torch_auto(gm: fx.GraphModule, problem: Problem) -> None:
    num_shards = problem.traced.mesh_shape[-1]
    overlap_automatically(gm, problem.prices, num_shards)


def _ours(wrap: Wrap | None) -> Callable[[fx.GraphModule, Problem], None]:
    """Our policy; None: manual, with the model's wrap list."""

    def run(gm: fx.GraphModule, problem: Problem) -> None:
        optimize(
            gm,
            wrap=problem.traced.case.modules if wrap is None else wrap,
            cost_model=problem.prices,
            memory_limit_gb=problem.limit_bytes / GIB,
        )

    return run


CONTENDERS: dict[str, Callable[[fx.GraphModule, Problem], None]] = {
    "input order": _input_order,
    "torch manual": _torch_manual,
    "torch auto": _torch_auto,
    "ours manual": _ours(None),
    "ours greedy": _ours("greedy"),
    "ours auto": _ours("auto"),
}
OURS = ("ours manual", "ours greedy", "ours auto")
