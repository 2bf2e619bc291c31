"""Golden files: a graph before and after the pass, as text that a person can read.

One line a node: name, inputs, dtype and shape, group. Names are those of the graph before, so a
moved node is a moved line. ``EXPECTTEST_ACCEPT=1`` rewrites the files instead of comparing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.fx as fx

from inductor_overlap.passes.fx_ops import arguments, is_start
from inductor_overlap.passes.post_grad import Outcome

GOLDENS = Path(__file__).parent.parent / "goldens"
MAX_LINES = 60


def graph_lines(graph: fx.Graph) -> list[str]:
    """One line for each node that is called."""
    rows = [_row(node) for node in graph.nodes if node.op == "call_function"]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return [_join(row, widths) for row in rows]


def _row(node: fx.Node) -> tuple[str, str, str, str]:
    inputs = " ".join(arg.name for arg in node.all_input_nodes)
    group = str(arguments(node).get("group_name", "")) if is_start(node) else ""
    return node.name, inputs, _type(node.meta.get("val")), group


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[str(s) for s in value.shape]}".replace(
            "'", ""
        )
    return f"{len(value)} tensors" if isinstance(value, (list, tuple)) else ""


def _join(row: Iterable[str], widths: list[int]) -> str:
    cells = list(row)
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*padded, *cells[len(widths) :]]).rstrip()


def metric_lines(outcome: Outcome) -> list[str]:
    before, after = outcome.before, outcome.after
    fixed = [f"fixed         {c.name}: {c.why_fixed}" for c in outcome.collectives if not c.free]
    notes = [] if outcome.plan.changes_nothing else outcome.warnings
    return [
        f"plan          {outcome.plan}",
        f"step_us       {before.step_us:.2f} -> {after.step_us:.2f}",
        f"exposed_us    {before.exposed_us:.2f} -> {after.exposed_us:.2f}",
        f"peak_bytes    {before.peak_bytes} -> {after.peak_bytes}",
        f"collectives   {outcome.num_collectives_before} -> {outcome.num_collectives_after}",
        f"bound_us      {outcome.bound.step_us:.2f}",
        *fixed,
        *[f"note          {note}" for note in notes],
    ]


def golden_text(case: str, before: list[str], after: list[str], metrics: list[str]) -> str:
    """The four sections; an unchanged graph is not printed twice."""
    shown = ["unchanged"] if after == before else after
    sections = {"case": [case], "before": before, "after": shown, "metrics": metrics}
    lines: list[str] = []
    for title, body in sections.items():
        lines += [f"# {title}", *body, ""]
    return "\n".join(lines)


def assert_golden(name: str, text: str) -> None:
    """Compare ``text`` with ``goldens/<name>.txt``, or write it there.

    Raises:
        AssertionError: It differs, or there is no such file.
    """
    path = GOLDENS / f"{name}.txt"
    assert text.count("\n") <= MAX_LINES, f"{name} has more than {MAX_LINES} lines; make it smaller"
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    assert path.exists(), f"no golden {path}; write it with EXPECTTEST_ACCEPT=1"
    assert text == path.read_text(), f"{name} changed; read the difference before accepting it"
