"""Post-grad style FX graphs of sharded models, traced on a fake group: no device, no codegen.

`trace` runs Dynamo and AOTAutograd as Inductor does (its decompositions, the min-cut partitioner,
our own joint pass) and returns the graphs instead of compiling them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_overlap.passes.parameter_names import stamp_parameter_names
from inductor_overlap.passes.reshard import reshard_after_forward


def trace(
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]],
    *,
    reshard: bool = True,
    train: bool = True,
) -> list[fx.GraphModule]:
    """Forward and, if ``train``, backward graph of the model and inputs that ``build`` makes.

    ``build`` runs under a fake tensor mode: full-size models cost no memory.
    """
    graphs: list[fx.GraphModule] = []

    def capture(gm: fx.GraphModule, inputs: Any) -> Any:
        view_to_reshape(gm)
        gm.recompile()
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        reshard_after_forward(joint.graph, reshard=reshard)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        stamp_parameter_names(gm.graph)
        compiler = aot_autograd(
            fw_compiler=capture,
            bw_compiler=capture,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        return compiler(gm, inputs)

    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs = build()
        with torch.set_grad_enabled(train):
            result = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*inputs)
            if train:
                result.sum().backward()
    torch._dynamo.reset()
    return graphs
