"""The plugin: our passes behind Inductor's hooks.

The only module that touches ``torch._inductor.config``. Every key it sets is looked up first: one
that is missing in this torch is an error, never a silent no-op. Passes that other libraries have
put into a hook stay there and run before ours.
"""

# torch does not type the hooks' configuration module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._inductor.custom_graph_pass import get_custom_graph_passes

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.pricing import CostModel
from inductor_overlap.inductor_passes import (
    REPORTS,
    Chained,
    Identified,
    KeepGathered,
    NameCollectives,
    NameParameters,
    OverlapGraph,
    OverlapScheduler,
    ReshardParameters,
)
from inductor_overlap.report import Report
from inductor_overlap.settings import Reshard, Settings, Wrap

_SCHEDULER_HOOK = "_post_fusion_custom_pass"
_PARTITIONER_HOOK = "custom_partitioner_fn"


class PluginError(RuntimeError):
    """This torch lacks a hook that the plugin needs."""


def options(
    *,
    wrap: Wrap = "auto",
    cluster: str | Cluster | None = None,
    cost_model: CostModel | None = None,
    memory_limit_gb: float | None = None,
    reshard_after_forward: Reshard = True,
) -> dict[str, Any]:
    """Inductor options that switch the plugin on for one compile: ``torch.compile(options=...)``.

    They hold for the backward graph too, which is compiled at the first backward call.

    Args:
        wrap: "auto" (the best plan of a search in the simulator), "greedy" (SimpleFSDP's
            auto-wrapping), "none" (only report), or a list of module FQN patterns such as
            ``["tok_embeddings", "layers.*", ["norm", "output"]]``: one bucket per matched module,
            one for each inner list.
        cluster: a preset's name (see ``Cluster.presets()``) or a `Cluster`; None: by device type.
        cost_model: your own `CostModel`, instead of a cluster.
        memory_limit_gb: GiB for the live bytes of a graph (activations, gathered parameters,
            gradients); None: the peak of the unscheduled graph plus 5 %, of which plans take no
            more than they need to be within 1 % of the fastest.
        reshard_after_forward: True: gather parameters again in backward; False: keep them
            gathered; "auto": keep those that save most time per byte, within the memory limit.

    Raises:
        ValueError: An argument is out of range or names nothing known.
        PluginError: This torch lacks a hook.
    """
    settings = Settings(wrap, cluster, cost_model, memory_limit_gb, reshard_after_forward)
    current = _current_config()
    scheduler = OverlapScheduler(settings, _other(current[_SCHEDULER_HOOK]))
    passes = (
        NameParameters(settings),
        NameCollectives(settings),
        ReshardParameters(settings),
        OverlapGraph(settings, scheduler),
    )
    result: dict[str, Any] = {
        key: [*_others(current[key]), ours] for key, ours in zip(_GRAPH_HOOKS, passes, strict=True)
    }
    result[_SCHEDULER_HOOK] = scheduler
    partitioner = _other(current[_PARTITIONER_HOOK])
    if reshard_after_forward == "auto":
        result[_PARTITIONER_HOOK] = KeepGathered(settings, partitioner)
    elif partitioner is not current[_PARTITIONER_HOOK]:
        result[_PARTITIONER_HOOK] = partitioner
    result.update({key: False for key in _COMPETING_PASSES if key in current})
    return result


_COMPETING_PASSES = ("aten_distributed_optimizations.enable_simple_overlap",)
"""Passes of newer torch versions that are on by default and would move what we have placed."""

_GRAPH_HOOKS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_post_pass",
)
_KEYS = (*_GRAPH_HOOKS, _PARTITIONER_HOOK, _SCHEDULER_HOOK)

_replaced: dict[str, object] = {}


def enable(
    *,
    wrap: Wrap = "auto",
    cluster: str | Cluster | None = None,
    cost_model: CostModel | None = None,
    memory_limit_gb: float | None = None,
    reshard_after_forward: Reshard = True,
) -> None:
    """Switch the plugin on for every compile of this process; arguments as for `options`.

    Calling it again replaces the settings. Hooks of other libraries keep running.
    """
    disable()
    chosen = options(
        wrap=wrap,
        cluster=cluster,
        cost_model=cost_model,
        memory_limit_gb=memory_limit_gb,
        reshard_after_forward=reshard_after_forward,
    )
    current = _current_config()
    _replaced.update({key: current[key] for key in chosen if key in _COMPETING_PASSES})
    _set_config(chosen)


def disable() -> None:
    """Undo `enable`; hooks that others have added meanwhile stay."""
    current = _current_config()
    restored: dict[str, object] = dict(_replaced)
    for key in _GRAPH_HOOKS:
        others = _others(current[key])
        if len(others) < len(get_custom_graph_passes(current[key])):
            restored[key] = others or None
    for key in (_SCHEDULER_HOOK, _PARTITIONER_HOOK):
        if isinstance(current[key], Chained):
            restored[key] = _other(current[key])
    _replaced.clear()
    _set_config(restored)


def reports() -> list[Report]:
    """What was done to each graph compiled by this process, in order.

    A graph that Inductor's cache supplied was not compiled again, so it has no report here.
    """
    return list(REPORTS)


def inductor_overlap_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """``torch.compile(model, backend="inductor_overlap")``: Inductor with the plugin on.

    Args:
        gm: what Dynamo traced.
        example_inputs: its inputs.
        options: keyword arguments of `options`, such as ``{"wrap": "greedy"}``.
        mode: Inductor's mode, as for ``torch.compile``.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**list_mode_options(mode or "default"), **_options(**(options or {}))}
    return compile_fx(gm, list(example_inputs), config_patches=patches)


_options = options


def _others(hook: Any) -> list[Any]:
    return [item for item in get_custom_graph_passes(hook) if not isinstance(item, Identified)]


def _other(hook: Any) -> Callable[..., Any] | None:
    """What another library put into a hook that holds one."""
    return hook.earlier if isinstance(hook, Chained) else hook


def _current_config() -> dict[str, Any]:
    """The values of the keys that we set, as far as this torch has them."""
    from torch._inductor import config

    known = _known_options()
    missing = [key for key in _KEYS if key not in known]
    if missing:
        raise PluginError(
            f"torch {torch.__version__} has no Inductor option {', '.join(missing)}, which "
            f"inductor_overlap needs; it supports torch 2.13 and 2.14"
        )
    # The copy holds copies of pass objects; other libraries' passes must stay the same objects.
    wanted = [key for key in (*_KEYS, *_COMPETING_PASSES) if key in known]
    return {key: getattr(config, key, known[key]) for key in wanted}


def _known_options() -> dict[str, Any]:
    from torch._inductor import config

    return config.get_config_copy()


def _set_config(values: Mapping[str, object]) -> None:
    from torch._inductor import config

    for key, value in values.items():
        setattr(config, key, value)
