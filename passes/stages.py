"""The stages of ``wrap="auto"``: each proposes around the best trials of the one before.

1. buckets: none, one per repeated block, greedy wrapping;
2. weight gradients of the best of these: how much is deferred (`defer_gradients`), which where
   compute is the bottleneck is most of what can be gained;
3. the partitions of `partition`, each in the forms of the best trial before it;
4. forms: which buckets are coalesced, here and again before the last stage;
5. reductions: how much of what waits for the link together is merged;
6. weight gradients of the best partitions;
7. order: how early gathers start, and on a clock on which communication is slower;
8. a hill climb on the boundaries of the gathers' buckets.

The stages end early once the best trial is near the lower bound (`Search.is_settled`). What bounds
a search are predicted times and counts of what every rank has, never a clock, so that all ranks do
the same. The constants were chosen on Llama graphs from 8B to 405B at 45 to 350 GB/s; none is a
time or a size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from inductor_overlap.passes.bucket_schedule import members_of
from inductor_overlap.passes.defer_gradients import (
    WeightGradient,
    cheapest,
    latest,
    weight_gradients,
)
from inductor_overlap.passes.greedy_wrap import GreedyWrap
from inductor_overlap.passes.manual_wrap import make_buckets, name_of
from inductor_overlap.passes.partition import (
    Group,
    by_deadline,
    by_latency,
    by_room,
    pending_together,
    to_buckets,
)
from inductor_overlap.passes.program import FreeCollective, Program
from inductor_overlap.passes.search import (
    EARLY,
    Order,
    Proposal,
    Search,
    Trial,
    by_kind,
    duration_us,
)

_GATHER_LATENCIES = (4.0, 16.0, 64.0, 256.0)
"""Gather buckets whose bytes take so many latencies."""
_DEADLINE_SHARES = (math.inf, 0.06)
"""Longest gather bucket cut by deadline, as a share of all gathering."""
_ROOM_SHARES = (0.25, 0.35, 0.5, 0.7)
"""Gather buckets that take so much of the memory that is free where they are needed."""
_SLOWER = 1.3
"""Gathers are cut by deadline on a clock with communication this many times as long, too: such
plans lose least when a network turns out slower than its price."""
_FIRST_MERGE = 16.0
_MERGES = (0.0, 64.0, math.inf)
"""Reduction buckets that take up to so many latencies."""
_DEFERRED = (0.5, 1.0, 2.0, 4.0, math.inf)
"""Deferred compute, in multiples of the longest reduction."""
_SLOWER_ORDERS = (
    Order("early, slower network", communication=1.15),
    Order("early, much slower network", communication=1.3),
)
_CLIMBED_TASKS = 20_000
_MOST_CLIMBS = 24
"""Tries of the hill climb: as many as go into this number of tasks, and no more than the second."""


def search_all(search: Search) -> None:
    """Run the stages on ``search`` until it is settled."""
    for _ in _stages(search):
        if search.is_settled:
            return


_Pick = Callable[[list[WeightGradient], float], list[WeightGradient]]
"""Which of the gradients to defer, by an amount of compute (us)."""
# What follows generates None after each proposal that was tried.
_Stage = Generator[None]
_Tries = Generator[None, None, list[Trial]]


def _stages(search: Search) -> _Stage:
    yield from _try_named(search)
    if search.program.reductions:
        yield from _try_deferral(search, 1, (latest,))
    yield from _try_partitions(search)
    yield from _try_forms(search, 2)
    if search.program.reductions:
        yield from _try_merges(search)
        yield from _try_deferral(search, 2, (latest, cheapest))
        for trial in search.best(1):
            yield from _try_merged(search, trial.proposal, (_FIRST_MERGE, *_MERGES))
    yield from _try_orders(search)
    yield from _try_forms(search, 1)
    yield from _climb(search)


def _try_forms(search: Search, number: int) -> _Stage:
    """Try the best trials with their buckets in other forms."""
    for trial in search.best(number):
        search.try_forms(trial)
        yield


def repeated_blocks(collectives: Sequence[FreeCollective]) -> list[tuple[str, FreeCollective]]:
    """Each named collective with its block: its path up to the first number, else its top name."""
    keyed: list[tuple[str, FreeCollective]] = []
    for collective in collectives:
        name = name_of(collective)
        if name is None:
            continue
        block = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
        keyed.append((block.group() if block else name.split(".")[0], collective))
    return keyed


def _try_named(search: Search) -> _Stage:
    program = search.coarse.program
    search.try_orders(Proposal("single"))
    yield
    blocks = make_buckets(repeated_blocks(program.collectives))
    search.try_orders(Proposal("blocks", tuple(blocks)))
    yield
    greedy = GreedyWrap().buckets(program, memory_limit_bytes=search.memory_limit_bytes)
    search.try_orders(Proposal("greedy", tuple(greedy)))
    yield
    yield from _try_forms(search, 1)


def _try_partitions(search: Search) -> _Stage:
    program = search.coarse.program
    yield from _try_gathers(search, "single gathers", [])
    yield from _try_gathers(search, "tiny gathers together", by_latency(program, 0.0))
    for factor in _GATHER_LATENCIES:
        groups = by_latency(program, factor)
        fits = yield from _try_gathers(search, f"gathers of {factor:g} latencies", groups)
        if not fits:
            break  # larger buckets take more memory
    if not math.isinf(search.memory_limit_bytes):
        for share in _ROOM_SHARES:
            groups = by_room(program, share, search.memory_limit_bytes)
            yield from _try_gathers(search, f"gathers of {share:g} of the room", groups)
    for label, groups in _cuts_by_deadline(program):
        yield from _try_gathers(search, label, groups)


def _try_gathers(search: Search, label: str, groups: list[Group]) -> Generator[None, None, bool]:
    """Try one partition of the gathers, in the forms of the best trial so far.

    False if what came of it is over the limit.
    """
    proposal = Proposal(label, tuple(to_buckets(groups)))
    for best in search.best(1):
        proposal = replace(proposal, forms=best.proposal.forms)
    trials = yield from _try_merged(search, proposal, (_FIRST_MERGE,))
    return any(map(search.fits, trials))


def _cuts_by_deadline(program: Program) -> Iterator[tuple[str, list[Group]]]:
    all_us = sum(duration_us(program, gather) for gather in program.gathers)
    for share in _DEADLINE_SHARES:
        yield f"gathers by deadline, at most {share:g}", by_deadline(program, share * all_us)
    slower = replace(program, schedule=program.schedule.scaled(communication=_SLOWER))
    yield "gathers by deadline, slower network", by_deadline(slower)


def _try_merges(search: Search) -> _Stage:
    for trial in _undeferred(search, 2):
        yield from _try_merged(search, trial.proposal, _MERGES)


def _try_merged(search: Search, proposal: Proposal, factors: Sequence[float]) -> _Tries:
    """Try ``proposal`` with what is pending together merged, up to so many latencies each.

    Gathers start early; where memory or the network are tight, other orders are better, so that of
    the best plan so far is tried too.
    """
    gathers, _ = by_kind(search.program, proposal.buckets)
    orders = dict.fromkeys((EARLY, *(trial.proposal.order for trial in search.best(1))))
    proposal = replace(proposal, buckets=gathers)
    if not search.program.reductions:
        return (yield from _try_each(search, proposal, orders))
    bucketed = search.bucketed(proposal)
    trials: list[Trial] = []
    for factor in factors:
        groups: list[Group] = []
        if factor > 0.0:
            groups = pending_together(search.program, bucketed, factor, search.memory_limit_bytes)
        pending = [replace(bucket, name=f"{bucket.name}_pending") for bucket in to_buckets(groups)]
        kind = f"{_without_merge(proposal.kind)}; reductions of {factor:g} latencies"
        merged = replace(proposal, kind=kind, buckets=(*gathers, *pending))
        trials += yield from _try_each(search, merged, orders)
    return trials


def _try_each(search: Search, proposal: Proposal, orders: Iterable[Order]) -> _Tries:
    trials: list[Trial] = []
    for order in orders:
        trials.append(search.try_one(replace(proposal, order=order)))
        yield
    return trials


def _without_merge(kind: str) -> str:
    return kind.partition("; reductions")[0]


def _try_deferral(search: Search, number: int, picks: Sequence[_Pick]) -> _Stage:
    gradients = weight_gradients(search.coarse.program)
    if not gradients:
        return
    longest_us = max(duration_us(search.program, r) for r in search.program.reductions)
    for trial in _undeferred(search, number):
        for pick in picks:
            best_us = trial.timeline.step_us
            for amount in _DEFERRED:
                deferred = tuple(pick(gradients, amount * longest_us))
                if not deferred:
                    continue
                trials = yield from _try_deferred(search, trial.proposal, deferred)
                step_us = min(map(search.step_us, trials))
                if step_us > best_us:
                    break
                best_us = step_us


def _undeferred(search: Search, number: int) -> list[Trial]:
    """The best trials in which every gradient is where it was."""
    return [trial for trial in search.best() if not trial.proposal.deferred][:number]


def _try_deferred(
    search: Search, proposal: Proposal, deferred: tuple[WeightGradient, ...]
) -> _Tries:
    kind = f"{_without_merge(proposal.kind)}, {len(deferred)} gradients deferred"
    merged = replace(proposal, kind=kind, deferred=deferred)
    return (yield from _try_merged(search, merged, (_FIRST_MERGE,)))


def _try_orders(search: Search) -> _Stage:
    for trial in search.best(2):
        yield from _try_each(search, trial.proposal, (*search.orders(), *_SLOWER_ORDERS))


def _climb(search: Search) -> _Stage:
    """Move boundaries of gather buckets, at the longest stall first, while that pays."""
    for best in search.best(1):
        left = min(_MOST_CLIMBS, _CLIMBED_TASKS // max(1, search.num_tasks))
        while left > 0:
            tried = yield from _first_better(search, best, left)
            left -= tried
            if search.best(1)[0] is best:
                return
            best = search.best(1)[0]


def _first_better(search: Search, best: Trial, tries: int) -> Generator[None, None, int]:
    """Try neighbours of ``best`` until one is better; returns how many were tried."""
    _, reductions = by_kind(search.program, best.proposal.buckets)
    tried = 0
    for groups in islice(_neighbours(_gather_groups(search, best)), tries):
        buckets = (*to_buckets(groups), *reductions)
        search.try_one(replace(best.proposal, buckets=buckets, is_moved=True))
        yield
        tried += 1
        if search.trials[-1].merit < best.merit and search.best(1)[0] is not best:
            break
    return tried


def _gather_groups(search: Search, trial: Trial) -> list[tuple[Group, float]]:
    """Gather buckets and single gathers in order of first use, with the stall of each."""
    program = search.program
    use = search.bucketed(Proposal("", deferred=trial.proposal.deferred)).windows.first_use
    buckets, _ = by_kind(program, trial.proposal.buckets)
    merged = {name for bucket in buckets for name in bucket.members}
    named: list[tuple[str, list[FreeCollective]]] = [
        (bucket.name, members_of(program, bucket)) for bucket in buckets
    ]
    named += [(g.name, [g]) for g in program.gathers if g.can_merge and g.name not in merged]
    for _, group in named:
        group.sort(key=lambda gather: use[gather.name])
    named.sort(key=lambda pair: use[pair[1][0].name])
    stalls = trial.timeline.exposed_by
    return [(group, stalls.get(name, 0.0)) for name, group in named]


def _neighbours(stalled: Sequence[tuple[Group, float]]) -> Iterator[list[Group]]:
    """Partitions that differ in one boundary, next to the groups that stall compute longest."""
    groups = [group for group, _ in stalled]
    for index in sorted(range(len(groups)), key=lambda i: (-stalled[i][1], i)):
        group = groups[index]
        for cut in dict.fromkeys((1, len(group) // 2, len(group) - 1)):
            if 0 < cut < len(group):
                yield [*groups[:index], group[:cut], group[cut:], *groups[index + 1 :]]
        for first in (index - 1, index):
            yield from _across(groups, first)


def _across(groups: Sequence[Group], first: int) -> Iterator[list[Group]]:
    """The boundary behind group ``first`` removed, or moved by one member."""
    if not 0 <= first < len(groups) - 1:
        return
    left, right = list(groups[first]), list(groups[first + 1])
    if left[0].bucket_key != right[0].bucket_key:
        return
    for cut in dict.fromkeys((0, len(left) - 1, len(left) + 1)):
        joined = [*left, *right]
        parts = [part for part in (joined[:cut], joined[cut:]) if part]
        if cut != len(left):
            yield [*groups[:first], *parts, *groups[first + 2 :]]
