"""The report of one graph: what was done, what it is worth, and what is left to gain.

Everything in it comes from the simulator, the lower bound and the plan; it measures nothing. It
prints as plain text, and goes to JSON, to ui.perfetto.dev and to a PNG.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from inductor_overlap.cost_model.errors import PriceErrors
from inductor_overlap.cost_model.simulate import Timeline
from inductor_overlap.display import format_bytes, format_change, format_error, format_us
from inductor_overlap.exposure import Exposed, explain_exposed
from inductor_overlap.passes.plan import Plan
from inductor_overlap.timeline_views import draw_timelines, perfetto_trace
from inductor_overlap.wire_dtypes import WireDtypes, summarize_wire

__all__ = ["Exposed", "Report", "explain_exposed"]

NUM_EXPOSED_SHOWN = 8
_ROUNDING = 1e-9
_ROUNDING_US = 1e-3


@dataclass(frozen=True, repr=False)
class Report:
    """What was done to one graph.

    Attributes:
        before, after: simulated timelines of the graph as given and as left.
        lower_bound_us: no schedule of the graph takes less on this machine.
        plan: what was carried out.
        exposed: stalls of ``after``, longest first, with reasons.
        num_collectives_before, num_collectives_after: bucketing merges them.
        policy_chosen: the policy whose plan was the best, as the plan names it.
        warnings: what the user should know, one sentence each.
        fallbacks: op -> how many of its nodes had no known cost.
        bound_certificate: why nothing is faster than ``lower_bound_us``.
        memory_limit_bytes: what the peak had to stay under; inf if it had no limit.
        name: which graph this is.
        prices: where the times are from, and how far off they are expected to be.
        wire_dtypes: kind of collective -> parameter -> the dtype in which it travels.
        backward: the report of the backward graph, where both were planned at once (`plan`).
    """

    before: Timeline
    after: Timeline
    lower_bound_us: float
    plan: Plan
    exposed: Sequence[Exposed]
    num_collectives_before: int
    num_collectives_after: int
    policy_chosen: str
    warnings: Sequence[str] = ()
    fallbacks: Mapping[str, int] = field(default_factory=dict[str, int])
    bound_certificate: str = ""
    memory_limit_bytes: float = math.inf
    name: str = "graph"
    prices: PriceErrors | None = None
    wire_dtypes: WireDtypes = field(default_factory=dict[str, Mapping[str, str]])
    backward: Report | None = None

    @property
    def gap(self) -> float:
        """How far the step is above the bound: ``step / bound - 1``; 0 if nothing takes time."""
        if self.lower_bound_us <= 0.0:
            return 0.0
        gap = self.after.step_us / self.lower_bound_us - 1.0
        return 0.0 if abs(gap) < _ROUNDING else gap

    def __repr__(self) -> str:
        return (
            f"Report({self.name!r}: step {format_us(self.before.step_us)} -> "
            f"{format_us(self.after.step_us)}, {self.num_collectives_before} -> "
            f"{self.num_collectives_after} collectives, gap {100.0 * self.gap:.1f} %)"
        )

    def __str__(self) -> str:
        lines = "\n".join(_lines(self))
        return lines if self.backward is None else f"{lines}\n{self.backward}"

    def to_json(self) -> str:
        """All figures, the plan and the reasons; spans are left to `to_perfetto`."""
        return json.dumps(self._content(), indent=1)

    def _content(self) -> dict[str, Any]:
        limit = self.memory_limit_bytes
        content: dict[str, Any] = {
            "name": self.name,
            "policy_chosen": self.policy_chosen,
            "before": _figures(self.before, self.num_collectives_before),
            "after": _figures(self.after, self.num_collectives_after),
            "lower_bound_us": self.lower_bound_us,
            "bound_certificate": self.bound_certificate,
            "gap": self.gap,
            "memory_limit_bytes": limit if math.isfinite(limit) else None,
            "exposed": [
                {"collective": item.collective, "us": item.us, "reason": item.reason}
                for item in self.exposed
            ],
            "warnings": list(self.warnings),
            "fallbacks": dict(sorted(self.fallbacks.items())),
            "prices": None if self.prices is None else asdict(self.prices),
            "wire_dtypes": {kind: dict(found) for kind, found in self.wire_dtypes.items()},
            "plan": self.plan.to_json_dict(),
        }
        if self.backward is not None:
            content["backward"] = self.backward._content()
        return content

    def to_perfetto(self, path: str | PathLike[str]) -> None:
        """Write a trace that ui.perfetto.dev opens: before and after, one track per queue."""
        trace = perfetto_trace({"before": self.before, "after": self.after})
        Path(path).write_text(json.dumps(trace))

    def to_png(self, path: str | PathLike[str]) -> None:
        """Draw before and after, one row per queue.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = draw_timelines({"before": self.before, "after": self.after})
        figure.savefig(path, format="png", dpi=120)


def _figures(timeline: Timeline, num_collectives: int) -> dict[str, Any]:
    return {
        "num_collectives": num_collectives,
        "step_us": timeline.step_us,
        "compute_us": timeline.compute_us,
        "communication_us": timeline.communication_us,
        "exposed_us": timeline.exposed_us,
        "contention_us": timeline.contention_us,
        "peak_bytes": timeline.peak_bytes,
        "peak_task": timeline.peak_task,
    }


def _lines(report: Report) -> Iterator[str]:
    yield f"inductor-overlap: {report.name}"
    yield from _table(report)
    yield f"  lower bound {format_us(report.lower_bound_us)}, gap {100.0 * report.gap:.1f} %"
    if report.bound_certificate:
        yield f"    since {report.bound_certificate}"
    if report.prices is not None:
        yield from _price_lines(report.prices)
    yield f"  {_what_was_done(report)}"
    if math.isfinite(report.memory_limit_bytes):
        yield f"  memory limit {format_bytes(report.memory_limit_bytes)}"
    if report.wire_dtypes:
        yield f"  parameters on the wire: {'; '.join(summarize_wire(report.wire_dtypes))}"
    yield from _exposed_lines(report.exposed)
    if report.fallbacks:
        listed = ", ".join(f"{op} ({count})" for op, count in sorted(report.fallbacks.items()))
        yield f"  costs unknown, so estimated from bytes: {listed}"
    yield from (f"  warning: {warning}" for warning in report.warnings)


def _price_lines(prices: PriceErrors) -> Iterator[str]:
    yield (
        f"  prices: {prices.prices}, collectives {format_error(prices.collectives)}, "
        f"compute {format_error(prices.compute)}"
    )
    if prices.assumptions:
        yield f"    assumed: {'; '.join(prices.assumptions)}"
    if prices.num_rough:
        yield (
            f"    rough: {prices.num_rough} collectives are below 1 MB, and no calibration of this "
            "cluster covers them"
        )


def _what_was_done(report: Report) -> str:
    policy, plan = report.policy_chosen, report.plan
    if plan.changes_nothing:
        return f"policy {policy}: nothing was changed"
    merged = sum(len(bucket.members) for bucket in plan.buckets)
    return f"policy {policy}: {merged} collectives in {plan.counted_buckets}"


def _table(report: Report) -> Iterator[str]:
    before, after = report.before, report.after
    num_before, num_after = report.num_collectives_before, report.num_collectives_after
    yield _row("", "before", "after", "")
    yield _row("collectives", str(num_before), str(num_after), format_change(num_before, num_after))
    for label, was_us, is_us in (
        ("step (simulated)", before.step_us, after.step_us),
        ("compute", before.compute_us, after.compute_us),
        ("communication", before.communication_us, after.communication_us),
        ("exposed", before.exposed_us, after.exposed_us),
        ("slowed by contention", before.contention_us, after.contention_us),
    ):
        if label == "slowed by contention" and max(was_us, is_us) < _ROUNDING_US:
            continue
        yield _row(label, format_us(was_us), format_us(is_us), format_change(was_us, is_us))
    yield _row(
        "peak memory",
        format_bytes(before.peak_bytes),
        format_bytes(after.peak_bytes),
        format_change(before.peak_bytes, after.peak_bytes),
    )


def _row(label: str, before: str, after: str, change: str) -> str:
    return f"  {label:<20} {before:>12} {after:>12} {change:>9}".rstrip()


def _exposed_lines(exposed: Sequence[Exposed]) -> Iterator[str]:
    if not exposed:
        yield "  nothing is exposed"
        return
    yield "  exposed, longest first:"
    for item in exposed[:NUM_EXPOSED_SHOWN]:
        yield f"    {format_us(item.us):>10}  {item.collective}: {item.reason}"
    rest = exposed[NUM_EXPOSED_SHOWN:]
    if rest:
        yield f"    {format_us(sum(item.us for item in rest)):>10}  in {len(rest)} more"
