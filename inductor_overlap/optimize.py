"""Overlap one graph and report on it: the calls behind `optimize`, `simulate` and every compile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.errors import PricedCollective
from inductor_overlap.cost_model.pricing import CostModel, RatedPrices
from inductor_overlap.cost_model.simulate import Timeline
from inductor_overlap.cost_model.simulate import simulate as simulate_schedule
from inductor_overlap.exposure import explain_exposed
from inductor_overlap.passes.fx_ops import overload
from inductor_overlap.passes.graph_schedule import read_graph
from inductor_overlap.passes.post_grad import Outcome, overlap_graph
from inductor_overlap.passes.storages import is_backward
from inductor_overlap.report import Report
from inductor_overlap.settings import Settings, Wrap
from inductor_overlap.wire_dtypes import wire_dtypes


def optimize(
    gm: fx.GraphModule,
    *,
    wrap: Wrap = "auto",
    cluster: str | Cluster | None = None,
    cost_model: CostModel | None = None,
    memory_limit_gb: float | None = None,
    example_inputs: Sequence[object] | None = None,
) -> Report:
    """Bucket and reorder the collectives of one post-grad graph, in place.

    Args:
        gm: post-grad FX graph module of one rank (ATen and ``_c10d_functional`` nodes).
        wrap: "auto", "greedy", "none", or a list of module FQN patterns.
        cluster: a preset's name or a `Cluster`; None: by the device type of the graph's tensors.
        cost_model: your own prices, instead of a cluster.
        memory_limit_gb: GiB for the graph's live bytes; None: peak of the graph as given plus 5 %.
        example_inputs: inputs to infer shapes from, for a graph without ``meta["val"]``.

    Raises:
        ValueError: An option is out of range, a wrap entry does not fit, no schedule fits the
            limit, or the graph has no shapes and no ``example_inputs`` were given.
    """
    settings = Settings(
        wrap=wrap, cluster=cluster, cost_model=cost_model, memory_limit_gb=memory_limit_gb
    )
    _require_shapes(gm, example_inputs)
    report = overlap_and_report(gm.graph, settings)
    gm.recompile()
    return report


def simulate(
    gm: fx.GraphModule,
    *,
    cluster: str | Cluster | None = None,
    cost_model: CostModel | None = None,
) -> Timeline:
    """How one post-grad graph would run as it stands; see `optimize` for the arguments."""
    settings = Settings(cluster=cluster, cost_model=cost_model)
    _require_shapes(gm, None)
    prices = settings.prices(device_type(gm.graph))
    return simulate_schedule(read_graph(gm.graph, prices).program.schedule)


def overlap_and_report(graph: fx.Graph, settings: Settings, *, is_part: bool = False) -> Report:
    """Run the post-grad pass on ``graph`` and say what it did; see `overlap_graph`."""
    prices = settings.prices(device_type(graph))
    outcome = overlap_graph(
        graph,
        prices,
        settings.policy,
        memory_limit_bytes=settings.memory_limit_bytes,
        is_part=is_part,
    )
    name = "backward" if is_backward(graph) else "forward"
    return _report(outcome, prices, name)


def _report(outcome: Outcome, prices: RatedPrices, name: str) -> Report:
    return Report(
        before=outcome.before,
        after=outcome.after,
        lower_bound_us=outcome.bound.step_us,
        plan=outcome.plan,
        exposed=explain_exposed(outcome.schedule_after, outcome.after),
        num_collectives_before=outcome.num_collectives_before,
        num_collectives_after=outcome.num_collectives_after,
        policy_chosen=outcome.plan.policy,
        warnings=outcome.warnings,
        fallbacks=dict(prices.fallbacks),
        bound_certificate=outcome.bound.certificate,
        memory_limit_bytes=outcome.memory_limit_bytes,
        name=name,
        prices=prices.errors(_collectives_after(outcome)),
        wire_dtypes=wire_dtypes(outcome.collectives),
    )


def _collectives_after(outcome: Outcome) -> list[PricedCollective]:
    """Kind, size and ranks of the collectives that the plan left: buckets as one."""
    bucket_of = {name: bucket.name for bucket in outcome.plan.buckets for name in bucket.members}
    left: dict[str, PricedCollective] = {}
    for collective in outcome.collectives:
        name = bucket_of.get(collective.name, collective.name)
        size_bytes = collective.size_bytes + (left[name][1] if name in left else 0)
        left[name] = collective.kind, size_bytes, collective.ranks
    return list(left.values())


def device_type(graph: fx.Graph) -> str:
    """Device type of the first tensor of ``graph`` that is not on the CPU; "cpu" if all are.

    Graphs for accelerators have CPU tensors too: scalars, offsets, random seeds.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device.type
    return "cpu"


def _require_shapes(gm: fx.GraphModule, example_inputs: Sequence[object] | None) -> None:
    """Infer shapes from ``example_inputs`` where the graph has none."""
    if not isinstance(gm, fx.GraphModule):  # pyright: ignore[reportUnnecessaryIsInstance]
        remedy = "trace the module with make_fx or AOTAutograd, or plan its step with io.plan"
        if isinstance(gm, fx.Graph):
            remedy = "pass the module that owns it, or GraphModule(torch.nn.Module(), graph)"
        raise ValueError(
            f"gm must be a torch.fx.GraphModule, a post-grad graph; got {type(gm).__name__}; "
            f"{remedy}"
        )
    missing = [n.name for n in gm.graph.nodes if _has_value(n) and "val" not in n.meta]
    if not missing:
        return
    if example_inputs is None:
        raise ValueError(
            f"the graph has no shapes: meta['val'] is missing on {missing[:5]}; trace it with "
            f"make_fx or AOTAutograd, or pass example_inputs="
        )
    inputs = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    if len(example_inputs) != len(inputs):
        raise ValueError(
            f"example_inputs has {len(example_inputs)} values, the graph {len(inputs)} inputs "
            f"({', '.join(inputs[:5])}{', ...' * (len(inputs) > 5)}); pass one value for each"
        )
    try:
        FakeTensorProp(gm).propagate(*example_inputs)
    except Exception as error:
        raise ValueError(f"the graph does not run on example_inputs: {error}") from error


def _has_value(node: fx.Node) -> bool:
    """False for nodes that are known to return no tensor: subgraphs, ops without results."""
    if node.op in ("output", "get_attr"):
        return False
    op = overload(node)
    return op is None or bool(op._schema.returns)  # pyright: ignore[reportPrivateUsage]
