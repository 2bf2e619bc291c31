"""What the ranks of a job share: the device they run on, and how many of them a node holds.

Read from the running process group if there is one, else from what torchrun set. Only facts that
are the same for all ranks are used: never a rank's number, free memory or clocks. Refused
(``ValueError``): ranks on devices of different names, of which no one cluster can be made.
"""

# torch.distributed is partially typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import platform
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a job runs.

    Attributes:
        device_name: what the CUDA runtime calls the GPUs; None if ranks run on CPUs.
        num_ranks: ranks of the job.
        ranks_per_node: ranks on each node, most of them if nodes differ.
    """

    device_name: str | None
    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class _Rank:
    device_name: str | None
    host: str
    local_world_size: int | None


def read_surroundings() -> Surroundings:
    """Where this job runs; collective if a process group is running.

    Raises:
        ValueError: ranks run on devices of different names.
    """
    ranks = _all_ranks()
    names = {rank.device_name for rank in ranks}
    if len(names) > 1:
        listed = ", ".join(sorted(str(name) for name in names))
        raise ValueError(
            f"ranks run on different devices ({listed}); a cluster has one kind of device: name "
            "the slowest, as in Cluster(gpu=...)"
        )
    return Surroundings(ranks[0].device_name, len(ranks), _ranks_per_node(ranks))


def _all_ranks() -> list[_Rank]:
    own = _Rank(_device_name(), platform.node(), _count("LOCAL_WORLD_SIZE"))
    if not dist.is_initialized():
        return [own] * (_count("WORLD_SIZE") or 1)
    found: list[_Rank | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return [rank for rank in found if rank is not None]


def _device_name() -> str | None:
    """The name of this rank's GPU, if its process group runs on GPUs or there is none yet."""
    on_cpu = dist.is_initialized() and "nccl" not in dist.get_backend()
    if on_cpu or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name()


def _count(variable: str) -> int | None:
    """A count that torchrun puts into the environment of all ranks; None if it is not there."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _ranks_per_node(ranks: list[_Rank]) -> int:
    told = {rank.local_world_size for rank in ranks}
    if len(told) == 1 and (size := told.pop()) is not None:
        return min(size, len(ranks))
    return max(Counter(rank.host for rank in ranks).values())
