"""Turns any `nn.Module` into a fully traceable data-parallel model.

Every parameter becomes a DTensor shard; reading it gathers the full tensor, and the backward of
that read reduces the gradient. One all-gather and one reduce-scatter per parameter: merging and
hiding them is the compiler's work, not this module's. The idea is SimpleFSDP's (arXiv 2411.00284).

Refuses, with a `ValueError` that says what was expected: an unknown mode, a mesh of the wrong
rank or device, a shard dimension a parameter does not have, a model that was sharded before.
"""

from __future__ import annotations

from inductor_overlap.simple_fsdp.accumulate import accumulate_gradients
from inductor_overlap.simple_fsdp.initialize import initializing
from inductor_overlap.simple_fsdp.policy import MixedPrecisionPolicy
from inductor_overlap.simple_fsdp.shard import simple_fsdp

__all__ = ["MixedPrecisionPolicy", "accumulate_gradients", "initializing", "simple_fsdp"]
