"""Live bytes of a schedule: which buffers exist while each task runs.

The order is replayed exactly as the allocator sees it: a task's outputs are allocated before its
inputs are freed, and what a collective reads and writes stays allocated until its wait, because
the communicator's stream may touch it until then. Sizes come from `Buffer` alone; nothing here
knows of parameters or of the allocator's rounding. Refuses (``ValueError``) an order that reads a
buffer before it exists.
"""

from __future__ import annotations

from itertools import accumulate

from inductor_overlap.cost_model.schedule import Schedule


def memory_profile(schedule: Schedule) -> list[int]:
    """Live bytes during each task, in program order: its outputs and its inputs included.

    Raises:
        ValueError: A task reads a buffer that is no input and that no earlier task wrote, or
            writes one that is unknown or already written.
    """
    if not schedule.tasks:
        return []
    change_bytes = [0] * (len(schedule.tasks) + 1)
    for name, (first, last) in buffer_lifetimes(schedule).items():
        size_bytes = schedule.buffers[name].size_bytes
        change_bytes[first] += size_bytes
        change_bytes[last + 1] -= size_bytes
    return list(accumulate(change_bytes[:-1]))


def buffer_lifetimes(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """First and last program position at which each buffer is allocated, both inclusive.

    Inputs live from position 0, outputs to the last one; an input that nothing reads lives to
    the end (no kernel of this graph frees it). Buffers that nothing writes are absent.

    Raises:
        ValueError: As `memory_profile`.
    """
    last_position = len(schedule.tasks) - 1
    buffers = schedule.buffers
    first = {name: 0 for name, buffer in buffers.items() if buffer.is_input}
    last = dict.fromkeys(first, -1)
    release_at = {
        task.collective: at for at, task in enumerate(schedule.tasks) if task.kind == "wait"
    }
    for position, task in enumerate(schedule.tasks):
        held_until = release_at.get(task.name, position)
        for name in task.writes:
            if name in first or name not in buffers:
                raise ValueError(f"task {task.name!r} writes unknown or written buffer {name!r}")
            first[name] = position
            last[name] = held_until
        for name in task.reads:
            if name not in first:
                raise ValueError(f"task {task.name!r} reads buffer {name!r} before it is written")
            if held_until > last[name]:
                last[name] = held_until
    for name in first:
        if buffers[name].is_output or last[name] < 0:
            last[name] = last_position
    return {name: (start, last[name]) for name, start in first.items()}
