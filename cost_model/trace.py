"""Read measurements off traces of torch.profiler (Chrome traces, as Kineto writes them).

NCCL kernels carry their collective, element counts, dtype and ranks as arguments; the kernels of a
matmul are found by the external id of the op that launched them, and its shapes are there if the
profiler ran with ``record_shapes=True``. Several kernels of one shape count as one measurement: of
collectives the lower quartile, since a kernel waits for the last rank to arrive, of matmuls the
median. A trace without any GPU kernel is read as one of a CPU: there an op's own time counts.

Names of the arguments: ``torch/csrc/profiler/util.h``. Refused (``ValueError``): what is no trace,
a trace with neither collectives nor matmuls in it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, cast

from inductor_overlap.cost_model.compute_time import dtype_name
from inductor_overlap.cost_model.measurements import (
    CollectiveMeasurement,
    MatmulMeasurement,
    Measurement,
)
from inductor_overlap.cost_model.placement import placement

_KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}
"""Collective names without underscores begin with one of these."""
_ITEM_BYTES = {
    "double": 8,
    "long": 8,
    "float": 4,
    "int": 4,
    "half": 2,
    "bfloat16": 2,
    "short": 2,
    "byte": 1,
    "char": 1,
    "bool": 1,
    "float8": 1,
}
_MATMULS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_scaled_mm": 0,
}
"""Ops and the position of their first factor."""

_Event = Mapping[str, Any]


class Traces:
    """The traces of a job, of any of its ranks; ``.json`` or ``.json.gz``.

    Attributes:
        device_name: what the CUDA runtime calls the GPUs; None if no trace says.

    Raises:
        ValueError: a file is no trace.
        OSError: a file cannot be read.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        contents = [_read(path) for path in paths]
        self.device_name = next((n for c in contents if (n := _device_name(c))), None)
        # External ids are numbered anew in each trace, so each is kept apart.
        self._events = [list(_complete_events(content)) for content in contents]

    def measurements(self, gpus_per_node: int) -> list[Measurement]:
        """Collectives and matmuls, each shape once.

        Args:
            gpus_per_node: GPUs (ranks) of a node; ranks are numbered node by node.

        Raises:
            ValueError: there are none.
        """
        found: list[Measurement] = [*_collectives(chain(*self._events), gpus_per_node)]
        found += _matmuls(self._events)
        if not found:
            raise ValueError(
                "no NCCL kernel and no matmul with its shapes is in the trace; record it with "
                "profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], "
                "record_shapes=True)"
            )
        return found


def _read(path: Path) -> _Event:
    raw = path.read_bytes()
    try:
        content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is no trace: {error}") from error
    if not isinstance(content, dict) or "traceEvents" not in content:
        raise ValueError(f"{path} is no trace: it has no traceEvents")
    return cast("_Event", content)


def _complete_events(content: _Event) -> Iterator[_Event]:
    for event in cast("Iterable[_Event]", content["traceEvents"]):
        if event.get("ph") == "X" and float(event.get("dur", 0)) > 0:
            yield event


def _device_name(content: _Event) -> str | None:
    devices = cast("list[_Event]", content.get("deviceProperties", []))
    return str(devices[0]["name"]) if devices and "name" in devices[0] else None


def _arguments(event: _Event) -> _Event:
    return cast("_Event", event.get("args", {}))


def _is_kernel(event: _Event) -> bool:
    return event.get("cat") == "kernel"


def _collectives(events: Iterable[_Event], gpus_per_node: int) -> Iterator[CollectiveMeasurement]:
    times_us: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for event in events:
        described = _collective(_arguments(event), gpus_per_node) if _is_kernel(event) else None
        if described is not None:
            times_us[described].append(float(event["dur"]))
    for described, samples_us in sorted(times_us.items()):
        lower_quartile_us = sorted(samples_us)[(len(samples_us) - 1) // 4]
        yield CollectiveMeasurement(*described, lower_quartile_us)


def _collective(arguments: _Event, gpus_per_node: int) -> tuple[str, int, int, int] | None:
    """(kind, size, nodes, ranks per node) of an NCCL kernel; None for any other."""
    spelled = str(arguments.get("Collective name", "")).replace("_", "").lower()
    kind = next((kind for name, kind in _KINDS.items() if spelled.startswith(name)), None)
    item_bytes = _ITEM_BYTES.get(str(arguments.get("dtype", "")).lower().split("_")[0])
    if kind is None or item_bytes is None:
        return None
    ranks = _ranks(arguments)
    items_in, items_out = (int(arguments.get(f"{side} msg nelems", 0)) for side in ("In", "Out"))
    # One side of a gather or scatter holds the share of a rank, the other all of them.
    items = items_in if kind in ("all_reduce", "all_to_all") else max(items_in, items_out)
    if len(ranks) < 2 or items <= 0:
        return None
    return kind, items * item_bytes, *placement(ranks, gpus_per_node)


def _ranks(arguments: _Event) -> tuple[int, ...]:
    """Global ranks of the group; long lists are shortened in traces, and then continued evenly."""
    spelled = str(arguments.get("Process Group Ranks", ""))
    listed = tuple(int(number) for number in re.findall(r"\d+", spelled))
    size = int(arguments.get("Group size", len(listed)))
    if len(listed) == size:
        return listed
    first = listed[0] if listed else 0
    stride = listed[1] - first if len(listed) > 1 else 1
    return tuple(range(first, first + size * stride, stride))


def _matmuls(traces: Iterable[Sequence[_Event]]) -> Iterator[MatmulMeasurement]:
    times_us: dict[tuple[int, int, int, int, str], list[float]] = defaultdict(list)
    for events in traces:
        launched_us = _kernel_us_by_op(events)
        for event in events:
            shape = _matmul(event, on_gpu=bool(launched_us))
            own_us = launched_us.get(_external_id(event)) if launched_us else float(event["dur"])
            if shape is not None and own_us is not None:
                times_us[shape].append(own_us)
    for shape, samples_us in sorted(times_us.items()):
        yield MatmulMeasurement(*shape, median(samples_us), sustained=True)


def _kernel_us_by_op(events: Iterable[_Event]) -> dict[int, float]:
    """Time (us) of the kernels that each op launched, by external id."""
    launched_us: dict[int, float] = defaultdict(float)
    for event in events:
        if _is_kernel(event):
            launched_us[_external_id(event)] += float(event["dur"])
    return dict(launched_us)


def _external_id(event: _Event) -> int:
    return int(_arguments(event).get("External id", -1))


def _matmul(event: _Event, *, on_gpu: bool) -> tuple[int, int, int, int, str] | None:
    """(batch, m, n, k, dtype) of a matmul op whose shapes were recorded; None for other events.

    None for fp32 on a GPU too: a trace does not say whether it ran as tf32.
    """
    position = _MATMULS.get(str(event.get("name")))
    dims = cast("list[list[int]]", _arguments(event).get("Input Dims", []))
    types = cast("list[str]", _arguments(event).get("Input type", []))
    if position is None or len(dims) < position + 2 or len(types) < position + 2:
        return None
    left, right = dims[position], dims[position + 1]
    dtype = _dtype(types[position])
    if len(left) not in (2, 3) or len(left) != len(right) or dtype is None:
        return None
    if on_gpu and dtype == "fp32":
        return None
    batch = left[0] if len(left) == 3 else 1
    shape = batch, left[-2], right[-1], left[-1], dtype
    return shape if min(shape[:4]) > 0 else None


def _dtype(spelled: str) -> str | None:
    """The dtype of a matmul, as in ``c10::BFloat16`` or ``float``; None if it is no number."""
    try:
        return dtype_name(spelled.rsplit("::", 1)[-1].lower())
    except ValueError:
        return None
