"""Least squares on ratios: the constants that make predicted times match measured ones.

Times span six decades, so the residual is the logarithm of predicted over measured, and constants
move on a logarithmic scale too: they stay positive. Outliers count by their absolute value
(pseudo-Huber), so a few bad points do not bend a fit. Every constant is held to its start with a
small weight: one that the data do not determine stays where it was. Levenberg-Marquardt with
numerical derivatives; deterministic. Refused (``ValueError``): times or constants that are not
positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

OUTLIER = 0.06
"""Residual (6 %) from which on a point counts linearly."""
PRIOR_WEIGHT = 0.02
"""Residual that moving a constant by a factor e adds, unless the caller says otherwise."""
LARGEST_FACTOR = 12.0
"""No constant moves further than this factor from its start."""
_STEP = 1e-4

Predict = Callable[[Mapping[str, float]], Sequence[float]]


def fit_constants(
    predict: Predict,
    measured_us: Sequence[float],
    start: Mapping[str, float],
    *,
    upper: Mapping[str, float] | None = None,
    weights: Sequence[float] | None = None,
    prior_weight: float = PRIOR_WEIGHT,
    max_iterations: int = 25,
) -> dict[str, float]:
    """The constants for which ``predict`` comes closest to ``measured_us``.

    Args:
        predict: times (us) of all points for given constants.
        measured_us: measured times, one a point.
        start: constants to fit and their first values.
        upper: largest value of some of them (a share of a peak, say, is at most 1).
        weights: weight of each point; 1 unless given.
        prior_weight: residual that moving a constant by a factor e adds: the pull to its start.
        max_iterations: bound on accepted and refused steps together.

    Raises:
        ValueError: a measured time or a start is not positive, or nothing was measured.
    """
    _check(measured_us, start)
    problem = _Problem(predict, measured_us, start, upper or {}, weights, prior_weight)
    x = torch.zeros(len(start), dtype=torch.float64)
    residual = problem.residual(x)
    damping = 1e-2
    for _ in range(max_iterations):
        step = _damped_step(problem.jacobian(x, residual), residual, damping)
        trial = problem.clamp(x + step)
        trial_residual = problem.residual(trial)
        gain = float(residual @ residual) - float(trial_residual @ trial_residual)
        if gain <= 0:
            damping = min(1e6, damping * 10)
            continue
        x, residual, damping = trial, trial_residual, max(1e-6, damping / 5)
        if gain < 1e-5 * float(residual @ residual):
            break
    return problem.constants(x)


def _check(measured_us: Sequence[float], start: Mapping[str, float]) -> None:
    if not measured_us:
        raise ValueError("nothing was measured: a fit needs at least one time")
    bad = [time for time in measured_us if not 0 < time < math.inf]
    if bad:
        raise ValueError(f"measured times must be positive and finite; got {bad[:5]}")
    unfit = [name for name, value in start.items() if not 0 < value < math.inf]
    if unfit:
        raise ValueError(f"constants are fitted as ratios and must start above 0: {unfit}")


class _Problem:
    """The fit in the logarithms x of constant / start."""

    def __init__(
        self,
        predict: Predict,
        measured_us: Sequence[float],
        start: Mapping[str, float],
        upper: Mapping[str, float],
        weights: Sequence[float] | None,
        prior_weight: float,
    ) -> None:
        self.prior_weight = prior_weight
        self.predict = predict
        self.names = list(start)
        self.start = start
        self.log_measured = torch.tensor(measured_us, dtype=torch.float64).log()
        self.weights = torch.ones_like(self.log_measured)
        if weights is not None:
            self.weights = torch.tensor(weights, dtype=torch.float64)
        far = math.log(LARGEST_FACTOR)
        highest = [math.log(upper.get(n, math.inf) / start[n]) for n in self.names]
        self.highest = torch.tensor([min(far, h) for h in highest], dtype=torch.float64)
        self.lowest = torch.full_like(self.highest, -far)

    def clamp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.minimum(torch.maximum(x, self.lowest), self.highest)

    def constants(self, x: torch.Tensor) -> dict[str, float]:
        factors = [math.exp(float(value)) for value in x]
        return {n: self.start[n] * f for n, f in zip(self.names, factors, strict=True)}

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        predicted = torch.tensor(self.predict(self.constants(x)), dtype=torch.float64)
        error = (predicted.log() - self.log_measured) / OUTLIER
        # Pseudo-Huber: square of the residual for small errors, its absolute value for large ones.
        robust = torch.sign(error) * (2 * ((1 + error**2).sqrt() - 1)).sqrt() * OUTLIER
        return torch.cat([robust * self.weights, self.prior_weight * x])

    def jacobian(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        columns: list[torch.Tensor] = []
        for i in range(len(self.names)):
            moved = x.clone()
            moved[i] += _STEP
            columns.append((self.residual(moved) - residual) / _STEP)
        return torch.stack(columns, dim=1)


def _damped_step(jacobian: torch.Tensor, residual: torch.Tensor, damping: float) -> torch.Tensor:
    normal = jacobian.T @ jacobian
    diagonal = torch.diag(normal.diagonal() * damping + 1e-12)
    solve = cast("Callable[[torch.Tensor, torch.Tensor], torch.Tensor]", torch.linalg.solve)  # pyright: ignore[reportUnknownMemberType]
    return solve(normal + diagonal, -(jacobian.T @ residual))
