"""The passes as Inductor's hooks see them: `plugin` puts them there.

They hold settings only; they deepcopy, pickle, and carry an identity that covers this package's
source, torch's version, the settings, the prices, the rank and the shapes of the process groups,
so that compiled graphs are cached and found again. A fault of ours is logged and leaves the graph
as it was; a user's mistake is raised.
"""

# torch does not type the process group registry.
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
)
from torch._logging._internal import trace_structured

from inductor_overlap.cost_model.pricing import CostModelError
from inductor_overlap.optimize import device_type, overlap_and_report
from inductor_overlap.passes.auto_wrap import MemoryLimitError, NoWrap
from inductor_overlap.passes.compiled_model import is_sharded, model_parameters
from inductor_overlap.passes.fx_ops import is_start
from inductor_overlap.passes.keep_gathered import keep_gathered
from inductor_overlap.passes.manual_wrap import ManualWrap, WrapError, absent_note
from inductor_overlap.passes.parameter_names import (
    dynamo_parameters,
    is_named_by_dynamo,
    stamp_collectives,
    stamp_parameter_names,
)
from inductor_overlap.passes.reshard import reshard_after_forward as tag_gathers
from inductor_overlap.passes.scheduler import overlap_snodes
from inductor_overlap.report import Report
from inductor_overlap.settings import Settings

log = logging.getLogger("inductor_overlap")

REPORTS: list[Report] = []
"""Of each graph that this process compiled, in order."""
_T = TypeVar("_T")

_USER_MISTAKES = (CostModelError, MemoryLimitError, WrapError)
"""What the user can mend: errors of the cost model, the limit, the wrap list."""


class Identified:
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
        parts = (type(self).__name__, _source_digest(), torch.__version__, settings, *_place())
        return hashlib.sha256(repr(parts).encode()).hexdigest()


class Chained(Identified):
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


class NameParameters(Identified, CustomGraphPass):
    """Dynamo graph: remember which parameter each node serves; look up the names of a wrap list.

    Only here is the model known of which the graph may be a part.
    """

    def __call__(self, graph: fx.Graph) -> None:
        stamp_parameter_names(graph)
        policy = self.settings.policy
        if not isinstance(policy, ManualWrap) or not is_sharded(graph):
            return
        absent = policy.absent(dynamo_parameters(graph).values(), model_parameters(graph))
        if absent:
            log.warning("%s", absent_note(absent))


class NameCollectives(Identified, CustomGraphPass):
    """Joint graph: tell collectives which parameter they serve."""

    def __call__(self, graph: fx.Graph) -> None:
        stamp_collectives(graph)


class ReshardParameters(Identified, CustomGraphPass):
    """Joint graph: gather parameters again in backward, or keep them; "auto" decides later."""

    def __call__(self, graph: fx.Graph) -> None:
        tag_gathers(graph, reshard=bool(self.settings.reshard_after_forward))


class KeepGathered(Chained, CustomPartitionerFn):
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


class OverlapGraph(Identified, CustomGraphPass):
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
        # Where Dynamo named parameters, it was asked for those of the wrap list too.
        is_checked = any(is_named_by_dynamo(node) for node in graph.nodes if is_start(node))
        # Plans are rehearsed on a copy, so after a failure the graph compiles without us.
        report = _attempt(
            lambda: overlap_and_report(graph, self.settings, is_part=is_checked),
            "planning failed, please report this; the graph is left as it was",
        )
        if report is None:
            return
        REPORTS.append(report)
        log.info("%s", report)
        _trace("inductor_overlap_plan", report.plan.to_json)
        _trace("inductor_overlap_report", report.to_json)


class OverlapScheduler(Chained, CustomSchedulerPass):
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


def _place() -> tuple[int, Sequence[tuple[str, tuple[int, ...]]]]:
    """This rank, and name and shape of every process group: its ranks counted from its first.

    The rank, because AOTAutograd tells DTensors apart by their global shapes: ranks that share a
    cache would find each other's code for shards of other sizes (torch 2.13).
    """
    if not dist.is_available() or not dist.is_initialized():
        return 0, []
    names: Mapping[dist.ProcessGroup, str] = dist.distributed_c10d._world.pg_names
    ranks = {name: dist.get_process_group_ranks(group) for group, name in names.items()}
    shapes = [(name, tuple(rank - own[0] for rank in own)) for name, own in ranks.items() if own]
    return dist.get_rank(), shapes
