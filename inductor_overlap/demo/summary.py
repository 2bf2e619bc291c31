"""Prints the demo: progress while it compiles and trains, then the comparison.

Simulated figures come from the plugin's reports, measured ones from the ranks' clocks (a step is
as long as that of its slower rank).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from inductor_overlap.demo.training import (
    DIRECTIONS,
    OVERLAPPED,
    PLAIN,
    DemoSettings,
    RankResult,
)
from inductor_overlap.display import format_bytes, format_change, format_us
from inductor_overlap.report import Report


class CompileProgress:
    """A progress bar on a terminal, a line for each stage elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("start two ranks", total=1.0)
        self._stage = ""

    def __enter__(self) -> CompileProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, stage: str, share: float) -> None:
        """Says what is being done and moves the bar to `share` (0 to 1)."""
        self._bar.update(self._task, description=stage, completed=share)
        if stage != self._stage and not self._console.is_terminal:
            self._console.print(f"{stage} ...")
        self._stage = stage


def is_equal(results: Sequence[RankResult]) -> bool:
    """Whether both variants gave every rank the same losses and weights, bit for bit."""
    return all(
        result.losses[PLAIN] == result.losses[OVERLAPPED] and result.weights_equal
        for result in results
    )


def print_summary(console: Console, settings: DemoSettings, results: Sequence[RankResult]) -> None:
    """Prints the simulated and the measured comparison, and whether the numbers are equal."""
    model, reports = settings.model, results[0].reports
    console.print(
        f"Llama 3: {model.num_layers} blocks, dim {model.dim}, float32; {len(results)} gloo ranks, "
        f"{settings.batch} x {settings.seq} tokens a rank; memory limit "
        f"{format_bytes(settings.memory_limit_gb * 2**30)}"
    )
    console.print(_graphs(reports, settings.cluster))
    for direction, report in reports.items():
        for warning in report.warnings:
            console.print(f"{direction}: {warning}", style="dim", markup=False)
    console.print(_steps(results, settings.cluster))
    console.print(_verdict(results))


def _graphs(reports: dict[str, Report], cluster: str) -> Table:
    table = Table(title=f"the two graphs, simulated with the prices of {cluster}", **_LEFT)
    table.add_column("", no_wrap=True)
    for direction in DIRECTIONS:
        table.add_column(f"{direction}\nbefore", justify="right")
        table.add_column("\nafter", justify="right")
    for label, figures, show in _ROWS:
        pairs = [figures(reports[direction]) for direction in DIRECTIONS]
        table.add_row(label, *(show(figure) for pair in pairs for figure in pair))
    for label, text in _AFTER_ROWS:
        table.add_row(label, *(cell for d in DIRECTIONS for cell in ("", text(reports[d]))))
    return table


_Figures = Callable[[Report], tuple[float, float]]

_ROWS: tuple[tuple[str, _Figures, Callable[[float], str]], ...] = (
    ("collectives", lambda r: (r.num_collectives_before, r.num_collectives_after), str),
    ("step", lambda r: (r.before.step_us, r.after.step_us), format_us),
    ("exposed communication", lambda r: (r.before.exposed_us, r.after.exposed_us), format_us),
    ("peak memory", lambda r: (r.before.peak_bytes, r.after.peak_bytes), format_bytes),
)
_AFTER_ROWS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("lower bound of the step", lambda r: format_us(r.lower_bound_us)),
    ("gap to the bound", lambda r: f"{100.0 * r.gap:.1f} %"),
    ("policy", lambda r: r.policy_chosen),
)
_LEFT: Any = {"title_justify": "left", "title_style": "bold"}


def _steps(results: Sequence[RankResult], cluster: str) -> Table:
    table = Table(title="forward + backward", **_LEFT)
    for heading in ("", "without", "with the plugin", "change"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    reports = results[0].reports.values()
    num_steps = len(results[0].step_s[PLAIN])
    for label, was_us, is_us in (
        (
            f"simulated ({cluster})",
            sum(report.before.step_us for report in reports),
            sum(report.after.step_us for report in reports),
        ),
        (
            f"measured here (median of {num_steps})",
            median_step_us(results, PLAIN),
            median_step_us(results, OVERLAPPED),
        ),
    ):
        table.add_row(label, format_us(was_us), format_us(is_us), format_change(was_us, is_us))
    for label, step in (("loss of the first step", 0), ("loss of the last step", -1)):
        losses = [_mean_loss(results, variant, step) for variant in (PLAIN, OVERLAPPED)]
        table.add_row(label, *(f"{loss:.6f}" for loss in losses), "")
    return table


def median_step_us(results: Sequence[RankResult], variant: str) -> float:
    """Median over the timed steps, each as long as its slowest rank took."""
    slowest_s = map(max, zip(*(result.step_s[variant] for result in results), strict=True))
    return 1e6 * statistics.median(slowest_s)


def _mean_loss(results: Sequence[RankResult], variant: str, step: int) -> float:
    return statistics.fmean(result.losses[variant][step] for result in results)


def _verdict(results: Sequence[RankResult]) -> str:
    num_losses = sum(len(result.losses[PLAIN]) for result in results)
    if is_equal(results):
        return (
            f"[green]equal[/]: {num_losses} losses and the weights after the last step are the "
            f"same bit for bit (a sum over two ranks has one order only)"
        )
    differences = [
        abs(a - b)
        for result in results
        for a, b in zip(result.losses[PLAIN], result.losses[OVERLAPPED], strict=True)
    ]
    return f"[red]NOT equal[/]: losses differ by up to {max(differences):.3g}, or weights differ"
