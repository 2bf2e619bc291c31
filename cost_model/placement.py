"""Where the ranks of a group run, and which groups are like it.

A device mesh cuts the ranks of a job into groups of one shape for each of its dimensions. Ranks of
one job are in different ones, and a group that straddles nodes is slower than its like on one node.
Since all of them run the same plan, step by step together, the slowest decides for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch.distributed as dist


def world_size() -> int:
    """Ranks of the running job; 0 if none runs."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def placement(ranks: Sequence[int], gpus_per_node: int) -> tuple[int, int]:
    """(nodes that hold a rank, most ranks on one of them); ranks are numbered node by node."""
    per_node = Counter(rank // gpus_per_node for rank in ranks)
    return max(1, len(per_node)), max(per_node.values(), default=1)


@lru_cache(maxsize=1024)
def groups_like(ranks: tuple[int, ...], num_ranks: int) -> tuple[Sequence[int], ...]:
    """The groups of the mesh dimension that ``ranks`` is one of, by first rank.

    Of a mesh that covers ranks from 0 on, row by row. Only ``ranks`` itself if it is evenly spaced
    in no such mesh of ``num_ranks``.
    """
    size = len(ranks)
    step = ranks[1] - ranks[0] if size > 1 else 1
    is_even = size > 0 and step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step))
    block = size * step
    if not is_even or ranks[0] % block >= step or ranks[-1] >= num_ranks:
        return (ranks,)
    begins = range(0, num_ranks - block + 1, block)
    firsts = (first for begin in begins for first in range(begin, begin + step))
    return tuple(range(first, first + block, step) for first in firsts) or (ranks,)


@lru_cache(maxsize=1024)
def slowest_placement(
    ranks: tuple[int, ...], gpus_per_node: int, num_ranks: int
) -> tuple[int, int]:
    """`placement` of the group like ``ranks`` that is on most nodes, taken for the slowest."""
    return max(placement(like, gpus_per_node) for like in groups_like(ranks, num_ranks))
