"""Choose among plans by simulation: the portfolio behind every ``wrap=`` setting.

A policy proposes bucketings; each is ordered in several ways, simulated, and its memory replayed.
What does not fit the limit is dropped; the fastest of the rest is proposed first, ties go to the
lower peak. The unchanged input order is always among the candidates, so that no plan is worse than
it. `AutoWrap` proposes no buckets, one bucket per repeated block, and greedy wrapping.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
    """A plan, the program it leads to and how that runs."""

    plan: Plan
    program: Program
    timeline: Timeline


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
) -> list[Choice]:
    """The input order and what ``policy`` proposes, best first; all within the limit.

    Candidates slower than the input order are left out, so it comes last.

    Raises:
        MemoryLimitError: Not even the input order fits.
        WrapError: A manual wrap list does not fit the model.
    """
    unchanged = Choice(_plan(INPUT_ORDER, (), program), program, simulate(program.schedule))
    candidates = list(_candidates(program, policy, memory_limit_bytes, is_backward))
    fitting = [c for c in (unchanged, *candidates) if c.timeline.peak_bytes <= memory_limit_bytes]
    if not fitting:
        raise _limit_error(memory_limit_bytes, [unchanged, *candidates])
    if unchanged not in fitting:
        return sorted(fitting, key=_merit)
    better = [c for c in fitting if c.timeline.step_us < unchanged.timeline.step_us * (1 - 1e-9)]
    return [*sorted(better, key=_merit), unchanged]


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
        bucketed = bucket_program(program, buckets)
        for order_label, order in _orders(limit_bytes):
            choice = _evaluate(f"{label}, {order_label}", buckets, bucketed, order, limit_bytes)
            yield choice


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


def _orders(limit_bytes: float) -> list[tuple[str, _Order]]:
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
    label: str, buckets: Sequence[Bucket], bucketed: Program, order: _Order, limit_bytes: float
) -> Choice:
    """Order, simulate and replay; a proposal above the limit is tried again under a smaller one."""
    allowed = limit_bytes
    best: Choice | None = None
    for _ in range(_SHRINK_ATTEMPTS):
        ordered = bucketed.with_order(order(bucketed, allowed))
        timeline = simulate(ordered.schedule)
        best = Choice(_plan(label, buckets, ordered), ordered, timeline)
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
