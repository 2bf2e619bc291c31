"""What a set of buckets makes of a program, before any graph is touched.

`bucket_program` writes the same tasks that `bucketing.merge_bucket` writes nodes for. A packed
bucket: one pack, one start, one wait, and for gathers one unpack copy per member. The unpack task
takes the name of the member's wait, so whatever depended on that wait depends on the unpacked
result. A cast in front of a member becomes part of the packing kernel: its task stays, without time
or buffer. A coalesced bucket: one start with the inputs and outputs of all members, one wait, and
for each member a task without time in place of its own wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inductor_overlap.cost_model.schedule import Buffer, Task
from inductor_overlap.passes.plan import Bucket
from inductor_overlap.passes.program import FreeCollective, Program
from inductor_overlap.passes.reorder import put_on_demand


def bucket_program(program: Program, buckets: Sequence[Bucket]) -> Program:
    """``program`` with the members of each bucket merged, in an executable order.

    Fixed tasks keep their order; gathers come just before their first reader, reductions start
    as soon as their inputs exist and are waited for at once.

    Raises:
        ValueError: A member is unknown, occurs twice, or differs from the others in bucket key.
    """
    if not buckets:
        return program
    _check(program, buckets)
    parts = [
        _coalesce(program, bucket)
        if bucket.form == "coalesced"
        else _merge(program, bucket, is_fed_by_bucket(program, bucket, buckets))
        for bucket in buckets
    ]
    return _assemble(program, parts)


def _check(program: Program, buckets: Iterable[Bucket]) -> None:
    seen: set[str] = set()
    for bucket in buckets:
        unknown = [name for name in bucket.members if name not in program.by_name]
        again = [name for name in bucket.members if name in seen]
        keys = {program.by_name[name].bucket_key for name in bucket.members if not unknown}
        if unknown or again or len(keys) > 1 or len(bucket.members) < 2:
            raise ValueError(
                f"bucket {bucket.name!r} needs at least two free collectives of one bucket key, "
                f"each in one bucket; unknown {unknown}, repeated {again}, keys {sorted(keys)}"
            )
        seen.update(bucket.members)


@dataclass(frozen=True)
class _Merged:
    collective: FreeCollective
    tasks: tuple[Task, ...]
    buffers: tuple[Buffer, ...]
    replaced_buffers: dict[str, str]
    """Buffers of the members that become part of a bucket's buffer."""
    gone: frozenset[str]
    """Names of tasks that exist no longer."""
    absorbed: frozenset[str]
    """Names of tasks that the packing kernel does."""


def members_of(program: Program, bucket: Bucket) -> list[FreeCollective]:
    """The collectives of ``bucket``, in payload order."""
    return [program.by_name[name] for name in bucket.members]


def is_fed_by_bucket(program: Program, bucket: Bucket, buckets: Iterable[Bucket]) -> bool:
    """True if a packed bucket of ``buckets`` leaves its payload in one tensor (HSDP)."""
    members = members_of(program, bucket)
    followed = tuple(member.follows for member in members)
    if not all(followed):
        return False
    if not any(other.members == followed and other.form == "packed" for other in buckets):
        return False
    tasks = program.schedule.by_name
    return all(program.by_name[m.follows].wait in tasks[m.name].deps for m in members)


def _coalesce(program: Program, bucket: Bucket) -> _Merged:
    tasks = program.schedule.by_name
    members = members_of(program, bucket)
    starts = [tasks[member.name] for member in members]
    merged = _merged_collective(bucket, members)
    sizes_bytes = [member.size_bytes for member in members]
    writes = tuple(name for start in starts for name in start.writes)
    start = replace(
        starts[0],
        name=merged.name,
        duration_us=program.prices.coalesced_us(merged.kind, sizes_bytes, merged.ranks),
        wire_us=sum(start.wire_us for start in starts),
        link_us=sum(start.link_us for start in starts),
        latency_us=max(start.latency_us for start in starts),
        deps=tuple(dict.fromkeys(dep for start in starts for dep in start.deps)),
        reads=tuple(dict.fromkeys(name for start in starts for name in start.reads)),
        writes=writes,
    )
    wait = Task(merged.wait, "wait", collective=merged.name, reads=writes)
    ended = [
        _after_wait(tasks[member.wait], member.name, merged.wait, reads=old_start.writes)
        for member, old_start in zip(members, starts, strict=True)
    ]
    gone = frozenset(member.name for member in members)
    return _Merged(merged, (start, wait, *ended), (), {}, gone, frozenset())


def _after_wait(wait: Task, start: str, bucket_wait: str, **fields: Any) -> Task:
    """What stands for the ``wait`` of a member's ``start``: a task behind the bucket's wait."""
    deps = tuple(dep for dep in wait.deps if dep != start)
    return Task(wait.name, deps=(bucket_wait, *deps), **fields)


def _merge(program: Program, bucket: Bucket, fed_by_bucket: bool) -> _Merged:
    members = members_of(program, bucket)
    starts = [program.schedule.by_name[member.name] for member in members]
    waits = [program.schedule.by_name[member.wait] for member in members]
    merged = _merged_collective(bucket, members)
    pack, start, packed = _pack_and_start(program, merged, members, fed_by_bucket)
    output = Buffer(f"{bucket.name}.output", merged.output_bytes)
    start = replace(start, writes=(output.name,))
    wait = Task(merged.wait, "wait", collective=merged.name, reads=(output.name,))
    unpack = [
        _unpack(program, member, wait_task, old_start, merged, output)
        for member, wait_task, old_start in zip(members, waits, starts, strict=True)
    ]
    replaced = {
        name: output.name
        for member, old in zip(members, starts, strict=True)
        if not _copies_out(member)
        for name in old.writes
    }
    kept = any(program.schedule.buffers[name].is_output for name in replaced)
    buffers = [*packed, replace(output, is_output=kept)]
    gone = frozenset(member.name for member in members)
    absorbed = frozenset(member.absorbed for member in members if pack and member.absorbed)
    return _Merged(merged, (*pack, start, wait, *unpack), tuple(buffers), replaced, gone, absorbed)


def _merged_collective(bucket: Bucket, members: Sequence[FreeCollective]) -> FreeCollective:
    modules = list(dict.fromkeys(member.module for member in members))
    return replace(
        members[0],
        name=bucket.name,
        wait=f"{bucket.name}.wait",
        size_bytes=sum(member.size_bytes for member in members),
        input_bytes=sum(member.input_bytes for member in members),
        output_bytes=sum(member.output_bytes for member in members),
        fqn=None,
        module=modules[0] if len(modules) == 1 else None,
        unpack_is_fused=False,
        absorbed="",
        pack_saves_bytes=0,
        can_merge=False,
        members=bucket.members,
    )


def _pack_and_start(
    program: Program,
    merged: FreeCollective,
    members: Sequence[FreeCollective],
    fed_by_bucket: bool,
) -> tuple[list[Task], Task, list[Buffer]]:
    tasks = program.schedule.by_name
    starts = [tasks[member.name] for member in members]
    deps = tuple(dict.fromkeys(dep for start in starts for dep in start.deps))
    reads = tuple(dict.fromkeys(name for start in starts for name in start.reads))
    prices = program.prices
    start = replace(
        starts[0],
        name=merged.name,
        duration_us=prices.collective_us(merged.kind, merged.size_bytes, merged.ranks),
        wire_us=sum(start.wire_us for start in starts),
        link_us=program.bucket_link_us(merged, merged.size_bytes),
        deps=deps,
        reads=reads,
    )
    if fed_by_bucket:  # HSDP: the payload already lies in one tensor, as a bucket reduced it
        return [], start, []
    packed = Buffer(f"{merged.name}.packed", merged.input_bytes)
    sources = [tasks[member.absorbed or member.name] for member in members]
    pack = Task(
        f"{merged.name}.pack",
        duration_us=_pack_us(program, members),
        deps=deps,
        reads=tuple(dict.fromkeys(name for source in sources for name in source.reads)),
        writes=(packed.name,),
    )
    return [pack], replace(start, deps=(pack.name,), reads=(packed.name,)), [packed]


def _unpack(
    program: Program,
    member: FreeCollective,
    wait: Task,
    old_start: Task,
    merged: FreeCollective,
    output: Buffer,
) -> Task:
    """The task that stands for a member's wait: a copy for a gather, a view for a reduction."""
    return _after_wait(
        wait,
        member.name,
        merged.wait,
        duration_us=_unpack_us(program, member),
        reads=(output.name,),
        writes=old_start.writes if _copies_out(member) else (),
    )


def _pack_us(program: Program, members: Iterable[FreeCollective]) -> float:
    moved_bytes = sum(2 * member.input_bytes - member.pack_saves_bytes for member in members)
    return program.prices.copy_us(max(0, moved_bytes) // 2)


def _unpack_us(program: Program, member: FreeCollective) -> float:
    return program.prices.copy_us(member.output_bytes) if _copies_out(member) else 0.0


def copies_us(program: Program, bucket: Bucket, fed_by_bucket: bool) -> float:
    """Time (us) that packing and unpacking take ``bucket`` beyond what its members take alone.

    A cast that the packing kernel absorbs is saved; it may make this negative.
    """
    members = members_of(program, bucket)
    unpack_us = sum(_unpack_us(program, member) for member in members)
    if fed_by_bucket:
        return unpack_us
    absorbed = [member.absorbed for member in members if member.absorbed]
    saved_us = sum(program.schedule.by_name[name].duration_us for name in absorbed)
    return _pack_us(program, members) + unpack_us - saved_us


def _copies_out(member: FreeCollective) -> bool:
    return member.is_gather and not member.unpack_is_fused


def _assemble(program: Program, parts: Sequence[_Merged]) -> Program:
    gone = frozenset[str]().union(*(part.gone for part in parts))
    renamed = {old: new for part in parts for old, new in part.replaced_buffers.items()}
    merged_into = {name: part.collective.name for part in parts for name in part.gone}
    merged_waits = {task.name for part in parts for task in part.tasks}
    absorbed = frozenset[str]().union(*(part.absorbed for part in parts))
    unwritten = {name for task in absorbed for name in program.schedule.by_name[task].writes}
    kept = [
        _absorbed(task, unwritten) if task.name in absorbed else _unread(task, unwritten)
        for task in program.schedule.tasks
        if task.name not in gone and task.name not in merged_waits
    ]
    kept = [_renamed(task, renamed, merged_into) for task in kept]
    new = [_renamed(task, renamed, merged_into) for part in parts for task in part.tasks]
    replaced = renamed.keys() | unwritten
    buffers = {name: b for name, b in program.schedule.buffers.items() if name not in replaced}
    buffers |= {buffer.name: buffer for part in parts for buffer in part.buffers}
    movable = (program.movable - gone) | {task.name for task in new}
    singles = [c for c in program.collectives if c.name not in gone]
    schedule = replace(program.schedule, tasks=(*kept, *new), buffers=buffers)
    merged = replace(
        program,
        schedule=schedule,
        collectives=(*singles, *(part.collective for part in parts)),
        movable=frozenset(movable),
        weight_gradients={},
        is_on_demand=False,
    )
    return put_on_demand(merged)


def _absorbed(task: Task, unwritten: Collection[str]) -> Task:
    """``task`` done by a packing kernel: it takes no time and writes nothing."""
    return replace(_unread(task, unwritten), duration_us=0.0, writes=())


def _unread(task: Task, unwritten: Collection[str]) -> Task:
    """``task`` without reads of buffers that do not exist: views of what was absorbed."""
    if not any(name in unwritten for name in task.reads):
        return task
    return replace(task, reads=tuple(name for name in task.reads if name not in unwritten))


def _renamed(task: Task, buffers: dict[str, str], starts: dict[str, str]) -> Task:
    """``task`` with buffers and starts renamed; what it names twice by then, it names once."""
    if buffers.keys().isdisjoint(task.reads) and starts.keys().isdisjoint(task.deps):
        return task
    reads = tuple(dict.fromkeys(buffers.get(name, name) for name in task.reads))
    deps = tuple(dict.fromkeys(starts.get(name, name) for name in task.deps))
    return replace(task, reads=reads, deps=deps)
