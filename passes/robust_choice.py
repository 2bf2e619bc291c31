"""Prefer the plan that stays good when costs are wrong.

Predictions err: one cluster's network is slower than its data sheet, one kernel faster than its
roofline. Plans that are near each other as predicted differ widely then: a late large bucket saves
a latency and stalls compute as soon as the network is slower. Of those near the best, the one
comes first whose step is least in sum: as predicted, with the network faster and slower, and with
compute faster.

Neighbours in a hill climb err alike, so one of each kind of proposal is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_overlap.cost_model.simulate import simulated_step_us
from inductor_overlap.passes.search import Trial

_NEAR = 1.012
"""Trials whose step is up to this many times the best one's may come before it."""
_KINDS = 6
"""Kinds of proposals that are compared."""
_WRONG = ({"communication": 0.7}, {"communication": 1.3}, {"compute": 0.7})
"""Factors on costs: what calibrations of real clusters were seen to err by."""


def robust_choice(trials: Sequence[Trial]) -> list[Trial]:
    """``trials`` (best predicted first) with the most robust of the near-best in front."""
    if not trials:
        return []
    near_us = trials[0].timeline.step_us * _NEAR
    kinds: dict[str, Trial] = {}
    for trial in trials:
        if trial.timeline.step_us <= near_us:
            kinds.setdefault(trial.proposal.kind, trial)
    near = list(kinds.values())[:_KINDS]
    if len(near) > 1:
        near.sort(key=_regret_us)
    first = set(map(id, near))
    return [*near, *(trial for trial in trials if id(trial) not in first)]


def _regret_us(trial: Trial) -> float:
    wrong = (simulated_step_us(trial.schedule.scaled(**factors)) for factors in _WRONG)
    return trial.timeline.step_us + sum(wrong)
