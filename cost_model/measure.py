"""Time collectives on the running process group: the measurements of a live calibration.

Every rank must call `measure_collectives`; every rank gets the same list, so that all ranks fit the
same cluster. A time is that of the slowest rank in the least disturbed of a few rounds; a round
visits every case once, so that a disturbance of the machine does not fall on one case alone. A
bounded number of sizes is measured.
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
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from inductor_overlap.cost_model.calibrate import Measurement
from inductor_overlap.cost_model.collective_time import COLLECTIVE_KINDS, check_collective

DEFAULT_SIZES = tuple(2**exponent for exponent in range(10, 27, 2))
"""1 KiB to 64 MiB in steps of 4: nine sizes a collective."""
ROUNDS = 5
_ITEM_BYTES = 4

Progress = Callable[[int, int], None]
"""Called with (collectives done, all collectives) after each one."""


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
    cases = [(kind, _shared_size(size)) for kind in kinds for size in sizes_bytes]
    total = ROUNDS * len(cases)
    own_us = torch.zeros(ROUNDS, len(cases), dtype=torch.float64)
    for done in range(total):
        round_, case = divmod(done, len(cases))
        kind, size_bytes = cases[case]
        own_us[round_, case] = _time_us(kind, size_bytes // _ITEM_BYTES, torch.device(device))
        if progress is not None:
            progress(done + 1, total)
    slowest_us = own_us.to(device)
    dist.all_reduce(slowest_us, op=dist.ReduceOp.MAX)
    least_us = slowest_us.amin(dim=0)
    return [
        Measurement(kind, size_bytes, num_nodes, ranks_per_node, float(time_us))
        for (kind, size_bytes), time_us in zip(cases, least_us, strict=True)
    ]


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


def _time_us(kind: str, items: int, device: torch.device) -> float:
    """Time (us) of one run on this rank, after one that warms up buffers and connections."""
    run = _collective(kind, items, device)
    run()
    dist.barrier()
    _synchronise(device)
    begin = time.perf_counter()
    run()
    _synchronise(device)
    return (time.perf_counter() - begin) * 1e6


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
