"""The benchmarks as modules, for tests of what they compute; they are scripts, not a package."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def import_benchmark(name: str) -> Any:
    """The module ``name`` of the folder `BENCHMARKS`, whose modules import each other by name."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return import_module(name)
