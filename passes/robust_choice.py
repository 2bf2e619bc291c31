"""Prefer the plan that stays good when costs are wrong.

Predictions err: one cluster's network is slower than its data sheet, one kernel faster than its
roofline. Among trials whose predicted step is near the best, the one comes first whose step is
least in sum as predicted, with communication 1.3 times as long, and with compute 0.8 times as
long (the direction in which hidden communication comes to light).
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.passes.search import Trial

_NEAR = 1.02
"""Trials whose step is up to this many times the best one's may come before it."""
_COMMUNICATION = 1.3
_COMPUTE = 0.8


def robust_choice(trials: Sequence[Trial]) -> list[Trial]:
    """``trials`` (best predicted first) with the most robust of the near-best in front."""
    if not trials:
        return []
    near_us = trials[0].timeline.step_us * _NEAR
    near = [trial for trial in trials if trial.timeline.step_us <= near_us]
    near.sort(key=_regret_us)
    return [*near, *trials[len(near) :]]


def _regret_us(trial: Trial) -> float:
    slow_network = simulate(trial.schedule.scaled(communication=_COMMUNICATION))
    fast_compute = simulate(trial.schedule.scaled(compute=_COMPUTE))
    return trial.timeline.step_us + slow_network.step_us + fast_compute.step_us
