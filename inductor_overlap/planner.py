"""Plan the training step of a model on a fake process group: no device, no ranks, no codegen.

`plan` shards a model as `simple_fsdp` does, traces it as Inductor would, and runs the post-grad
pass on the graphs. Nothing is allocated: parameters and activations are fake tensors, so a model of
any size is planned on a laptop. What Inductor does later, fusion and the re-timing of starts, is
left out; prices come from a `Cluster` or from the user's cost model, never from this machine.

`trace_graphs` is the tracing alone, for models that are sharded in another way; `fake_group` is the
group it needs.

Refused (``ValueError``): a process group that is real or of another size, a mesh or a batch that is
no size, a model whose output has nothing to differentiate. What was changed is put back: a group
that was made is destroyed, and only the code compiled here leaves Dynamo's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import (
    view_to_reshape,  # pyright: ignore[reportUnknownVariableType]
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.pricing import CostModel, default_cluster
from inductor_overlap.inductor_passes import (
    KeepGathered,
    NameCollectives,
    NameParameters,
    ReshardParameters,
)
from inductor_overlap.optimize import overlap_and_report
from inductor_overlap.passes.manual_wrap import WrapError
from inductor_overlap.report import Report
from inductor_overlap.settings import Reshard, Settings, Wrap
from inductor_overlap.simple_fsdp import MixedPrecisionPolicy, simple_fsdp

_MODES = {1: "fully_shard", 2: "hybrid_shard"}
"""Mode of a mesh with so many dimensions, where none is asked for."""


def plan(
    model_fn: Callable[[], nn.Module],
    mesh_shape: int | Sequence[int],
    *,
    batch: int,
    seq: int,
    wrap: Wrap = "auto",
    cluster: str | Cluster | None = None,
    cost_model: CostModel | None = None,
    memory_limit_gb: float | None = None,
    reshard_after_forward: Reshard = True,
    mode: str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    shard_dim: int = 0,
    train: bool = True,
) -> Report:
    """Plan one step of a language model: token ids of shape ``[batch, seq]`` per rank.

    Args:
        model_fn: makes the unsharded model; its forward takes the token ids alone.
        mesh_shape: ranks, or ``(replicas, shards)`` for `hybrid_shard`.
        batch, seq: of one rank.
        wrap, reshard_after_forward, memory_limit_gb: as in `options`; the limit is for each graph.
        cluster, cost_model: as in `options`; None: H100s on InfiniBand.
        mode: of `simple_fsdp`; None: ``fully_shard`` for one mesh dimension, else
            ``hybrid_shard``.
        mp_policy, shard_dim: as in `simple_fsdp`.
        train: plan the backward graph too.

    Returns:
        The report of the forward graph; its ``backward`` is the report of the backward graph, or
        None if ``train`` is False.

    Raises:
        ValueError: An argument is no size or fits no other, a process group is initialised that
            is not fake or of another size, or `optimize` refuses.
    """
    shape = _sizes("mesh_shape", (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape)
    batch, seq = _sizes("batch", (batch,)) + _sizes("seq", (seq,))
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        raise ValueError(
            f"model_fn must be a function that makes the model, as in plan(lambda: Model(...), "
            f"...), which then takes no memory; got {type(model_fn).__name__}"
        )
    settings = Settings(
        wrap=wrap,
        cluster=default_cluster("meta") if cluster is None and cost_model is None else cluster,
        cost_model=cost_model,
        memory_limit_gb=memory_limit_gb,
        reshard_after_forward=reshard_after_forward,
    )
    with fake_group(math.prod(shape)):
        mesh = init_device_mesh("cpu", shape)

        def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
            model = simple_fsdp(
                model_fn(),
                mesh,
                mode=mode or _MODES.get(len(shape), "fully_shard"),
                mp_policy=mp_policy,
                shard_dim=shard_dim,
            )
            return model, (torch.zeros(batch, seq, dtype=torch.long),)

        graphs = trace_graphs(build, settings, train=train)
        reports = [overlap_and_report(gm.graph, settings, is_part=True) for gm in graphs]
    return replace(reports[0], backward=reports[1]) if train else reports[0]


def trace_graphs(
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]],
    settings: Settings | None = None,
    *,
    train: bool = True,
) -> list[fx.GraphModule]:
    """Post-grad graphs of the model and inputs that ``build`` makes: forward, then backward.

    Dynamo and AOTAutograd run as under Inductor: its decompositions, the min-cut partitioner, our
    passes before it. ``build`` runs under a fake tensor mode; a device mesh must have been
    made before. The loss is the sum of all outputs that have a gradient.

    Args:
        build: makes the sharded model and its inputs.
        settings: of the passes before the post-grad pass; None: the defaults.
        train: trace the backward graph too.

    Raises:
        ValueError: ``train`` is True, and no output has a gradient.
        WrapError: The wrap list of ``settings`` does not fit the model.
    """
    graphs: list[fx.GraphModule] = []

    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs = build()
        step = _calling(model)
        backend = _capture(graphs, settings or Settings())
        compiled = cast("Any", torch).compile(step, backend=backend, fullgraph=True, dynamic=False)
        try:
            with torch.set_grad_enabled(train):
                outputs = compiled(*inputs)
                if train:
                    torch.autograd.backward(_sum(outputs))
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, WrapError):
                raise error.inner_exception from None
            raise
        finally:
            reset_code(step.__code__)
    return graphs


def _calling(self: nn.Module) -> Callable[..., Any]:
    """A function to compile in place of a module, whose code is nobody else's.

    Dynamo names what it finds by local variables, and passes that read module paths, torch's manual
    bucketing among them, know the module as ``self``.
    """

    def step(*inputs: Any) -> Any:
        return self(*inputs)

    return step


def _capture(graphs: list[fx.GraphModule], settings: Settings) -> Callable[..., Any]:
    """A Dynamo back end that runs AOTAutograd and appends its graphs to ``graphs``."""

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        view_to_reshape(gm)
        gm.recompile()
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        NameCollectives(settings)(joint.graph)
        ReshardParameters(settings)(joint.graph)
        cut: Callable[..., Any] = min_cut_rematerialization_partition
        if settings.reshard_after_forward == "auto":
            cut = KeepGathered(settings, None)
        return cut(joint, *args, **kwargs)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        NameParameters(settings)(gm.graph)
        compiler = aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        return compiler(gm, inputs)

    return backend


def _sum(outputs: Any) -> Tensor:
    leaves = cast("list[object]", tree_leaves(outputs))
    losses = [leaf.sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not losses:
        raise ValueError(
            f"the model returned {len(leaves)} values, none of which has a gradient; return the "
            f"logits or a loss, or pass train=False"
        )
    return torch.stack([loss.float() for loss in losses]).sum()


@contextmanager
def fake_group(num_ranks: int) -> Generator[None]:
    """A fake default group of ``num_ranks``: the one that is there, else one for this block."""
    if dist.is_initialized():
        backend, size = dist.get_backend(), dist.get_world_size()
        if backend != "fake" or size != num_ranks:
            raise ValueError(
                f"planning needs a fake process group of {num_ranks} ranks, but a group of {size} "
                f"ranks with backend {backend!r} is initialised; plan in another process, or "
                f"call torch.distributed.destroy_process_group() first"
            )
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sizes(name: str, values: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(values)
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"{name} must be made of positive whole numbers; got {values!r}")
    return sizes
