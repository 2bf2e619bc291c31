"""How a sharded parameter becomes a full tensor when it is read, and its gradient comes back.

Forward: cast, all-gather. Backward: cast, reduce-scatter that averages over ranks, cast back to
the parameter's dtype. Everything is DTensor's own differentiable `redistribute` and `to_local`, so
that Dynamo traces it and eager runs it. In a traced graph the gather is a chain of nodes with one
input each (cast, pad, all_gather, wait, unpad) hanging on the parameter's placeholder.

Averaging over data-parallel ranks is what FSDP2 does (`_get_gradient_divide_factors` in
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

_AVERAGE = Partial("avg")


@dataclass(frozen=True)
class Gather:
    """The recipe that turns one DTensor parameter into the plain tensor its module computes with.

    Attributes:
        param_dtype: Dtype on the wire and in the computation; None: the parameter's own.
        reduce_dtype: Dtype of the gradient reduction; None: `param_dtype`.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None

    def __call__(self, parameter: DTensor) -> Tensor:
        """The full parameter as a plain tensor, differentiable with respect to the shard."""
        num_dims = parameter.device_mesh.ndim
        replicated: tuple[Placement, ...] = (Replicate(),) * num_dims
        gathered = parameter.redistribute(
            placements=replicated,
            forward_dtype=self.param_dtype,
            backward_dtype=self.reduce_dtype or self.param_dtype,
        )
        return gathered.to_local(grad_placements=(_AVERAGE,) * num_dims)
