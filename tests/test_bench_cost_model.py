"""The benchmark of the cost model runs from a checkout, and the shipped profiles keep their errors.

The limits are the targets that the profiles were fitted for: median absolute error, in per cent.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMITS = {
    "single node 2 32 MB and more": 5,
    "single node 1 1-32 MB": 12,
    "single node 0 below 1 MB": 25,
    "multi-node 2 32 MB and more": 10,
    "multi-node 1 1-32 MB": 20,
    "multi-node 0 below 1 MB": 30,
    "a100 bf16 from 10 GFLOP": 8,
    "h100 bf16 from 10 GFLOP": 8,
    "h200 bf16 from 10 GFLOP": 8,
    "b200 bf16 from 10 GFLOP": 8,
    "a100 bf16 forward": 12,
    "h100 bf16 forward": 12,
    "h200 bf16 forward": 12,
    "b200 bf16 forward": 12,
    "h200 bf16 backward": 12,
    "b200 bf16 backward": 12,
}


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """Median absolute error of the shipped profiles by row of the benchmark's tables."""
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_cost_model.py", "--shipped"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = re.findall(r"^(\S.*?\S)\s+\d+\s+([\d.]+) \(", done.stdout, re.MULTILINE)
    return {name: float(error) for name, error in rows}


def test_every_row_is_there(errors: dict[str, float]) -> None:
    assert set(LIMITS) <= set(errors)


@pytest.mark.parametrize("row", LIMITS)
def test_the_error_is_within_its_target(errors: dict[str, float], row: str) -> None:
    assert errors[row] <= LIMITS[row]
