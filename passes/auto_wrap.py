"""Choose among plans by simulation: the portfolio behind every ``wrap=`` setting.

A policy proposes bucketings; each is ordered in several ways, simulated, and its memory replayed.
Buckets whose buffers do not fit lose their largest members; what still does not fit the limit is
dropped; the fastest of the rest is proposed first, ties go to the
lower peak. The unchanged input order is always among the candidates, so that no plan is worse than
it. `AutoWrap` proposes no buckets, one bucket per repeated block, and greedy wrapping.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from inductor_overlap.cost_model.memory import buffer_lifetimes
from inductor_overlap.cost_model.simulate import Timeline, simulate
from inductor_overlap.passes.bucket_schedule import bucket_program
from inductor_overlap.passes.greedy_wrap import GreedyWrap
from inductor_overlap.passes.list_schedule import list_schedule
from inductor_overlap.passes.manual_wrap import ManualWrap, make_buckets, name_of
from inductor_overlap.passes.plan import Bucket, Plan
from inductor_overlap.passes.program import FreeCollective, Program
from inductor_overlap.passes.reorder import order_one_ahead

INPUT_ORDER = "input order"
_SHRINK_ATTEMPTS = 4
_MAX_LEFT_OUT = 8


class MemoryLimitError(ValueError):
    """No schedule of the graph fits the memory limit."""


@dataclass(frozen=True)
class AutoWrap:
    """The policy ``wrap="auto"``."""


@dataclass(frozen=True)
class NoWrap:
    """The policy ``wrap="none"``: nothing is merged and nothing moves; the report says what is."""


Policy = AutoWrap | GreedyWrap | ManualWrap | NoWrap


@dataclass(frozen=True)
class Choice:
    """A plan, the program it leads to, how that runs, and what had to be left out of it."""

    plan: Plan
    program: Program
    timeline: Timeline
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ranking:
    """Plans worth carrying out, best first, the input order last; and why others are not."""

    choices: tuple[Choice, ...]
    refused: tuple[str, ...]


def parse_wrap(wrap: object) -> Policy:
    """The policy that ``wrap=`` names.

    Raises:
        ValueError: It is none of "auto", "greedy", "none" or a list of patterns.
    """
    named: dict[object, Policy] = {"auto": AutoWrap(), "greedy": GreedyWrap(), "none": NoWrap()}
    if isinstance(wrap, str):
        if wrap in named:
            return named[wrap]
    elif isinstance(wrap, Sequence):
        return ManualWrap.parse(wrap)  # pyright: ignore[reportUnknownArgumentType]
    raise ValueError(
        f'wrap must be "auto", "greedy", "none" or a list of module FQN patterns such as '
        f'["tok_embeddings", "layers.*", ["norm", "output"]]; got {wrap!r}'
    )


def rank_choices(
    program: Program, policy: Policy, *, memory_limit_bytes: float, is_backward: bool = False
) -> Ranking:
    """The input order and what ``policy`` proposes, best first; all within the limit.

    Raises:
        MemoryLimitError: Not even the input order fits.
        WrapError: A manual wrap list does not fit the model.
    """
    unchanged = Choice(_plan(INPUT_ORDER, (), program), program, simulate(program.schedule))
    candidates = list(_candidates(program, policy, memory_limit_bytes, is_backward))
    fitting = [c for c in candidates if c.timeline.peak_bytes <= memory_limit_bytes]
    if unchanged.timeline.peak_bytes > memory_limit_bytes:
        if not fitting:
            raise _limit_error(memory_limit_bytes, [unchanged, *candidates])
        return Ranking(tuple(sorted(fitting, key=_merit)), ())
    better = [c for c in fitting if c.timeline.step_us < unchanged.timeline.step_us * (1 - 1e-9)]
    refused = (
        () if better else tuple(_why_not(c, unchanged, memory_limit_bytes) for c in candidates)
    )
    return Ranking((*sorted(better, key=_merit), unchanged), refused)


def _why_not(choice: Choice, unchanged: Choice, limit_bytes: float) -> str:
    label, timeline = choice.plan.policy, choice.timeline
    if timeline.peak_bytes > limit_bytes:
        return (
            f"plan {label!r} needs {timeline.peak_bytes / 2**30:.4g} GiB, the limit is "
            f"{limit_bytes / 2**30:.4g} GiB: raise memory_limit_gb to use it"
        )
    return (
        f"plan {label!r} takes {timeline.step_us:.1f} us in the model, the input order "
        f"{unchanged.timeline.step_us:.1f} us"
    )


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


def _candidates(
    program: Program, policy: Policy, limit_bytes: float, is_backward: bool
) -> Iterator[Choice]:
    for label, buckets in _bucketings(program, policy, limit_bytes, is_backward):
        yield from _ordered_within(program, label, _with_new_names(program, buckets), limit_bytes)


def _with_new_names(program: Program, buckets: Sequence[Bucket]) -> list[Bucket]:
    """``buckets`` under names that no task of the program has."""
    taken = program.schedule.by_name
    renamed: list[Bucket] = []
    for bucket in buckets:
        free = (f"{bucket.name}_{i}" for i in count(1) if f"{bucket.name}_{i}" not in taken)
        renamed.append(replace(bucket, name=next(free)) if bucket.name in taken else bucket)
    return renamed


def _ordered_within(
    program: Program, label: str, buckets: list[Bucket], limit_bytes: float
) -> list[Choice]:
    """``buckets`` in every order; while none fits, without what is largest at the peak."""
    notes: list[str] = []
    while True:
        bucketed = bucket_program(program, buckets)
        choices = [
            _evaluate(f"{label}, {name}", buckets, bucketed, order, limit_bytes, tuple(notes))
            for name, order in _orders()
        ]
        least = min(choices, key=lambda choice: choice.timeline.peak_bytes)
        if least.timeline.peak_bytes <= limit_bytes:
            return choices
        largest = _largest_member_at_peak(least)
        if largest is None or len(notes) == _MAX_LEFT_OUT:
            return choices
        buckets = _without(buckets, largest)
        name = name_of(program.by_name[largest]) or largest
        notes.append(f"{name} is left out of its bucket, which would not fit the memory limit")


def _largest_member_at_peak(choice: Choice) -> str | None:
    """The largest member of the largest bucket whose buffers are live at the peak."""
    schedule = choice.program.schedule
    lifetimes = buffer_lifetimes(schedule)
    peak = next(i for i, t in enumerate(schedule.tasks) if t.name == choice.timeline.peak_task)
    live: list[tuple[int, FreeCollective]] = []
    for collective in choice.program.collectives:
        names = [f"{collective.name}.packed", f"{collective.name}.output"]
        spans = [lifetimes[name] for name in names if name in lifetimes]
        if collective.members and any(first <= peak <= last for first, last in spans):
            live.append((collective.size_bytes, collective))
    if not live:
        return None
    members = max(live, key=lambda pair: pair[0])[1].members
    sizes = {member: choice.program.merged_bytes.get(member, 0) for member in members}
    return max(members, key=lambda member: sizes[member])


def _without(buckets: Sequence[Bucket], name: str) -> list[Bucket]:
    """``buckets`` with one member less; a bucket of one is none."""
    rest = [replace(b, members=tuple(m for m in b.members if m != name)) for b in buckets]
    return [bucket for bucket in rest if len(bucket.members) > 1]


def _bucketings(
    program: Program, policy: Policy, limit_bytes: float, is_backward: bool
) -> Iterator[tuple[str, list[Bucket]]]:
    if isinstance(policy, ManualWrap):
        yield "manual", policy.buckets(program, require_match=not is_backward)
    if isinstance(policy, AutoWrap):
        yield "single", []
        yield "blocks", make_buckets(repeated_blocks(program.collectives))
    if isinstance(policy, GreedyWrap | AutoWrap):
        greedy = policy if isinstance(policy, GreedyWrap) else GreedyWrap()
        yield "greedy", greedy.buckets(program, memory_limit_bytes=limit_bytes)


_Order = Callable[[Program, float], list[str]]


def _orders() -> list[tuple[str, _Order]]:
    def eager(program: Program, limit: float) -> list[str]:
        return list_schedule(program, memory_limit_bytes=limit)

    def just_in_time(program: Program, limit: float) -> list[str]:
        window_us = 2.0 * max((_duration(program, g) for g in program.gathers), default=0.0)
        return list_schedule(program, memory_limit_bytes=limit, prefetch_us=window_us)

    def one_ahead(program: Program, limit: float) -> list[str]:
        return order_one_ahead(program)

    return [("early", eager), ("just in time", just_in_time), ("one ahead", one_ahead)]


def _duration(program: Program, collective: FreeCollective) -> float:
    return program.schedule.by_name[collective.name].duration_us


def _evaluate(
    label: str,
    buckets: Sequence[Bucket],
    bucketed: Program,
    order: _Order,
    limit_bytes: float,
    notes: tuple[str, ...],
) -> Choice:
    """Order, simulate and replay; a proposal above the limit is tried again under a smaller one."""
    allowed = limit_bytes
    best: Choice | None = None
    for _ in range(_SHRINK_ATTEMPTS):
        ordered = bucketed.with_order(order(bucketed, allowed))
        timeline = simulate(ordered.schedule)
        best = Choice(_plan(label, buckets, ordered), ordered, timeline, notes)
        excess = timeline.peak_bytes - limit_bytes
        if excess <= 0 or math.isinf(limit_bytes):
            break
        allowed -= excess
    assert best is not None
    return best


def _plan(label: str, buckets: Sequence[Bucket], program: Program) -> Plan:
    tasks = program.schedule.tasks
    order = () if label == INPUT_ORDER else tuple(task.name for task in tasks)
    starts = tuple(task.name for task in tasks if task.kind == "start")
    return Plan(label, tuple(buckets), order, starts)


def _merit(choice: Choice) -> tuple[float, int]:
    return (choice.timeline.step_us, choice.timeline.peak_bytes)


def _limit_error(limit_bytes: float, choices: Sequence[Choice]) -> MemoryLimitError:
    least = min(choice.timeline.peak_bytes for choice in choices)
    return MemoryLimitError(
        f"no schedule of this graph fits memory_limit_gb={limit_bytes / 2**30:.6g}; the smallest "
        f"peak found is {least / 2**30:.6g} GiB of live activations, gathered parameters and "
        f"gradients: raise memory_limit_gb to at least {math.ceil(least / 2**30 * 1e6) / 1e6:.6f}"
    )


DEFAULT_HEADROOM = 1.05
"""Default memory limit, relative to the peak of the unscheduled graph."""
