"""Choose among plans by simulation: what every ``wrap=`` setting comes to.

A policy proposes; `search` orders each proposal, simulates it and replays its memory; `stages` are
the proposals of `AutoWrap`. What does not fit the limit is dropped, the best of the rest
comes first (`robust_choice`), the unchanged input order last: no plan is worse than it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inductor_overlap.cost_model.simulate import Timeline, simulate
from inductor_overlap.passes.greedy_wrap import GreedyWrap
from inductor_overlap.passes.manual_wrap import ManualWrap
from inductor_overlap.passes.plan import Bucket, Plan
from inductor_overlap.passes.program import Program
from inductor_overlap.passes.robust_choice import robust_choice
from inductor_overlap.passes.search import Proposal, Search, Trial
from inductor_overlap.passes.stages import search_all

INPUT_ORDER = "input order"
_MOST_CHOICES = 6
"""Plans that are worth carrying out if a better one turns out not to hold."""


_WORTH_MEMORY = 1.01
"""How much longer a step may be for staying near the memory that is preferred."""
_EXCESSES = (1.0, 1.01, 1.02, 1.03)
"""Times the preferred memory that plans are held to, while a step is longer than that."""


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
    """Plans worth carrying out, in order of choice, the input last; and why others are not."""

    search: Search
    trials: tuple[Trial, ...]
    unchanged: Choice | None
    refused: tuple[str, ...]

    def choices(self) -> Iterator[Choice]:
        """Each carried over to the whole program only when it is asked for."""
        for trial in self.trials:
            yield _choice(self.search, trial)
        if self.unchanged is not None:
            yield self.unchanged


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
    program: Program,
    policy: Policy,
    *,
    memory_limit_bytes: float,
    preferred_bytes: float = math.inf,
    bound_us: float = 0.0,
    is_part: bool = False,
) -> Ranking:
    """What ``policy`` proposes within the limit, best first, and the input order.

    Args:
        program: to schedule.
        policy: see `parse_wrap`.
        memory_limit_bytes: for live bytes.
        preferred_bytes: a peak to keep to; plans exceed it, as little as they can, only where
            keeping to it costs more than 1 % of the step.
        bound_us: a lower bound of the step; the nearer the best plan, the shorter the search.
        is_part: not all that a manual wrap list names need be in the program.

    Raises:
        MemoryLimitError: Not even the input order fits.
        WrapError: A manual wrap list does not fit the model.
    """
    unchanged = Choice(_plan(INPUT_ORDER, (), program), program, simulate(program.schedule))
    is_coarse = isinstance(policy, AutoWrap)
    search = Search(program, memory_limit_bytes, bound_us, is_coarse)
    _run(search, policy, is_part)
    if unchanged.timeline.peak_bytes > memory_limit_bytes:
        best = robust_choice(search.best())[:_MOST_CHOICES]
        if not best:
            tried = [trial.timeline for trial in search.trials]
            raise _limit_error(memory_limit_bytes, [unchanged.timeline, *tried])
        return Ranking(search, tuple(best), None, ())
    input_us = unchanged.timeline.step_us * (1 - 1e-9)
    best = _with_preferred(search, preferred_bytes, input_us)[:_MOST_CHOICES]
    better = tuple(trial for trial in best if trial.timeline.step_us < input_us)
    refused = () if better else _why_not(search, unchanged.timeline)
    return Ranking(search, better, unchanged, refused)


def _with_preferred(search: Search, preferred_bytes: float, input_us: float) -> list[Trial]:
    """The best trials; in front, of those about as fast, some that keep near the preferred peak.

    ``input_us``: a step that a plan must stay below.
    """
    fastest = search.best()
    best = robust_choice(fastest)
    if not best or best[0].timeline.peak_bytes <= preferred_bytes:
        return best
    near_us = min(input_us, fastest[0].timeline.step_us * _WORTH_MEMORY)
    tight = search
    for excess in _EXCESSES:
        limit_bytes = min(preferred_bytes * excess, search.memory_limit_bytes)
        tight = tight.tightened(limit_bytes, best[0])
        near = [trial for trial in tight.best() if trial.timeline.step_us <= near_us]
        if near:
            front = robust_choice(near)[: _MOST_CHOICES // 2]
            taken = set(map(id, front))
            return [*front, *(trial for trial in best if id(trial) not in taken)]
    return best


def _run(search: Search, policy: Policy, is_part: bool) -> None:
    if isinstance(policy, AutoWrap):
        search_all(search)
    elif isinstance(policy, ManualWrap):
        buckets = policy.buckets(search.program, require_match=not is_part)
        _try_given(search, "manual", buckets)
    elif isinstance(policy, GreedyWrap):
        limit_bytes = search.memory_limit_bytes
        buckets = policy.buckets(search.program, memory_limit_bytes=limit_bytes)
        _try_given(search, "greedy", buckets)


def _try_given(search: Search, kind: str, buckets: Sequence[Bucket]) -> None:
    """Try ``buckets`` in every order, and the best of those in every form."""
    search.try_orders(Proposal(kind, tuple(buckets)))
    for trial in search.best(1):
        search.try_forms(trial)


def _choice(search: Search, trial: Trial) -> Choice:
    buckets, program = search.finish(trial)
    plan = _plan(trial.proposal.label, buckets, program)
    return Choice(plan, program, simulate(program.schedule), trial.notes)


def _why_not(search: Search, unchanged: Timeline) -> tuple[str, ...]:
    """Why nothing is better than the input: of each policy's plans, the one that came nearest."""
    nearest: dict[str, Trial] = {}
    for trial in sorted(search.trials, key=lambda trial: trial.merit):
        nearest.setdefault(trial.proposal.kind, trial)
    named = [trial for trial in nearest.values() if trial.proposal.kind in _NAMED]
    return tuple(_reason(trial, unchanged, search.memory_limit_bytes) for trial in named)


_NAMED = ("single", "blocks", "greedy", "manual")


def _reason(trial: Trial, unchanged: Timeline, limit_bytes: float) -> str:
    label, timeline = trial.proposal.kind, trial.timeline
    if timeline.peak_bytes > limit_bytes:
        return (
            f"plan {label!r} needs {timeline.peak_bytes / 2**30:.4g} GiB, the limit is "
            f"{limit_bytes / 2**30:.4g} GiB: raise memory_limit_gb to use it"
        )
    return (
        f"plan {label!r} takes {timeline.step_us:.1f} us in the model, the input order "
        f"{unchanged.step_us:.1f} us"
    )


def _plan(label: str, buckets: Sequence[Bucket], program: Program) -> Plan:
    tasks = program.schedule.tasks
    order = () if label == INPUT_ORDER else tuple(task.name for task in tasks)
    starts = tuple(task.name for task in tasks if task.kind == "start")
    return Plan(label, tuple(buckets), order, starts)


def _limit_error(limit_bytes: float, timelines: Sequence[Timeline]) -> MemoryLimitError:
    least = min(timeline.peak_bytes for timeline in timelines)
    return MemoryLimitError(
        f"no schedule of this graph fits memory_limit_gb={limit_bytes / 2**30:.6g}; the smallest "
        f"peak found is {least / 2**30:.6g} GiB of live activations, gathered parameters and "
        f"gradients: raise memory_limit_gb to at least {math.ceil(least / 2**30 * 1e6) / 1e6:.6f}"
    )


DEFAULT_HEADROOM = 1.05
"""Default memory limit, relative to the peak of the unscheduled graph."""
