"""What stays gathered between forward and backward, on graphs whose bytes can be added up.

Every activation is 8 x 32 floats, 1 KiB; a parameter of n rows is n / 8 KiB when gathered.
"""

from __future__ import annotations

import pytest
import torch.fx as fx
from support.graphs import GraphBuilder, TestPrices

from inductor_overlap.passes.keep_gathered import keep_gathered

pytestmark = pytest.mark.quick

KIB = 1024


def layers(*columns: int, backward: bool) -> fx.Graph:
    """x @ w1 @ w1' @ w2 @ w2' ..., each w of 32 rows and its own width; or the gradient of x."""
    b = GraphBuilder()
    names = [f"w{i}" for i in range(len(columns))]
    weights = [b.parameter(name, 8, width) for name, width in zip(names, columns, strict=True)]
    value = b.input("tangents_1" if backward else "x", 8, 32)
    for weight in reversed(weights) if backward else weights:
        gathered = b.gather(weight)
        value = b.mm(b.mm(value, gathered), b.transpose(gathered))
    b.output(value)
    return b.graph


def kept(*columns: int, limit: float | None, **prices: float) -> list[str]:
    """Which of the parameters (1, 2, ...) stay gathered within ``limit`` KiB."""
    graphs = [layers(*columns, backward=backward) for backward in (False, True)]
    limit_bytes = None if limit is None else limit * KIB
    found = keep_gathered(*graphs, TestPrices(**prices), limit_bytes)  # type: ignore[arg-type]
    return sorted(name.removeprefix("primals_") for name in found)


def test_the_last_parameter_is_free_where_it_is_used_last_and_first() -> None:
    """Backward begins with it, so nothing else is live beside it that would not be anyway."""
    assert kept(32, 32, limit=None) == ["2"]


@pytest.mark.parametrize(("limit", "expected"), [(9, ["2"]), (11, ["1", "2"])])
def test_what_is_kept_fits_beside_all_that_is_live(limit: int, expected: list[str]) -> None:
    """While w2 is used: w2 4, two activations 2. With w1 beside it 10, and a reserve of 0.24."""
    assert kept(32, 32, limit=limit) == expected


def test_the_most_time_per_byte_comes_first() -> None:
    """w1 takes 2 + 32 us for 2 KiB, w2 2 + 64 us for 4: latency makes w1 worth more per byte.

    Beside w3 (4 and two activations) there is room for one of them: 10.2 but not 12 KiB.
    """
    assert kept(16, 32, 32, limit=11) == ["1", "3"]


def test_of_equals_what_backward_needs_first_is_kept() -> None:
    assert kept(32, 32, 32, limit=11) == ["2", "3"]
    assert kept(16, 32, 32, limit=11, latency_us=0.0) == ["2", "3"]


def test_more_memory_never_keeps_less() -> None:
    counts = [len(kept(32, 32, 32, 32, limit=limit)) for limit in (7, 9, 11, 15, 19, 40)]
    assert counts == [1, 1, 2, 3, 4, 4]
