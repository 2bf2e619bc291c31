"""The public measurements of ``benchmarks/data``, named as the product's profiles name them.

Every row carries its source. ``data/README.md`` says what the columns mean and what was left out.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.compute_time import dtype_name

DATA = Path(__file__).parent / "data"
TRAY_GPUS = ("gh200", "gb200", "gb300")
"""GPUs that sit four to a node."""
GEMM_GPUS = {
    "A100-80GB": "a100",
    "A100-SXM4-80GB": "a100",
    "H100 80GB HBM3": "h100",
    "H100-80GB": "h100",
    "H200": "h200",
    "B200": "b200",
    "B300 SXM6": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
}
ATTENTION_GPUS = GEMM_GPUS | {
    "H200 (per README lock-clock example)": "h200",
    "SM100 (B200-class)": "b200",
    "H100": "h100",
}
FLASH2 = ("pyt_flash_attention", "flash_attention", "PyTorch SDPA flash (FA2)")
"""Implementations that are FlashAttention 2, whatever the GPU."""
SIZE_BANDS = ("below 1 MB", "1-32 MB", "32 MB and more")


@dataclass(frozen=True)
class CollectivePoint:
    """One line of an nccl-tests log."""

    source: str
    gpu: str
    cluster: Cluster
    num_nodes: int
    ranks_per_node: int
    kind: str
    size_bytes: int
    time_us: float
    weight: float = 1.0

    @property
    def held_out_with(self) -> str:
        """What is left out together: all logs of one repository, one machine of a data base."""
        match = re.match(r"https?://github\.com/([^/]+/[^/]+)", self.source)
        if match is None or "aiconfigurator" in self.source:
            return self.source
        return match[1]

    @property
    def size_band(self) -> str:
        if self.size_bytes < 1e6:
            return SIZE_BANDS[0]
        return SIZE_BANDS[1] if self.size_bytes < 32e6 else SIZE_BANDS[2]


@dataclass(frozen=True)
class MatmulPoint:
    source: str
    gpu: str
    dtype: str
    m: int
    n: int
    k: int
    time_us: float

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class AttentionPoint:
    source: str
    gpu: str
    dtype: str
    backward: bool
    causal: bool
    shape: tuple[int, int, int, int, int, int]
    """batch, query heads, key heads, queries, keys, head dim"""
    head_dim_v: int
    flash2: bool
    time_us: float


def read_collectives() -> list[CollectivePoint]:
    rows = _read("nccl_points.csv")
    curves = Counter(_curve(row) for row in rows)
    return [_collective(row, curves[_curve(row)]) for row in rows]


def _curve(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[c] for c in ("source_url", "collective", "n_nodes", "ranks_per_node"))


def _collective(row: dict[str, str], curve_length: int) -> CollectivePoint:
    gpu = row["gpu"].strip("?")
    by_four = gpu in TRAY_GPUS or "4gpu" in row["interconnect"]
    network = None if row["network"] == "none" else row["network"]
    gpus_per_node = max(4 if by_four else 8, int(row["ranks_per_node"]))
    return CollectivePoint(
        source=row["source_url"],
        gpu=gpu,
        cluster=Cluster(gpu, network, gpus_per_node),
        num_nodes=int(row["n_nodes"]),
        ranks_per_node=int(row["ranks_per_node"]),
        kind=row["collective"],
        size_bytes=int(row["size_bytes"]),
        time_us=float(row["time_us"]),
        # A long log counts less per point, so that no source outvotes the others.
        weight=min(1.5, (20 / curve_length) ** 0.5),
    )


def read_matmuls() -> list[MatmulPoint]:
    return [
        MatmulPoint(
            row["source"],
            GEMM_GPUS[row["gpu"]],
            row["dtype"],
            int(row["M"]),
            int(row["N"]),
            int(row["K"]),
            float(row["time_us"]),
        )
        for row in _read("gemm.csv")
    ]


def read_attentions() -> list[AttentionPoint]:
    columns = ["batch", "q_heads", "kv_heads", "seq_q", "seq_kv", "head_dim_qk", "head_dim_v"]
    points: list[AttentionPoint] = []
    for row in _read("attention.csv"):
        if row["gpu"] not in ATTENTION_GPUS or row["impl"] == "pyt_math":
            continue
        batch, heads, kv_heads, queries, keys, dim, dim_v = (int(row[c]) for c in columns)
        points.append(
            AttentionPoint(
                row["source"],
                ATTENTION_GPUS[row["gpu"]],
                dtype_name(row["dtype"]),
                row["pass"] == "bwd",
                row["causal"] == "True",
                (batch, heads, kv_heads, queries, keys, dim),
                dim_v,
                row["impl"] in FLASH2,
                float(row["time_us"]),
            )
        )
    return points


def _read(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
