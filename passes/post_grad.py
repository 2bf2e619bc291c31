"""The post-grad pass: graph -> Schedule -> Plan -> graph, verified before it is applied.

`overlap_graph` reads the graph, asks the policy for plans, carries the best one out on a copy,
reads that copy again and simulates it. Only a plan that holds there, faster than the input and
within the memory limit, is carried out on the graph itself; else the next one is tried, and in the
end the graph stays untouched. A second run finds the graph planned and changes nothing.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest

import torch.fx as fx

from inductor_overlap.cost_model.lower_bound import LowerBound, lower_bound
from inductor_overlap.cost_model.pricing import PricedCluster
from inductor_overlap.cost_model.schedule import Schedule
from inductor_overlap.cost_model.simulate import Timeline, simulate
from inductor_overlap.passes.auto_wrap import (
    DEFAULT_HEADROOM,
    INPUT_ORDER,
    Choice,
    MemoryLimitError,
    Policy,
    Ranking,
    rank_choices,
)
from inductor_overlap.passes.bucket_nodes import MergedBucket
from inductor_overlap.passes.bucketing import merge_bucket
from inductor_overlap.passes.collectives import Collective
from inductor_overlap.passes.fx_ops import is_start
from inductor_overlap.passes.graph_schedule import GraphProgram, read_graph, write_order
from inductor_overlap.passes.plan import Plan
from inductor_overlap.passes.storages import is_backward

_PLANNED = "inductor_overlap_planned"


@dataclass(frozen=True)
class Outcome:
    """What the pass found and did: timelines before and after, and the schedule it left."""

    collectives: tuple[Collective, ...]
    schedule_after: Schedule
    before: Timeline
    after: Timeline
    bound: LowerBound
    plan: Plan
    num_collectives_before: int
    num_collectives_after: int
    memory_limit_bytes: float
    moved_nodes: int
    warnings: tuple[str, ...]


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    """Planning makes many small objects and hardly a cycle; looking for cycles took a third of it.

    A collector that was off already stays off.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_garbage_collection()
def overlap_graph(
    graph: fx.Graph,
    prices: PricedCluster,
    policy: Policy,
    *,
    memory_limit_bytes: float | None = None,
    is_part: bool = False,
) -> Outcome:
    """Bucket and reorder the free collectives of a post-grad ``graph``, in place.

    Args:
        graph: post-grad FX graph of one rank.
        prices: what ops and collectives cost.
        policy: see `auto_wrap.parse_wrap`.
        memory_limit_bytes: for live bytes; None: the peak of the input plus 5 %; of plans that
            take about the same time, one is taken that exceeds that peak little.
        is_part: of what a manual wrap list names, some may be in other graphs. Backward graphs,
            in which frozen parameters do not occur, are parts anyhow.

    Raises:
        MemoryLimitError: No schedule fits the limit.
        WrapError: A manual wrap list does not fit the model.
    """
    source = read_graph(graph, prices)
    before = simulate(source.program.schedule)
    bound = lower_bound(source.program.for_bound())
    limit, preferred = memory_limit_bytes, math.inf
    if limit is None:
        limit, preferred = before.peak_bytes * DEFAULT_HEADROOM, before.peak_bytes
    if not source.program.collectives or _is_planned(source):
        notes = _over_limit(source, before, limit)
        return _outcome(source, source, bound, before, before, _no_plan(), 0, limit, notes)
    warnings: list[str] = []
    is_part = is_part or is_backward(graph)
    # A search that ends near the bound has few plans; if none of them holds, a full one may.
    for bound_us in (bound.step_us, 0.0):
        ranking = rank_choices(
            source.program,
            policy,
            memory_limit_bytes=limit,
            preferred_bytes=preferred,
            bound_us=bound_us,
            is_part=is_part,
        )
        warnings = list(ranking.refused)
        held = _first_that_holds(graph, source, prices, ranking, before, limit, warnings)
        if held is not None:
            moved, _ = _carry_out(graph, held.choice, source, held.buckets)
            warnings += held.choice.notes
            plan, final, after = held.choice.plan, held.final, held.after
            return _outcome(source, final, bound, before, after, plan, moved, limit, warnings)
        if not (ranking.trials and ranking.search.is_settled):
            break
    if before.peak_bytes > limit:
        raise MemoryLimitError(
            f"the graph peaks at {before.peak_bytes} bytes, the limit is {limit:.0f}, and "
            f"no plan holds it: {'; '.join(warnings)}; raise memory_limit_gb to "
            f"{math.ceil(before.peak_bytes / 2**30 * 1e6) / 1e6:.6f}, the graph's own peak"
        )
    return _outcome(source, source, bound, before, before, _no_plan(), 0, limit, warnings)


def _over_limit(source: GraphProgram, before: Timeline, limit_bytes: float) -> tuple[str, ...]:
    """A warning if a graph in which nothing can be changed is over the limit."""
    if before.peak_bytes <= limit_bytes:
        return ()
    where = f"the graph peaks at {before.peak_bytes} bytes, the limit is {limit_bytes:.0f}"
    if source.program.collectives:
        raise MemoryLimitError(
            f"{where}, and it has been planned already; plan the original graph, or raise "
            f"memory_limit_gb"
        )
    return (f"{where}, and none of its collectives is free to move",)


@dataclass(frozen=True)
class _Held:
    """A plan that has been rehearsed, and what it made of the copy."""

    choice: Choice
    buckets: tuple[MergedBucket, ...]
    final: GraphProgram
    after: Timeline


def _first_that_holds(
    graph: fx.Graph,
    source: GraphProgram,
    prices: PricedCluster,
    ranking: Ranking,
    before: Timeline,
    limit_bytes: float,
    warnings: list[str],
) -> _Held | None:
    """The best plan that keeps its promise when carried out on a copy of the graph."""
    for choice in ranking.choices():
        if choice.plan.policy == INPUT_ORDER:
            return None
        rehearsal, copies = _copy(graph)
        _, buckets = _carry_out(rehearsal, choice, source.in_copy(copies))
        final = read_graph(rehearsal, prices)
        after = simulate(final.program.schedule)
        reason = _why_refused(after, before, limit_bytes)
        if not reason:
            return _Held(choice, buckets, final, after)
        warnings.append(f"plan {choice.plan.policy!r} refused: {reason}")
    return None


def _no_plan() -> Plan:
    return Plan(INPUT_ORDER)


def _is_planned(source: GraphProgram) -> bool:
    free = [collective for collective in source.collectives if collective.free]
    return all(_PLANNED in collective.start.meta for collective in free)


def _why_refused(result: Timeline, before: Timeline, limit_bytes: float) -> str:
    if result.step_us > before.step_us and before.peak_bytes <= limit_bytes:
        return f"its graph takes {result.step_us:.1f} us, the input {before.step_us:.1f} us"
    if result.peak_bytes > limit_bytes:
        return f"its graph peaks at {result.peak_bytes} bytes, the limit is {limit_bytes:.0f}"
    return ""


def _carry_out(
    graph: fx.Graph,
    choice: Choice,
    source: GraphProgram,
    rehearsed: Sequence[MergedBucket] = (),
) -> tuple[int, tuple[MergedBucket, ...]]:
    """Write the plan into ``graph``; returns how many nodes are new or have moved, and buckets.

    ``rehearsed``: the buckets of the same plan in a copy of ``graph``, if there are any.
    """
    by_name = {collective.name: collective for collective in source.collectives}
    nodes: dict[str, Sequence[fx.Node]] = dict(source.nodes)
    written = 0
    buckets: list[MergedBucket] = []
    for bucket, like in zip_longest(choice.plan.buckets, rehearsed):
        members = [by_name[name] for name in bucket.members]
        merged = merge_bucket(bucket.name, members, like, form=bucket.form)
        for name in bucket.members:
            nodes.pop(name)
        nodes.update(merged.unpack)
        # Nothing packs a coalesced bucket; casts of it go right before the launch.
        pack = () if bucket.form == "packed" else merged.pack
        nodes[f"{bucket.name}.pack"] = merged.pack
        nodes[bucket.name] = (*pack, merged.start, *merged.items)
        nodes[f"{bucket.name}.wait"] = merged.wait
        written += len(merged.pack) + len(merged.wait) + len(merged.items) + 1
        buckets.append(merged)
    written += write_order(graph, nodes, choice.plan.order)
    for node in (node for name in choice.plan.starts for node in nodes[name] if is_start(node)):
        node.meta[_PLANNED] = choice.plan.digest
    return written, tuple(buckets)


def _copy(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of ``graph``, and each node's copy in it."""
    copy = fx.Graph(owning_module=graph.owning_module)
    copies: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, copies)
    copy.output(result)
    return copy, copies


def _outcome(
    source: GraphProgram,
    final: GraphProgram,
    bound: LowerBound,
    before: Timeline,
    after: Timeline,
    plan: Plan,
    moved: int,
    limit_bytes: float,
    warnings: Sequence[str],
) -> Outcome:
    return Outcome(
        collectives=source.collectives,
        schedule_after=final.program.schedule,
        before=before,
        after=after,
        bound=bound,
        plan=plan,
        num_collectives_before=len(source.collectives),
        num_collectives_after=len(final.collectives),
        memory_limit_bytes=limit_bytes if math.isfinite(limit_bytes) else math.inf,
        moved_nodes=moved,
        warnings=tuple(warnings),
    )
