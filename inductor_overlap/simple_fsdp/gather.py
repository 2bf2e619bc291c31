"""How a sharded parameter becomes a full tensor when it is read, and its gradient comes back.

Forward: cast, all-gather. Backward: cast, reduce-scatter (and all-reduce over replicas), cast back
to the parameter's dtype. Everything is DTensor's own differentiable `from_local`, `redistribute`
and `to_local`, so that Dynamo traces it and eager runs it. In a traced graph the gather is a chain
of nodes with one tensor each (cast, pad, all_gather, wait, unpad) hanging on the parameter's
placeholder, from which `passes.parameter_names` knows the parameter's name.

Gradients are averaged over data-parallel ranks, and with replicas the shard is reduced first and
its smaller result all-reduced after, as FSDP2 does (`foreach_reduce` in
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

Placements = tuple[Placement, ...]

_AVERAGE = Partial("avg")


@dataclass(frozen=True)
class ModelParallel:
    """The layout a parameter had before data-parallel sharding, under tensor parallelism, say.

    Attributes:
        mesh: The mesh of that layout, without the data-parallel dimensions.
        placements: One for each of its dimensions.
        local_shape: What one rank of `mesh` holds, and data parallelism cuts further.
        local_stride: The strides of that.
    """

    mesh: DeviceMesh
    placements: Placements
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]


@dataclass(frozen=True)
class Gather:
    """The recipe that turns one DTensor parameter into the tensor its module computes with.

    Attributes:
        mesh: The data-parallel mesh: one dimension, or (replicate, shard).
        placements: `Replicate` or `Shard` for each of its dimensions.
        param_dtype: Dtype on the wire and in the computation; None: the parameter's own.
        reduce_dtype: Dtype of the gradient reduction; None: `param_dtype`.
        model_parallel: The layout to give back after the gather; None: a plain tensor.
    """

    mesh: DeviceMesh
    placements: Placements
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    model_parallel: ModelParallel | None = None

    def __call__(self, parameter: DTensor) -> Tensor:
        """The tensor to compute with, differentiable with respect to `parameter`.

        Args:
            parameter: Laid out as `simple_fsdp` made it.
        """
        return self.restore_layout(self.gather(parameter), parameter)

    def gather(self, parameter: DTensor) -> Tensor:
        """What one model-parallel rank computes with, as a plain tensor.

        It gathers one mesh dimension after the other, so that backward reduces the last one first.
        The reduce-scatter over shards then makes the all-reduce over replicas smaller. The cast
        to `param_dtype` comes with the last one: what is all-reduced was never rounded to it.
        """
        last_dim = self.mesh.ndim - 1
        sharded = self._data_parallel_view(parameter)
        for dim in range(last_dim):
            local = self._gather_dim(sharded, dim, None)
            sharded = self._distribute(local, self._gathered_up_to(dim + 1), parameter)
        return self._gather_dim(sharded, last_dim, self.param_dtype)

    def restore_layout(self, local: Tensor, parameter: DTensor) -> Tensor:
        """`local` as the model-parallel DTensor it is a part of; without such a layout, itself."""
        layout = self.model_parallel
        if layout is None:
            return local
        return DTensor.from_local(
            local,
            layout.mesh,
            layout.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def reduce(self, gradient: Tensor, parameter: DTensor) -> DTensor:
        """The average of the ranks' local gradients, laid out and typed like `parameter`.

        Args:
            gradient: This rank's gradient of what `gather` returns.
            parameter: The parameter it belongs to.
        """
        local = gradient.to(self._reduction_dtype or gradient.dtype)
        for dim in reversed(range(self.mesh.ndim)):
            sharded = self._gathered_up_to(dim)
            partial = self._distribute(
                local, _averaged(self._gathered_up_to(dim + 1), dim), parameter
            )
            local = partial.redistribute(placements=sharded).to_local()
        return DTensor.from_local(
            local.to(parameter.dtype),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _gather_dim(self, sharded: DTensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        gathered = self._gathered_up_to(dim + 1)
        return sharded.redistribute(
            placements=gathered, forward_dtype=dtype, backward_dtype=self._reduction_dtype
        ).to_local(grad_placements=_averaged(gathered, dim))

    def _data_parallel_view(self, parameter: DTensor) -> DTensor:
        """`parameter` on the data-parallel mesh alone."""
        if self.model_parallel is None:
            return parameter
        local = parameter.to_local(grad_placements=parameter.placements)
        return self._distribute(local, self.placements, parameter)

    def _distribute(self, local: Tensor, placements: Placements, parameter: DTensor) -> DTensor:
        layout = self.model_parallel
        return DTensor.from_local(
            local,
            self.mesh,
            placements,
            run_check=False,
            shape=parameter.shape if layout is None else torch.Size(layout.local_shape),
            stride=parameter.stride() if layout is None else layout.local_stride,
        )

    def _gathered_up_to(self, dim: int) -> Placements:
        """The placements once the mesh dimensions before `dim` are gathered."""
        return (Replicate(),) * dim + self.placements[dim:]

    @property
    def _reduction_dtype(self) -> torch.dtype | None:
        return self.reduce_dtype or self.param_dtype


def cut_like(full: Tensor, parameter: DTensor) -> DTensor:
    """This rank's part of `full`, laid out like `parameter`; nothing is sent.

    Args:
        full: A plain tensor of the parameter's full shape, the same on every rank.
        parameter: Says how to cut.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def _averaged(placements: Placements, dim: int) -> Placements:
    """`placements` with a pending average on mesh dimension `dim`."""
    return (*placements[:dim], _AVERAGE, *placements[dim + 1 :])
