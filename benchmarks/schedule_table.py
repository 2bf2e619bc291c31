"""Prints what the schedule benchmark found: tables, losses, and what acceptance asks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from schedule_contenders import OURS, Problem, Result

AUTO = "ours auto"
MANUAL = "torch manual"
_ROUNDING = 1e-9
_HEADINGS = (
    "step ms",
    "gap %",
    "exposed ms",
    "peak GiB",
    "limit",
    "collectives",
    "pass s",
    "wrong costs",
)


@dataclass(frozen=True)
class Row:
    """All contenders on one problem on one network.

    Attributes:
        rematches: contender over the limit that auto did not beat -> auto with that much memory.
        perturbed: contender -> its step with wrong costs over that of torch's manual pass, one
            value for each draw.
    """

    problem: Problem
    network: str
    results: dict[str, Result]
    rematches: dict[str, Result] = field(default_factory=dict[str, Result])
    perturbed: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    @property
    def title(self) -> str:
        return f"{self.problem.name}; {self.network}"

    def step_us(self, contender: str) -> float:
        return self.results[contender].timeline.step_us

    def gap(self, contender: str) -> float:
        return self.step_us(contender) / self.problem.bound_us - 1.0

    def is_lost_to(self, contender: str) -> bool:
        return self.step_us(AUTO) > self.step_us(contender) * (1 + _ROUNDING)

    def is_over(self, contender: str) -> bool:
        limit_bytes = self.problem.limit_bytes * (1 + _ROUNDING)
        return self.results[contender].peak_bytes > limit_bytes


def row_table(row: Row) -> Iterator[str]:
    """One line for each contender; the last column is the worst ratio of `Row.perturbed`."""
    bound_ms, limit_gib = row.problem.bound_us / 1e3, row.problem.limit_bytes / 2**30
    yield f"{row.title}; bound {bound_ms:.1f} ms, limit {limit_gib:.2f} GiB"
    yield f"  {'':<14}" + "".join(f"{heading:>12}" for heading in _HEADINGS)
    for name, result in row.results.items():
        timeline = result.timeline
        cells = (
            f"{timeline.step_us / 1e3:.2f}",
            f"{100 * row.gap(name):.2f}",
            f"{timeline.exposed_us / 1e3:.2f}",
            f"{result.peak_bytes / 2**30:.2f}",
            "over" if row.is_over(name) else "held",
            str(len(result.collectives)),
            f"{result.pass_s:.2f}",
            f"{max(row.perturbed[name]):.3f}" if name in row.perturbed else "-",
        )
        yield f"  {name:<14}" + "".join(f"{cell:>12}" for cell in cells)


def summary(title: str, rows: Sequence[Row]) -> Iterator[str]:
    """Gaps of every contender over ``rows``, and where ours lose."""
    yield f"{title}: {len(rows)} graphs, gap to the bound in %"
    yield f"  {'':<14}{'mean':>12}{'worst':>12}{'pass s':>12}"
    for name in rows[0].results:
        gaps = [row.gap(name) for row in rows]
        mean = math.exp(sum(map(math.log1p, gaps)) / len(gaps)) - 1.0
        pass_s = sum(row.results[name].pass_s for row in rows)
        yield f"  {name:<14}{100 * mean:>12.2f}{100 * max(gaps):>12.2f}{pass_s:>12.1f}"
    losses = [loss for row in rows for loss in losses_of(row)]
    yield f"  auto above another contender, or ours over the limit: {len(losses)} graphs"
    yield from (f"    {loss}" for loss in losses)


def losses_of(row: Row) -> Iterator[str]:
    """Where auto is above another contender, and which of ours are over the limit."""
    for name in row.results:
        if row.is_lost_to(name):
            yield f"{row.title}: auto {_excess(row, AUTO, name)} above {name} ({_terms(row, name)})"
    for name in OURS:
        if row.is_over(name):
            excess = row.results[name].peak_bytes / row.problem.limit_bytes - 1.0
            yield f"{row.title}: {name} is {100 * excess:.2f} % over the limit"


def _excess(row: Row, ours: str, other: str) -> str:
    return f"{100 * (row.step_us(ours) / row.step_us(other) - 1.0):.2f} %"


def _terms(row: Row, other: str) -> str:
    """What memory the other one took; with as much, how auto compares."""
    if other not in row.rematches:
        return "within the limit"
    more = row.results[other].peak_bytes / row.problem.limit_bytes - 1.0
    change = row.rematches[other].timeline.step_us / row.step_us(other) - 1.0
    return f"{100 * more:.1f} % over the limit; auto with as much: {100 * change:+.2f} %"


def perturbed_table(rows: Sequence[Row]) -> Iterator[str]:
    """Step with wrong costs over torch's manual pass: mean, worst, and where."""
    ratios: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in rows:
        for name, values in row.perturbed.items():
            ratios[name] += [(value, row.title) for value in values]
    yield "costs wrong after planning: step over that of torch's manual pass with the same costs"
    yield f"  {'':<14}{'mean':>8}{'worst':>8}  where"
    for name, found in ratios.items():
        worst, where = max(found)
        yield f"  {name:<14}{_mean(value for value, _ in found):>8.3f}{worst:>8.3f}  {where}"


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
