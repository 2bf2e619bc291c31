"""Choose the form of each bucket: packed, or coalesced.

Packing costs copies on the compute queue and buffers; a grouped launch may cost more time on the
link, since not all of its collectives share one latency. Which of the two is scarce differs between
programs, and nobody knows before simulating: `Forms` are three answers that a search tries. Each is
a function of padded sizes and prices, so that all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from inductor_overlap.passes.bucket_schedule import copies_us, is_fed_by_bucket, members_of
from inductor_overlap.passes.plan import Bucket
from inductor_overlap.passes.program import Program

Forms = Literal["packed", "cheaper", "fewer copies"]
"""All buckets packed; each in the form that takes less of link and compute together; each in the
form that takes less of compute."""


def with_forms(program: Program, buckets: Iterable[Bucket], forms: Forms) -> tuple[Bucket, ...]:
    """``buckets`` of ``program``'s collectives in the forms that ``forms`` means.

    An all-reduce that reduces a packed bucket further (HSDP) needs no packing; so its form depends
    on that of the bucket before it, which must come earlier in ``buckets``.
    """
    chosen: list[Bucket] = []
    for bucket in buckets:
        is_coalesced = forms != "packed" and _is_better_coalesced(program, bucket, chosen, forms)
        chosen.append(replace(bucket, form="coalesced") if is_coalesced else bucket)
    return tuple(chosen)


def _is_better_coalesced(
    program: Program, bucket: Bucket, chosen: Iterable[Bucket], forms: Forms
) -> bool:
    saved_us = copies_us(program, bucket, is_fed_by_bucket(program, bucket, chosen))
    if saved_us <= 0.0 or forms == "fewer copies":
        return saved_us > 0.0
    members = members_of(program, bucket)
    kind, ranks = members[0].kind, members[0].ranks
    sizes_bytes = [member.size_bytes for member in members]
    packed_us = program.prices.collective_us(kind, sum(sizes_bytes), ranks)
    return program.prices.coalesced_us(kind, sizes_bytes, ranks) < packed_us + saved_us
