"""Communication-overlap compiler for sharded models under ``torch.compile``.

import inductor_overlap as io

model = io.simple_fsdp(model, mesh)
model = torch.compile(model, options=io.options(wrap="auto", cluster="h100-ib"))
"""

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.pricing import CostModel
from inductor_overlap.cost_model.simulate import Timeline
from inductor_overlap.optimize import optimize, simulate
from inductor_overlap.passes.manual_wrap import WrapError
from inductor_overlap.passes.plan import Plan
from inductor_overlap.planner import plan
from inductor_overlap.plugin import disable, enable, options, reports
from inductor_overlap.report import Report
from inductor_overlap.simple_fsdp import (
    MixedPrecisionPolicy,
    accumulate_gradients,
    initializing,
    simple_fsdp,
)

__all__ = [
    "Cluster",
    "CostModel",
    "MixedPrecisionPolicy",
    "Plan",
    "Report",
    "Timeline",
    "WrapError",
    "accumulate_gradients",
    "disable",
    "enable",
    "initializing",
    "optimize",
    "options",
    "plan",
    "reports",
    "simple_fsdp",
    "simulate",
]
