"""Time collectives on the running process group: the measurements of a live calibration.

Every rank must call `measure_collectives`; every rank gets the same list, the median over repeats
of the slowest rank, so that all ranks fit the same cluster. A bounded number of sizes is measured.
The placement comes from the ranks' host names. Works with any backend that has the four functional
collectives (gloo, NCCL). Refused (``ValueError``): no process group, a single rank, bad sizes, an
unknown kind.
"""

# torch.distributed is partially typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import cast

import torch
import torch.distributed as dist

from inductor_overlap.cost_model.calibrate import Measurement
from inductor_overlap.cost_model.collective_time import COLLECTIVE_KINDS, check_collective

DEFAULT_SIZES = tuple(2**exponent for exponent in range(10, 27, 4))
"""1 KiB to 64 MiB in steps of 16: five sizes a collective."""
REPEATS = 7
WARM_UPS = 2
_ITEM_BYTES = 4

Progress = Callable[[int, int], None]
"""Called with (collectives done, all collectives) after each."""


def measure_collectives(
    sizes_bytes: Sequence[int] = DEFAULT_SIZES,
    kinds: Sequence[str] = COLLECTIVE_KINDS,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> list[Measurement]:
    """Times of ``kinds`` at ``sizes_bytes`` on the default process group.

    Args:
        sizes_bytes: nccl-tests sizes; rounded down to what all ranks can share equally.
        kinds: collectives to measure.
        device: of the tensors; the device of the backend.
        progress: called after each collective, on every rank.

    Raises:
        ValueError: no process group of at least two ranks, a size that is too small to share, or
                an unknown kind.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ValueError(
            "a live calibration needs a running process group of at least two ranks; start it with "
            "torchrun and call torch.distributed.init_process_group first"
        )
    for kind in kinds:
        check_collective(kind, 1, 2)
    num_nodes, ranks_per_node = _placement()
    measured: list[Measurement] = []
    cases = [(kind, size) for kind in kinds for size in sizes_bytes]
    for done, (kind, size_bytes) in enumerate(cases, start=1):
        exact_bytes = _shared_size(size_bytes)
        time_us = _slowest_us(kind, exact_bytes // _ITEM_BYTES, torch.device(device))
        measured.append(Measurement(kind, exact_bytes, num_nodes, ranks_per_node, time_us))
        if progress is not None:
            progress(done, len(cases))
    return measured


def _placement() -> tuple[int, int]:
    """(nodes, most ranks on one), by host name."""
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, platform.node())
    per_node = Counter(names)
    return len(per_node), max(per_node.values())


def _shared_size(size_bytes: int) -> int:
    share = dist.get_world_size() * _ITEM_BYTES
    if size_bytes < share:
        raise ValueError(f"a size of {size_bytes} bytes is less than {share}, one item a rank")
    return size_bytes // share * share


def _slowest_us(kind: str, items: int, device: torch.device) -> float:
    """Median over repeats of the slowest rank's time (us)."""
    run = _collective(kind, items, device)
    for _ in range(WARM_UPS):
        run()
    own = torch.tensor(list(_times_us(run, device)), dtype=torch.float64, device=device)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return median(float(value) for value in own)


def _times_us(run: Callable[[], object], device: torch.device) -> Iterator[float]:
    for _ in range(REPEATS):
        dist.barrier()
        _synchronise(device)
        begin = time.perf_counter()
        run()
        _synchronise(device)
        yield (time.perf_counter() - begin) * 1e6


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collective(kind: str, items: int, device: torch.device) -> Callable[[], object]:
    """A call of ``kind`` whose nccl-tests size is ``items`` fp32 values."""
    ranks = dist.get_world_size()
    whole = torch.ones(items, device=device)
    part = torch.ones(items // ranks, device=device)
    other = torch.empty_like(whole)
    # The names of torch 2.13 first, those it deprecates second.
    names, arguments = {
        "all_gather": (("all_gather_single", "all_gather_into_tensor"), (whole, part)),
        "reduce_scatter": (("reduce_scatter_single", "reduce_scatter_tensor"), (part, whole)),
        "all_reduce": (("all_reduce",), (whole,)),
        "all_to_all": (("all_to_all_single",), (other, whole)),
    }[kind]
    function = next(found for name in names if (found := getattr(dist, name, None)))
    return lambda: cast("Callable[..., object]", function)(*arguments)
