"""Try proposals: defer, bucket, order, simulate, replay memory; keep what was tried.

A `Proposal` says what to merge, in which form, what to defer and how to order; a `Trial` what came
of it on the coarse program (`coarsen`), on which a try costs a fraction. `Search.finish` carries a
trial over to the whole program. Proposals over the memory limit are ordered again under a smaller
one, and lose the largest member of the largest bucket at their peak while none of their orders
fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count
from typing import get_args

from inductor_overlap.cost_model.memory import buffer_lifetimes
from inductor_overlap.cost_model.schedule import Schedule
from inductor_overlap.cost_model.simulate import Timeline, simulate
from inductor_overlap.passes.bucket_form import Forms, with_forms
from inductor_overlap.passes.bucket_schedule import bucket_program
from inductor_overlap.passes.coarsen import CoarseProgram, coarsen
from inductor_overlap.passes.defer_gradients import WeightGradient, defer_gradients
from inductor_overlap.passes.list_schedule import list_schedule
from inductor_overlap.passes.manual_wrap import name_of
from inductor_overlap.passes.plan import Bucket
from inductor_overlap.passes.program import FreeCollective, Program
from inductor_overlap.passes.reorder import order_one_ahead

_SHRINK_ATTEMPTS = 4
_MAX_LEFT_OUT = 8
_KEPT_PROGRAMS = 4
"""Programs with buckets that are kept for the next try: neighbours in a stage share them."""
_KEPT_FORMS = 32
"""Sets of buckets whose forms are kept, likewise."""
_TASKS_OF_GAP = 1_250_000
"""Tasks that are worth ordering for a whole step to be gained: 12,500 for a gap of 1 %, counted
once for each trial."""


@dataclass(frozen=True)
class Order:
    """How the list scheduler runs.

    Attributes:
        label: for the plan's name.
        window: a gather starts at most this many times the longest gather before it must.
        communication: the scheduler plans with collectives this many times as long.
        reductions_first: a pending reduction always goes before the next gather.
        one_ahead: prefetch distance of one instead.
    """

    label: str
    window: float = math.inf
    communication: float = 1.0
    reductions_first: bool = False
    one_ahead: bool = False

    def write(self, program: Program, memory_limit_bytes: float) -> list[str]:
        if self.one_ahead:
            return order_one_ahead(program)
        slower = program
        if self.communication != 1.0:
            schedule = program.schedule.scaled(communication=self.communication)
            slower = replace(program, schedule=schedule)
        longest_us = max((duration_us(slower, g) for g in program.gathers), default=0.0)
        return list_schedule(
            slower,
            memory_limit_bytes=memory_limit_bytes,
            prefetch_us=self.window * longest_us if longest_us else math.inf,
            reductions_first=self.reductions_first,
        )


EARLY = Order("early")
JUST_IN_TIME = Order("just in time", window=2.0)
REDUCTIONS_FIRST = Order("reductions first", reductions_first=True)
ONE_AHEAD = Order("one ahead", one_ahead=True)


@dataclass(frozen=True)
class Proposal:
    """What to try: buckets, how their forms are chosen, deferred gradients and an order.

    ``kind``: how it was made; ``is_moved``: its buckets were then changed by the hill climb.
    """

    kind: str
    buckets: tuple[Bucket, ...] = ()
    forms: Forms = "packed"
    deferred: tuple[WeightGradient, ...] = ()
    order: Order = EARLY
    is_moved: bool = False

    @property
    def label(self) -> str:
        return f"{self.kind}{', moved' if self.is_moved else ''}, {self.order.label}"


@dataclass(frozen=True)
class Trial:
    """What a proposal led to on the coarse program.

    ``notes``: what had to be left out of their buckets.
    """

    proposal: Proposal
    schedule: Schedule
    timeline: Timeline
    notes: tuple[str, ...] = ()

    @property
    def merit(self) -> tuple[float, int]:
        return (self.timeline.step_us, self.timeline.peak_bytes)


@dataclass
class Search:
    """All trials on one program under one memory limit.

    ``bound_us``: no step of the program is shorter. ``is_coarse``: on the coarse program; worth it
    for many trials, since orders are a little better on the whole one where memory is tight.
    """

    program: Program
    memory_limit_bytes: float
    bound_us: float = 0.0
    is_coarse: bool = True
    trials: list[Trial] = field(default_factory=list[Trial])

    def __post_init__(self) -> None:
        whole = CoarseProgram(self.program, {})
        self.coarse: CoarseProgram = coarsen(self.program) if self.is_coarse else whole
        # Not the tasks of a trial: only ranks that pad have tasks for that.
        program = self.coarse.program
        self.num_tasks = len(program.fixed) + 2 * len(program.collectives)
        self._tried: dict[object, Trial] = {}
        # None of them holds the search: a cycle would leave all trials to the garbage collector.
        gathered = lru_cache(_KEPT_PROGRAMS)(partial(bucket_program, self.coarse.program))
        deferred = lru_cache(_KEPT_PROGRAMS)(partial(_deferred, gathered))
        self._merged = lru_cache(_KEPT_PROGRAMS)(partial(_merged, self.program, deferred))
        self._formed = lru_cache(_KEPT_FORMS)(partial(_formed, self.program))

    def best(self, number: int | None = None) -> list[Trial]:
        """The best trials within the limit, no two of the same buckets and deferral."""
        found: dict[object, Trial] = {}
        for trial in sorted(self.trials, key=lambda trial: trial.merit):
            if self.fits(trial):
                found.setdefault((trial.proposal.buckets, trial.proposal.deferred), trial)
        return list(found.values())[:number]

    def step_us(self, trial: Trial) -> float:
        """The step of ``trial``; inf if it is over the limit."""
        return trial.timeline.step_us if self.fits(trial) else math.inf

    @property
    def num_ordered(self) -> int:
        """Tasks that all trials have ordered, in the count that every rank has."""
        return len(self.trials) * self.num_tasks

    @property
    def is_settled(self) -> bool:
        """Whether what the best trial could still gain is worth less than the search has cost."""
        best_us = min(map(self.step_us, self.trials), default=math.inf)
        return (best_us - self.bound_us) * _TASKS_OF_GAP <= self.num_ordered * self.bound_us

    def tightened(self, memory_limit_bytes: float, trial: Trial) -> Search:
        """The search under a smaller limit: its trials, and ``trial`` ordered to fit that."""
        tight = copy(self)
        tight.memory_limit_bytes = memory_limit_bytes
        tight.trials = list(self.trials)
        tight._tried = {}
        for order in dict.fromkeys((trial.proposal.order, JUST_IN_TIME)):
            tight.try_one(replace(trial.proposal, order=order), trial.notes)
        return tight

    def fits(self, trial: Trial) -> bool:
        return trial.timeline.peak_bytes <= self.memory_limit_bytes

    def orders(self) -> tuple[Order, ...]:
        """Orders that differ on this program."""
        by_kind = (REDUCTIONS_FIRST,) if self.program.reductions else ()
        return (EARLY, JUST_IN_TIME, *by_kind, ONE_AHEAD)

    def try_orders(self, proposal: Proposal) -> None:
        """Try ``proposal`` in every order; while none fits, without what is largest at the peak."""
        left_out: list[FreeCollective] = []
        while True:
            bucketed = self.bucketed(proposal)
            notes = _about_left_out(left_out)
            trials = [
                self._try(replace(proposal, order=order), bucketed, notes)
                for order in self.orders()
            ]
            self.trials += trials
            least = min(trials, key=lambda trial: trial.timeline.peak_bytes)
            if self.fits(least) or len(left_out) == _MAX_LEFT_OUT:
                return
            if not left_out:
                self.try_forms(least)  # without packed buffers it may fit as it is
            largest = self._largest_member_at_peak(least)
            if largest is None:
                return
            proposal = replace(proposal, buckets=_without(proposal.buckets, largest))
            left_out.append(self.program.by_name[largest])

    def try_one(self, proposal: Proposal, notes: tuple[str, ...] = ()) -> Trial:
        """Try ``proposal`` as it is, unless the same has been tried, made in whatever way."""
        known = self._tried.get(self._result(proposal))
        if known is not None:
            return known
        self.trials.append(self._try(proposal, self.bucketed(proposal), notes))
        return self.trials[-1]

    def try_forms(self, trial: Trial) -> None:
        """Try the proposal of ``trial`` with its buckets in other forms."""
        for forms in get_args(Forms):
            self.try_one(replace(trial.proposal, forms=forms), trial.notes)

    def _result(self, proposal: Proposal) -> object:
        """Equal for proposals that lead to the same order of the same collectives."""
        buckets = self._buckets(proposal)
        named = tuple((bucket.members, bucket.form) for bucket in buckets)
        return named, proposal.deferred, proposal.order

    def _buckets(self, proposal: Proposal) -> tuple[Bucket, ...]:
        """The buckets of ``proposal`` in their forms, under names that no task has."""
        return self._formed(proposal.buckets, proposal.forms)

    def bucketed(self, proposal: Proposal) -> Program:
        """The coarse program with the buckets and deferral of ``proposal``."""
        return self._merged(self._buckets(proposal), proposal.deferred)

    def finish(self, trial: Trial) -> tuple[tuple[Bucket, ...], Program]:
        """Buckets and whole program of ``trial``, in its order."""
        buckets = self._buckets(trial.proposal)
        names = self.coarse.expand(task.name for task in trial.schedule.tasks)
        return buckets, bucket_program(self.program, buckets).with_order(names)

    def _try(self, proposal: Proposal, bucketed: Program, notes: tuple[str, ...]) -> Trial:
        """Order, simulate and replay; above the limit, again under a smaller one."""
        allowed = self.memory_limit_bytes
        trial: Trial | None = None
        for _ in range(_SHRINK_ATTEMPTS):
            ordered = bucketed.schedule.reordered(proposal.order.write(bucketed, allowed))
            trial = Trial(proposal, ordered, simulate(ordered), notes)
            excess = trial.timeline.peak_bytes - self.memory_limit_bytes
            if excess <= 0 or math.isinf(self.memory_limit_bytes) or proposal.order.one_ahead:
                break
            allowed -= excess
        assert trial is not None
        self._tried[self._result(proposal)] = trial
        return trial

    def _largest_member_at_peak(self, trial: Trial) -> str | None:
        """The largest member of the largest bucket whose buffers are live at the peak."""
        lifetimes = buffer_lifetimes(trial.schedule)
        at = [task.name for task in trial.schedule.tasks].index(trial.timeline.peak_task)
        live: list[tuple[int, Bucket]] = []
        for bucket in self._buckets(trial.proposal):
            names = (f"{bucket.name}.packed", *trial.schedule.by_name[bucket.name].writes)
            spans = [lifetimes.get(name) for name in names]
            if any(span is not None and span[0] <= at <= span[1] for span in spans):
                live.append((sum(self._size_bytes(member) for member in bucket.members), bucket))
        if not live:
            return None
        return max(max(live, key=lambda pair: pair[0])[1].members, key=self._size_bytes)

    def _size_bytes(self, name: str) -> int:
        return self.program.by_name[name].size_bytes


def _about_left_out(collectives: Sequence[FreeCollective]) -> tuple[str, ...]:
    """A note on what is left out of the buckets, if anything is."""
    kinds = {True: "gather", False: "gradient reduction"}
    listed = ", ".join(
        f"the {kinds[each.is_gather]} of {name_of(each) or each.name}" for each in collectives
    )
    note = (
        f"left out of their buckets, which would not fit the memory limit: {listed}; a larger "
        "memory_limit_gb merges more"
    )
    return (note,) if listed else ()


def _deferred(
    with_gathers: Callable[[tuple[Bucket, ...]], Program],
    gathers: tuple[Bucket, ...],
    gradients: tuple[WeightGradient, ...],
) -> Program:
    merged = with_gathers(gathers)
    return defer_gradients(merged, list(gradients)) if gradients else merged


def _merged(
    program: Program,
    deferred: Callable[[tuple[Bucket, ...], tuple[WeightGradient, ...]], Program],
    buckets: tuple[Bucket, ...],
    gradients: tuple[WeightGradient, ...],
) -> Program:
    gathers, reductions = by_kind(program, buckets)
    return bucket_program(deferred(gathers, gradients), reductions)


def _formed(program: Program, buckets: tuple[Bucket, ...], forms: Forms) -> tuple[Bucket, ...]:
    return with_forms(program, _with_new_names(program, buckets), forms)


def by_kind(
    program: Program, buckets: Iterable[Bucket]
) -> tuple[tuple[Bucket, ...], tuple[Bucket, ...]]:
    """The buckets of gathers, and those of reductions."""
    gathers: list[Bucket] = []
    reductions: list[Bucket] = []
    for bucket in buckets:
        is_gather = program.by_name[bucket.members[0]].is_gather
        (gathers if is_gather else reductions).append(bucket)
    return tuple(gathers), tuple(reductions)


def duration_us(program: Program, collective: FreeCollective) -> float:
    return program.schedule.by_name[collective.name].duration_us


def _with_new_names(program: Program, buckets: Iterable[Bucket]) -> list[Bucket]:
    """``buckets`` under names that no task of the program has."""
    taken = program.schedule.by_name
    renamed: list[Bucket] = []
    for bucket in buckets:
        free = (f"{bucket.name}_{i}" for i in count(1) if f"{bucket.name}_{i}" not in taken)
        renamed.append(replace(bucket, name=next(free)) if bucket.name in taken else bucket)
    return renamed


def _without(buckets: Sequence[Bucket], name: str) -> tuple[Bucket, ...]:
    """``buckets`` with one member less; a bucket of one is none."""
    rest = [replace(b, members=tuple(m for m in b.members if m != name)) for b in buckets]
    return tuple(bucket for bucket in rest if len(bucket.members) > 1)
