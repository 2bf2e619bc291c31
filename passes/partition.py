"""Which gathers, and which reductions, go into one bucket: partitions for `auto_wrap` to try.

Merging saves a latency on the link and costs copies on the compute queue, so what pays depends on
which of the two is the bottleneck, and that may change along a graph:

* `by_latency` closes a bucket when its bytes take some multiple of a latency: one number that fits
  slow and fast links alike. What is tiny everywhere (norms) shares one bucket of its own.
* `by_deadline` finds, for gathers alone, the boundaries after which compute reaches the end first:
  dynamic programming over what the link and compute have done, without a memory limit.
* `by_room` closes a bucket when its outputs take some share of the memory that is free where they
  are first needed: where little is, a larger one could not start early.
* `pending_together` merges the reductions that wait for the link at the same time.

A partition is a list of groups; groups of one stay single.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter

from inductor_overlap.passes.list_schedule import reductions_together
from inductor_overlap.passes.manual_wrap import make_buckets
from inductor_overlap.passes.plan import Bucket
from inductor_overlap.passes.program import FreeCollective, Program, mergeable_by, mergeable_by_key
from inductor_overlap.passes.reorder import put_on_demand

Group = Sequence[FreeCollective]

_TINY = 0.25
"""A gather is tiny if its bytes take less than this share of a latency."""
_LONGEST_GROUP = 32
"""Members of one bucket that `by_deadline` considers at most."""
_MOST_STATES = 4
"""Ways to have merged the first gathers that `by_deadline` goes on from."""


def to_buckets(groups: Iterable[Group]) -> list[Bucket]:
    """One bucket for each group of two and more."""
    return make_buckets((str(index), c) for index, group in enumerate(groups) for c in group)


def by_latency(program: Program, factor: float) -> list[Group]:
    """Gathers in order of first use; a group's bytes take about ``factor`` latencies.

    A gather that takes as long by itself stays alone; all that are tiny share one group.
    """
    groups: list[Group] = []
    for gathers in _mergeable_gathers(program):
        latency_us = _latency_us(program, gathers)
        tiny = [g for g in gathers if _wire_us(program, g) < _TINY * latency_us]
        if len(tiny) > 1:
            groups.append(tiny)
            pooled = {gather.name for gather in tiny}
            gathers = [gather for gather in gathers if gather.name not in pooled]
        groups += _close_at(program, gathers, factor * latency_us)
    return groups


def _close_at(program: Program, gathers: Group, wire_us: float) -> list[Group]:
    groups: list[Group] = []
    current: list[FreeCollective] = []
    current_us = 0.0
    for gather in gathers:
        own_us = _wire_us(program, gather)
        if current and (own_us >= wire_us or current_us >= wire_us):
            groups.append(current)
            current, current_us = [], 0.0
        current.append(gather)
        current_us += own_us
    return [*groups, current] if current else groups


def by_room(program: Program, share: float, memory_limit_bytes: float) -> list[Group]:
    """Gathers in order of first use; a group's outputs take at most ``share`` of the free memory.

    What is free where the group is first needed and just before, without overlap: the rest is left
    for the groups beside it. Where memory limits overlap, such groups are as large as still can be
    early.
    """
    most_bytes = put_on_demand(program).memory_on_demand.most
    use = program.windows.first_use
    groups: list[Group] = []
    for gathers in _mergeable_gathers(program):
        current: list[FreeCollective] = []
        left_bytes = 0.0
        for gather in gathers:
            if not current or gather.output_bytes > left_bytes:
                groups.append(current)
                current = []
                at = use[gather.name]
                left_bytes = share * (memory_limit_bytes - max(most_bytes[max(0, at - 1) : at + 1]))
            current.append(gather)
            left_bytes -= gather.output_bytes
        groups.append(current)
    return [group for group in groups if group]


# A plain tuple: there are hundreds of thousands of them.
_State = tuple[float, float, int, "_State | None"]
"""After the first gathers: when the link is free, how late compute is, and where the last group
begins, after what."""


def by_deadline(program: Program, longest_us: float = math.inf) -> list[Group]:
    """Gathers in order of first use, cut where compute would end first; see the module.

    Args:
        program: what to cut.
        longest_us: the bytes of a bucket take at most this long.
    """
    groups: list[Group] = []
    for gathers in _mergeable_gathers(program):
        groups += _cut_by_deadline(program, gathers, longest_us)
    return groups


def _cut_by_deadline(program: Program, gathers: Group, longest_us: float) -> list[Group]:
    clock_us, use = program.compute_clock_us, program.windows.first_use
    due_us = [clock_us[use[gather.name]] for gather in gathers]
    wire_us = [_wire_us(program, gather) for gather in gathers]
    latency_us = _latency_us(program, gathers)
    occupied_us = program.schedule.machine.occupied_us
    copy_us = [
        0.0 if gather.unpack_is_fused else program.prices.copy_us(gather.output_bytes)
        for gather in gathers
    ]
    states: list[list[_State]] = [[] for _ in range(len(gathers) + 1)]
    states[0] = [(0.0, 0.0, 0, None)]
    for begin in range(len(gathers)):
        for state in _best_states(states[begin]):
            bytes_us, copies_us = 0.0, 0.0
            for end in range(begin + 1, min(len(gathers), begin + _LONGEST_GROUP) + 1):
                bytes_us += wire_us[end - 1]
                copies_us += copy_us[end - 1]
                if end > begin + 1 and bytes_us > longest_us:
                    break
                takes_us = latency_us + bytes_us
                delay_us = max(state[1], state[0] + takes_us - due_us[begin])
                delay_us += copies_us if end > begin + 1 else 0.0
                link_us = state[0] + occupied_us(takes_us, bytes_us)
                states[end].append((link_us, delay_us, begin, state))
    last = min(states[-1], key=itemgetter(1, 0))
    return _groups_of(gathers, last)


def _best_states(states: list[_State]) -> list[_State]:
    """Those that no other beats both on the link and in compute; of many, some of each kind."""
    best: list[_State] = []
    for state in sorted(states, key=itemgetter(0, 1)):
        if not best or state[1] < best[-1][1]:
            best.append(state)
    if len(best) <= _MOST_STATES:
        return best
    last = len(best) - 1
    return [best[last * kept // (_MOST_STATES - 1)] for kept in range(_MOST_STATES)]


def _groups_of(gathers: Group, last: _State) -> list[Group]:
    cuts = [len(gathers)]
    _, _, begin, before = last
    while before is not None:
        cuts.append(begin)
        _, _, begin, before = before
    return [gathers[begin:end] for end, begin in pairwise(cuts)][::-1]


def pending_together(
    program: Program, bucketed: Program, factor: float, memory_limit_bytes: float
) -> list[Group]:
    """Reductions of ``program`` that wait for their link at the same time.

    Args:
        program: with single reductions.
        bucketed: the same with its gathers merged as they will be.
        factor: a bucket closes before it takes this many latencies.
        memory_limit_bytes: what the order must keep to.
    """
    by_kind = mergeable_by(lambda reduction: reduction.kind, program.reductions)
    longest_us = {kind: factor * _latency_us(program, group) for kind, group in by_kind.items()}
    together = reductions_together(
        bucketed, longest_us=longest_us, memory_limit_bytes=memory_limit_bytes
    )
    return [[program.by_name[c.name] for c in group] for group in together]


def _mergeable_gathers(program: Program) -> list[Group]:
    """Gathers that may share a bucket, by first use; one list for each bucket key."""
    use = program.windows.first_use
    by_key = mergeable_by_key(program.gathers)
    return [sorted(gathers, key=lambda g: use[g.name]) for gathers in by_key.values()]


def _wire_us(program: Program, collective: FreeCollective) -> float:
    return program.schedule.by_name[collective.name].wire_us


def _latency_us(program: Program, collectives: Group) -> float:
    """The median of what is not bytes on the wire."""
    tasks = [program.schedule.by_name[collective.name] for collective in collectives]
    latencies = sorted(task.duration_us - task.wire_us for task in tasks)
    return latencies[len(latencies) // 2] if latencies else 0.0
