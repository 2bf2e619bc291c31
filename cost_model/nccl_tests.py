"""Read the logs of nccl-tests: what people have when they ask how fast their cluster is.

Kind, placement, sizes and out-of-place times are taken from the log alone. Refused
(``ValueError``): a log without rank lines or without a table, one whose collective cannot be told.

The table is described in
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from inductor_overlap.cost_model.measurements import CollectiveMeasurement

_PROGRAMS = {
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}
_RANK_LINE = re.compile(r"#\s+Rank\s+\d+\s+.*?Pid\s+\d+\s+on\s+(?P<host>\S+)\s+device")
_DEVICE = re.compile(r"\bdevice\s+\d+\s+\[\w+\]\s+(?P<name>\S.*?)\s*$", re.MULTILINE)
# size, count, type, redop, root, then out-of-place time, algbw and busbw
_TABLE_LINE = re.compile(
    r"^\s*(?P<size>\d+)\s+\d+\s+\w+\s+(?P<redop>\w+)\s+-?\d+\s+"
    r"(?P<time>[\d.]+)\s+(?P<algbw>[\d.]+)\s+(?P<busbw>[\d.]+)"
)


def read_nccl_tests(text: str, kind: str | None = None) -> list[CollectiveMeasurement]:
    """The out-of-place times of an nccl-tests log.

    Args:
        text: the log, with its "# Rank" lines: they tell nodes and ranks per node.
        kind: which collective it is; None: read from the log (program name, or the reduction
            column with the ratio of bus to algorithm bandwidth).

    Raises:
        ValueError: no rank lines, no table, or the collective cannot be told.
    """
    hosts = Counter(match["host"] for match in _RANK_LINE.finditer(text))
    if not hosts:
        raise ValueError(
            'the log has no "# Rank ... Pid ... on HOST device" lines, which tell the placement; '
            "pass the whole output of nccl-tests"
        )
    lines = [match for line in text.splitlines() if (match := _TABLE_LINE.match(line))]
    rows = [line for line in lines if int(line["size"]) > 0 and float(line["time"]) > 0]
    if not rows:
        raise ValueError(
            "the log has no nccl-tests table (size, count, type, redop, root, time, algbw, busbw)"
        )
    found = kind or _told_by_name(text) or _told_by_table(rows, hosts.total())
    nodes, local = len(hosts), max(hosts.values())
    return [
        CollectiveMeasurement(found, int(row["size"]), nodes, local, float(row["time"]))
        for row in rows
    ]


def read_device_name(text: str) -> str | None:
    """What the rank lines of a log call the GPUs; None if they do not say."""
    found = _DEVICE.search(text)
    return None if found is None else found["name"]


def _told_by_name(text: str) -> str | None:
    """The collective that the log names (program or test name), if it names one only."""
    named = {
        kind
        for word, kind in _PROGRAMS.items()
        if re.search(rf"(?<![a-z]){word}(_perf|[^a-z_]|$)", text, re.IGNORECASE | re.MULTILINE)
    }
    return named.pop() if len(named) == 1 else None


def _told_by_table(rows: Sequence[re.Match[str]], ranks: int) -> str:
    """The collective by its reduction and by bus over algorithm bandwidth.

    The ratio is 2 (n-1)/n for all-reduce and (n-1)/n for the others.
    """
    if all(row["redop"] == "none" for row in rows):
        raise ValueError(
            "the log does not name its collective and has no reduction: all-gather and all-to-all "
            'look alike; pass kind="all_gather" or kind="all_to_all"'
        )
    fastest = max(rows, key=lambda row: float(row["busbw"]))
    ratio = float(fastest["busbw"]) / max(1e-9, float(fastest["algbw"]))
    return "all_reduce" if ratio > 1.5 * (ranks - 1) / ranks else "reduce_scatter"
