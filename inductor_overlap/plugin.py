"""The plugin: our passes behind Inductor's hooks.

The only module that touches ``torch._inductor.config``. Every key it sets is looked up first: one
that is missing in this torch is an error, never a silent no-op. Passes that other libraries have
put into a hook stay there and run before ours. The pass objects hold settings only; they deepcopy,
pickle, and carry an identity that covers this package's source, torch's version, the settings, the
prices and the placement of the process groups, so that compiled graphs are cached and found again.
"""

# torch types neither the hooks' configuration module nor the process group registry.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    CustomPartitionerFn,
    CustomSchedulerPass,
    get_custom_graph_passes,
)
from torch._logging._internal import trace_structured

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.pricing import CostModel, CostModelError
from inductor_overlap.optimize import device_type, overlap_and_report
from inductor_overlap.passes.auto_wrap import MemoryLimitError, NoWrap
from inductor_overlap.passes.fx_ops import is_start
from inductor_overlap.passes.keep_gathered import keep_gathered
from inductor_overlap.passes.manual_wrap import WrapError
from inductor_overlap.passes.parameter_names import stamp_parameter_names
from inductor_overlap.passes.reshard import reshard_after_forward as tag_gathers
from inductor_overlap.passes.scheduler import overlap_snodes
from inductor_overlap.report import Report
from inductor_overlap.settings import Reshard, Settings, Wrap

log = logging.getLogger("inductor_overlap")

_SCHEDULER_HOOK = "_post_fusion_custom_pass"
_PARTITIONER_HOOK = "custom_partitioner_fn"
_REPORTS: list[Report] = []
_T = TypeVar("_T")


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
            gradients); None: the peak of the unscheduled graph plus 5 %.
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

_GRAPH_HOOKS = ("pre_grad_custom_pass", "joint_custom_post_pass", "post_grad_custom_post_pass")
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
        if isinstance(current[key], _Chained):
            restored[key] = _other(current[key])
    _replaced.clear()
    _set_config(restored)


def reports() -> list[Report]:
    """What was done to each graph compiled by this process, in order.

    A graph that Inductor's cache supplied was not compiled again, so it has no report here.
    """
    return list(_REPORTS)


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


_USER_MISTAKES = (CostModelError, MemoryLimitError, WrapError)
"""What the user can mend: errors of the cost model, the limit, the wrap list."""


class _Identified:
    """Identity of a pass for Inductor's caches."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def uuid(self) -> str | None:
        settings = self.settings.uuid()
        if settings is None:
            log.warning(
                "the cost model %r has no uuid(): compiled graphs are not cached; define "
                "uuid() -> str, different for every change of its prices",
                self.settings.cost_model,
            )
            return None
        parts = (type(self).__name__, _source_digest(), torch.__version__, settings, _groups())
        return hashlib.sha256(repr(parts).encode()).hexdigest()


class _Chained(_Identified):
    """A pass in a hook that holds one: ``earlier`` is what another library put there, or None."""

    def __init__(self, settings: Settings, earlier: Callable[..., Any] | None) -> None:
        super().__init__(settings)
        self.earlier = earlier

    @property
    def is_identified(self) -> bool:
        return self.earlier is None or self._earlier_uuid() is not None

    def _earlier_uuid(self) -> object:
        return getattr(self.earlier, "uuid", lambda: None)()

    def uuid(self) -> str | None:
        own = super().uuid()
        if self.earlier is None or own is None:
            return own
        return f"{own}:{self._earlier_uuid()!r}" if self.is_identified else None


def _attempt(work: Callable[[], _T], otherwise: str) -> _T | None:
    """What ``work`` returns; None if it fails by our fault, which is logged with ``otherwise``."""
    try:
        return work()
    except _USER_MISTAKES:
        raise
    except Exception:
        log.exception(otherwise)
        return None


class NameParameters(_Identified, CustomGraphPass):
    """Dynamo graph: remember which parameter each node serves."""

    def __call__(self, graph: fx.Graph) -> None:
        stamp_parameter_names(graph)


class ReshardParameters(_Identified, CustomGraphPass):
    """Joint graph: gather parameters again in backward, or keep them; "auto" decides later."""

    def __call__(self, graph: fx.Graph) -> None:
        tag_gathers(graph, reshard=bool(self.settings.reshard_after_forward))


class KeepGathered(_Chained, CustomPartitionerFn):
    """Cut the joint graph twice: first with everything resharded, to see what memory is left.

    By the partitioner ``earlier``, or by Inductor's own.
    """

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        cut: Callable[..., Any] = self.earlier or min_cut_rematerialization_partition
        if any(map(is_start, gm.graph.nodes)):
            forward, backward = cut(copy.deepcopy(gm), joint_inputs, **kwargs)
            kept = self._kept(forward.graph, backward.graph)
            tagged = tag_gathers(gm.graph, reshard=True, kept=kept)
            log.info("%d of %d gathered parameters are kept for backward", len(kept), tagged)
        return cut(gm, joint_inputs, **kwargs)

    def _kept(self, forward: fx.Graph, backward: fx.Graph) -> frozenset[str]:
        prices = self.settings.prices(device_type(forward))
        limit_bytes = self.settings.memory_limit_bytes
        kept = _attempt(
            lambda: keep_gathered(forward, backward, prices, limit_bytes),
            "choosing what stays gathered failed, please report this; nothing does",
        )
        return frozenset() if kept is None else kept


class OverlapGraph(_Identified, CustomGraphPass):
    """Post-grad graph: bucket and reorder, and report.

    Inductor asks scheduler passes for no identity before it looks into its cache, so this pass
    answers for ours: it has none if another library's scheduler pass, which ours runs, has none.
    """

    def __init__(self, settings: Settings, scheduler: OverlapScheduler) -> None:
        super().__init__(settings)
        self.scheduler = scheduler

    def uuid(self) -> str | None:
        return super().uuid() if self.scheduler.is_identified else None

    def __call__(self, graph: fx.Graph) -> None:
        if not any(map(is_start, graph.nodes)):
            return
        self.settings.prices(device_type(graph))  # an unknown device is the user's to mend
        # Plans are rehearsed on a copy, so after a failure the graph compiles without us.
        report = _attempt(
            lambda: overlap_and_report(graph, self.settings),
            "planning failed, please report this; the graph is left as it was",
        )
        if report is None:
            return
        _REPORTS.append(report)
        log.info("%s", report)
        _trace("inductor_overlap_plan", report.plan.to_json)
        _trace("inductor_overlap_report", report.to_json)


class OverlapScheduler(_Chained, CustomSchedulerPass):
    """Scheduler nodes after fusion: correct the order and pin it. Runs after ``earlier``."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.virtualized import V

        if self.earlier is not None:
            nodes = self.earlier(nodes)
        if isinstance(self.settings.policy, NoWrap):
            return nodes
        graph = cast("fx.Graph", V.graph.graph)
        if not any(map(is_start, graph.nodes)):
            return nodes
        prices = self.settings.prices(device_type(graph))
        ordered = _attempt(
            lambda: overlap_snodes(nodes, graph, prices),
            "ordering kernels failed, please report this; their order is kept",
        )
        return nodes if ordered is None else ordered


def _trace(name: str, payload: Callable[[], str]) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=payload,
    )


def _others(hook: Any) -> list[Any]:
    return [item for item in get_custom_graph_passes(hook) if not isinstance(item, _Identified)]


def _other(hook: Any) -> Callable[..., Any] | None:
    """What another library put into a hook that holds one."""
    return hook.earlier if isinstance(hook, _Chained) else hook


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


@cache
def _source_digest() -> str:
    """Hash of this package's source: any change of ours misses the cache."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    folders = (root, root / "passes", root / "cost_model")
    for path in sorted(file for folder in folders for file in folder.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _groups() -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every process group: its ranks counted from its first."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    names: Mapping[dist.ProcessGroup, str] = dist.distributed_c10d._world.pg_names
    ranks = {name: dist.get_process_group_ranks(group) for group, name in names.items()}
    return [(name, tuple(rank - own[0] for rank in own)) for name, own in ranks.items() if own]
