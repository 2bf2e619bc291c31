"""Defer weight-gradient matmuls: the only compute that moves.

They feed nothing but a reduction. Some of them behind the main chain of a backward graph let that
chain end earlier, hide the reductions that come last (the embedding's) behind compute, and bring
critical gathers' readers forward. The price is memory: what they read stays allocated until then.
`defer_gradients` moves a given amount of such compute to the end; whether that pays is the
simulator's to say.

The deferred ones run in Johnson's order for compute followed by communication (S. M. Johnson,
"Optimal two- and three-stage production schedules with setup times included", Naval Research
Logistics Quarterly 1, 1954).
"""

from __future__ import annotations

from dataclasses import dataclass

from inductor_overlap.cost_model.memory import buffer_lifetimes
from inductor_overlap.passes.program import Program
from inductor_overlap.passes.reorder import put_on_demand


@dataclass(frozen=True)
class WeightGradient:
    """One reduction's share of movable compute.

    Attributes:
        reduction: name of its start.
        tasks: what makes its input.
        compute_us, reduction_us: of the tasks, and of the reduction by itself.
        held_bytes: what stays allocated because of it alone, if it runs at the end.
        position: of its first task in the program.
    """

    reduction: str
    tasks: tuple[str, ...]
    compute_us: float
    reduction_us: float
    held_bytes: int
    position: int


def weight_gradients(program: Program) -> list[WeightGradient]:
    """The deferrable gradients of ``program`` that take time, in program order."""
    tasks = program.schedule.by_name
    position = {task.name: index for index, task in enumerate(program.schedule.tasks)}
    last_read = {name: last for name, (_, last) in buffer_lifetimes(program.schedule).items()}
    found: list[WeightGradient] = []
    for reduction, names in program.weight_gradients.items():
        own = {name for task in names for name in tasks[task].writes}
        reads = {name for task in names for name in tasks[task].reads if name not in own}
        end = max(position[name] for name in names)
        held = [program.schedule.buffers[name] for name in reads if last_read.get(name, -1) <= end]
        compute_us = sum(tasks[name].duration_us for name in names)
        if compute_us > 0.0:
            reduction_us = tasks[reduction].duration_us
            held_bytes = sum(buffer.size_bytes for buffer in held if not buffer.is_output)
            begin = position[names[0]]
            found.append(
                WeightGradient(reduction, names, compute_us, reduction_us, held_bytes, begin)
            )
    return sorted(found, key=lambda gradient: gradient.position)


def defer_gradients(program: Program, gradients: list[WeightGradient]) -> Program:
    """``program`` with ``gradients`` moved behind all other fixed tasks; in an executable order."""
    if not gradients:
        return program
    moved = [name for gradient in johnson_order(gradients) for name in gradient.tasks]
    rest = set(moved)
    order = [task.name for task in program.schedule.tasks if task.name not in rest]
    changed = program.with_order([*order, *moved])
    return put_on_demand(changed)


def johnson_order(gradients: list[WeightGradient]) -> list[WeightGradient]:
    """First those whose compute is shorter than their reduction, shortest compute first."""
    first = [g for g in gradients if g.compute_us < g.reduction_us]
    last = [g for g in gradients if g.compute_us >= g.reduction_us]
    first.sort(key=lambda g: (g.compute_us, g.position))
    last.sort(key=lambda g: (-g.reduction_us, g.position))
    return [*first, *last]


def latest(gradients: list[WeightGradient], compute_us: float) -> list[WeightGradient]:
    """The last of ``gradients`` that together take up to ``compute_us``."""
    return _take(list(reversed(gradients)), compute_us)


def cheapest(gradients: list[WeightGradient], compute_us: float) -> list[WeightGradient]:
    """Those that hold the fewest bytes per time, up to ``compute_us`` together."""
    by_cost = sorted(gradients, key=lambda g: (g.held_bytes / g.compute_us, -g.position))
    return _take(by_cost, compute_us)


def _take(gradients: list[WeightGradient], compute_us: float) -> list[WeightGradient]:
    taken: list[WeightGradient] = []
    for gradient in gradients:
        if gradient.compute_us <= compute_us:
            taken.append(gradient)
            compute_us -= gradient.compute_us
    return taken
