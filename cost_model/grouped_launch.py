"""What a grouped launch of several collectives is to the communicator: size classes.

NCCL sorts the collectives of a group by size and joins those of one function, reduction and
datatype whose sizes are within a factor of four of the smallest: for each such class it chooses
algorithm and protocol once, for the bytes of all, and spreads them over the channels together
(``ncclPrepareTasks`` in https://github.com/NVIDIA/nccl/blob/master/src/enqueue.cc: "We aggregate
operations that are within 4X size of each other"). A class is priced as one collective of its
bytes, and classes as following one another. This is read from the source, not fitted to
measurements: no public log times grouped launches.
"""

from __future__ import annotations

from collections.abc import Iterable


def size_classes(sizes_bytes: Iterable[int], ratio: float) -> list[list[int]]:
    """``sizes_bytes`` in classes, smallest first; in each, all are below ``ratio`` times the first.

    A ratio of 0 joins nothing.
    """
    classes: list[list[int]] = []
    for size_bytes in sorted(sizes_bytes):
        if classes and size_bytes < ratio * classes[-1][0]:
            classes[-1].append(size_bytes)
        else:
            classes.append([size_bytes])
    return classes
