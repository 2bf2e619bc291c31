"""Traces of torch.profiler: what is a measurement in them, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from inductor_overlap.cost_model.measurements import CollectiveMeasurement, MatmulMeasurement
from inductor_overlap.cost_model.trace import Traces

pytestmark = pytest.mark.quick


def nccl(name: str, dur: float, items: tuple[int, int], **args: Any) -> dict[str, Any]:
    """A kernel as Kineto writes it; ``items`` are the counts in and out."""
    described = {
        "Collective name": name,
        "In msg nelems": items[0],
        "Out msg nelems": items[1],
        "Group size": 4,
        "dtype": "BFloat16",
        "Process Group Ranks": "[0, 1, 2, 3]",
        **args,
    }
    return {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "dur": dur, "args": described}


def matmul(name: str, dims: list[list[int]], external_id: int, dtype: str = "c10::BFloat16") -> Any:
    types = [dtype] * len(dims)
    args = {"External id": external_id, "Input Dims": dims, "Input type": types}
    return {"ph": "X", "cat": "cpu_op", "name": name, "dur": 900.0, "args": args}


def launched(external_id: int, dur: float) -> dict[str, Any]:
    args = {"External id": external_id}
    return {"ph": "X", "cat": "kernel", "name": "gemm", "dur": dur, "args": args}


def write(path: Path, *events: dict[str, Any], **more: Any) -> Path:
    text = json.dumps({"traceEvents": [*events, {"ph": "M"}], **more}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_collectives_have_kind_size_placement_and_the_lower_quartile_of_their_times(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path / "rank0.json.gz",
        *(nccl("_allgather_base", dur, (256, 1024)) for dur in (50.0, 20.0, 21.0, 30.0, 90.0)),
        nccl("_reduce_scatter_base", 33.0, (1024, 256)),
        nccl("allreduce_coalesced", 44.0, (512, 512), dtype="Float"),
        nccl("all_to_allv", 55.0, (1024, 1024), dtype="Float8_e4m3fn"),
        nccl("broadcast", 1.0, (8, 8)),
        nccl("_allgather_base", 5.0, (8, 8), **{"Group size": 1, "Process Group Ranks": "[2]"}),
        deviceProperties=[{"id": 0, "name": "NVIDIA H200"}],
    )
    traces = Traces([path])
    assert traces.device_name == "NVIDIA H200"
    assert traces.measurements(gpus_per_node=2) == [
        # 1024 bf16 items in all; five times, of which the second least counts.
        CollectiveMeasurement("all_gather", 2048, 2, 2, 21.0),
        CollectiveMeasurement("all_reduce", 2048, 2, 2, 44.0),
        CollectiveMeasurement("all_to_all", 1024, 2, 2, 55.0),
        CollectiveMeasurement("reduce_scatter", 2048, 2, 2, 33.0),
    ]


def test_long_lists_of_ranks_are_continued_with_their_stride(tmp_path: Path) -> None:
    # One rank of every node of eight, shortened as Kineto does.
    ranks = {"Group size": 64, "Process Group Ranks": "[0, 8, 16, ..., 504]"}
    path = write(tmp_path / "t.json", nccl("allreduce", 9.0, (64, 64), **ranks))
    (found,) = Traces([path]).measurements(gpus_per_node=8)
    assert found == CollectiveMeasurement("all_reduce", 128, 64, 1, 9.0)


def test_a_matmul_takes_what_its_kernels_take(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json",
        matmul("aten::mm", [[128, 64], [64, 32]], 1),
        launched(1, 10.0),
        launched(1, 2.0),  # split-K: two kernels of one op
        matmul("aten::addmm", [[32], [128, 64], [64, 32], [], []], 2),
        launched(2, 14.0),
        matmul("aten::bmm", [[4, 128, 64], [4, 64, 32]], 3),
        launched(3, 30.0),
        matmul("aten::mm", [[8, 8], [8, 8]], 4, dtype="float"),  # tf32 or fp32: nobody knows
        launched(4, 1.0),
        matmul("aten::mm", [[8, 8], [8, 8]], 5),  # launched nothing
        matmul("aten::relu", [[8, 8]], 6),
        launched(6, 1.0),
    )
    assert Traces([path]).measurements(gpus_per_node=8) == [
        # The median of 12 and 14 us: mm and addmm of one shape.
        MatmulMeasurement(1, 128, 32, 64, "bf16", 13.0, sustained=True),
        MatmulMeasurement(4, 128, 32, 64, "bf16", 30.0, sustained=True),
    ]


def test_external_ids_are_told_apart_by_trace(tmp_path: Path) -> None:
    shape = [[16, 16], [16, 16]]
    one = write(tmp_path / "0.json", matmul("aten::mm", shape, 7), launched(7, 4.0))
    two = write(tmp_path / "1.json", matmul("aten::mm", shape, 7), launched(7, 6.0))
    (found,) = Traces([one, two]).measurements(gpus_per_node=8)
    assert found.time_us == 5.0


def test_a_real_trace_of_a_cpu_gives_its_matmuls(tmp_path: Path) -> None:
    left, right = torch.ones(48, 32), torch.ones(32, 16)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        torch.mm(left, right)
    path = tmp_path / "cpu.json"
    profiler.export_chrome_trace(str(path))
    (found,) = Traces([path]).measurements(gpus_per_node=8)
    assert isinstance(found, MatmulMeasurement)
    assert (found.m, found.n, found.k, found.dtype) == (48, 16, 32, "fp32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "bad.json is no trace"),
        ("[]", "bad.json is no trace: it has no traceEvents"),
        ('{"traceEvents": []}', r"no NCCL kernel and no matmul .* record_shapes=True"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Traces([path]).measurements(gpus_per_node=8)
