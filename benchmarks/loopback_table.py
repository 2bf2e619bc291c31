"""Prints what the loopback benchmark measured: tables in Markdown, and a picture.

Speeds are relative to FSDP2 eager, predictions come from the plugin's reports plus the measured
optimizer step, the floor is the longer of compute and communication measured alone. Where a rank
has one core, its CPU time is a floor too: that core computes and serves the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from loopback_contenders import IN_TREE, OURS, TITLES
from loopback_network import UNLIMITED
from loopback_results import Measured, Row, loss_difference

REFERENCE = "fsdp2"
_MIB = 2**20
_HEADINGS = (
    "contender",
    "step s",
    "quartiles",
    "speed",
    "predicted s",
    "error",
    "peak MiB",
    "change",
    "sent MB",
    "first step s",
    "losses differ",
)


def rate_name(rate_mbit: int) -> str:
    return "no limit" if rate_mbit == UNLIMITED else f"{rate_mbit} Mbit/s"


def rate_table(measured: Measured) -> str:
    """All that was measured at one rate."""
    if measured.error:
        return f"{rate_name(measured.rate_mbit)}: not measured\n{measured.error}"
    reference = measured.rows.get(REFERENCE)
    rows = [
        [TITLES[name], *_cells(row, None if reference is None or reference.error else reference)]
        for name, row in measured.rows.items()
    ]
    lines = [f"{rate_name(measured.rate_mbit)}:", "", *_markdown(_HEADINGS, rows), ""]
    lines.append(
        f"Alone: compute {measured.compute_s:.3f} s, communication "
        f"{measured.communication_s:.3f} s ({measured.communication_cpu_s:.3f} s of CPU time), "
        f"optimizer {measured.optimizer_s:.3f} s; floor "
        f"{measured.floor_s:.3f} s, with the ends of the graphs "
        f"{measured.floor_s + measured.ends_s:.3f} s."
    )
    for name, row in measured.rows.items():
        if row.prediction:
            lines.append(f"{TITLES[name]}: {' / '.join(row.prediction.policies)}.")
        if row.error:
            lines.append(f"{TITLES[name]} failed: {row.error.strip().splitlines()[-1]}")
    return "\n".join(lines)


def summary(measured: Sequence[Measured]) -> str:
    """Steps over rates, and how ours stand against FSDP2, torch's passes and the floor."""
    ran = _by_rate(measured)
    names = list(dict.fromkeys(name for one in ran for name in one.rows))
    headings = ["step, s", *(rate_name(one.rate_mbit) for one in ran)]
    rows = [[TITLES[name], *(_seconds(one.step_s(name)) for one in ran)] for name in names]
    rows += [
        ["compute alone", *(_seconds(one.compute_s) for one in ran)],
        ["communication alone", *(_seconds(one.communication_s) for one in ran)],
        ["its CPU time", *(_seconds(one.communication_cpu_s) for one in ran)],
        ["floor: the longer, and the optimizer", *(_seconds(one.floor_s) for one in ran)],
    ]
    standing = [
        ["FSDP2 eager / ours", *(_ratio(one.best([REFERENCE]), one.best(OURS)) for one in ran)],
        ["better torch pass / ours", *(_ratio(one.best(IN_TREE), one.best(OURS)) for one in ran)],
        ["ours / (floor + ends)", *(_over(one, one.floor_s + one.ends_s) for one in ran)],
        ["ours / CPU time of a step", *(_over(one, one.cpu_s) for one in ran)],
        ["predicted / measured, ours auto", *(_prediction(one, "ours-auto") for one in ran)],
    ]
    tables = (_markdown(headings, rows), _markdown(["best of ours", *headings[1:]], standing))
    return "\n\n".join("\n".join(table) for table in tables)


def draw(measured: Sequence[Measured], path: Path) -> None:
    """A picture of the summary: step over rate, a line for each contender and for the floor.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plot: Any = import_module("matplotlib.pyplot")
    ran = _by_rate(measured)
    places = range(len(ran))
    figure, axes = plot.subplots(figsize=(8, 5), layout="constrained")
    for name in dict.fromkeys(name for one in ran for name in one.rows):
        style = "o-" if name in OURS else "s--" if name in IN_TREE else "^:"
        axes.plot(places, [one.step_s(name) for one in ran], style, label=TITLES[name])
    axes.plot(places, [one.floor_s for one in ran], color="black", linewidth=2, label="floor")
    axes.set_yscale("log")
    axes.set_xticks(places, [rate_name(one.rate_mbit) for one in ran])
    axes.set_yticks(ticks := [1, 2, 3, 5, 10], [str(tick) for tick in ticks])
    axes.set_ylabel("step, s")
    axes.set_title("Measured training step, by the rate of the network")
    axes.grid(axis="y", which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plot.close(figure)


def _by_rate(measured: Sequence[Measured]) -> list[Measured]:
    """What ran, from the slowest network to no limit."""
    ran = [one for one in measured if not one.error]
    return sorted(ran, key=lambda one: (one.rate_mbit == UNLIMITED, one.rate_mbit))


def _cells(row: Row, reference: Row | None) -> Iterator[str]:
    if row.step is None:
        yield "failed"
        yield from [""] * (len(_HEADINGS) - 2)
        return
    yield f"{row.step.median:.3f}"
    yield f"{row.step.low:.3f}-{row.step.high:.3f}"
    yield (
        ""
        if reference is None or reference.step is None
        else (f"{reference.step.median / row.step.median:.2f}")
    )
    predicted_s = row.predicted_s
    yield _seconds(predicted_s)
    yield "" if predicted_s is None else f"{100 * (predicted_s / row.step.median - 1):+.1f} %"
    yield f"{row.peak_bytes / _MIB:.1f}"
    yield "" if reference is None else f"{100 * (row.peak_bytes / reference.peak_bytes - 1):+.1f} %"
    yield f"{row.sent_bytes / 1e6:.1f}"
    yield "" if row.first_step_s is None else f"{row.first_step_s:.1f}"
    yield "" if reference is None else f"{loss_difference(row.losses, reference.losses):.1e}"


def _seconds(value_s: float | None) -> str:
    return "" if value_s is None else f"{value_s:.3f}"


def _ratio(slow: tuple[str, float] | None, fast: tuple[str, float] | None) -> str:
    return "" if slow is None or fast is None else f"{slow[1] / fast[1]:.2f}"


def _over(measured: Measured, least_s: float) -> str:
    best = measured.best(OURS)
    return "" if best is None else f"{best[1] / least_s:.2f}"


def _prediction(measured: Measured, name: str) -> str:
    row = measured.rows.get(name)
    if row is None or row.step is None or row.predicted_s is None:
        return ""
    return f"{row.predicted_s / row.step.median:.2f}"


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table that is aligned as plain text too; figures to the right."""
    cells = [list(headings), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = [_line(row, widths) for row in cells]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return [lines[0], f"| {' | '.join(rule)} |", *lines[1:]]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (cell for cell in zip(row, widths, strict=True))
    cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return f"| {' | '.join(cells)} |"
