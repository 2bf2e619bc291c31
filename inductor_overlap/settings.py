"""The one place where the options of the plugin are named, given defaults and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from inductor_overlap.cost_model.checks import is_number
from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.pricing import CostModel, RatedPrices, resolve_cost_model
from inductor_overlap.passes.auto_wrap import Policy, parse_wrap
from inductor_overlap.passes.manual_wrap import WrapEntry

Wrap = str | Sequence[WrapEntry]
Reshard = bool | Literal["auto"]

GIB = 2**30


@dataclass(frozen=True)
class Settings:
    """What the user asked for; the fields are the keyword arguments of `options`.

    Raises:
        ValueError: A value is out of range, or names nothing known.
    """

    wrap: Wrap = "auto"
    cluster: str | Cluster | None = None
    cost_model: CostModel | None = None
    memory_limit_gb: float | None = None
    reshard_after_forward: Reshard = True

    def __post_init__(self) -> None:
        _ = self.policy
        # The caches ask for the identity only when a graph has been traced.
        self.prices("cpu").uuid()
        limit = self.memory_limit_gb
        if limit is not None and not (is_number(limit) and limit > 0):
            raise ValueError(
                f"memory_limit_gb must be a positive number of GiB, or None for the unscheduled "
                f"peak plus 5 %; got {limit!r}"
            )
        reshard = self.reshard_after_forward
        if not isinstance(reshard, bool) and reshard != "auto":  # pyright: ignore[reportUnnecessaryComparison]
            raise ValueError(
                f"reshard_after_forward must be True (gather again in backward), False (keep "
                f'parameters gathered) or "auto" (keep what memory allows); got {reshard!r}'
            )

    @property
    def policy(self) -> Policy:
        return parse_wrap(self.wrap)

    @property
    def memory_limit_bytes(self) -> float | None:
        return None if self.memory_limit_gb is None else self.memory_limit_gb * GIB

    def prices(self, device_type: str) -> RatedPrices:
        """A fresh cost model for graphs on ``device_type``; its fallback counter is empty."""
        return resolve_cost_model(self.cluster, self.cost_model, device_type)

    def uuid(self) -> str | None:
        """Identity of the settings for the compile cache; None if the cost model has none."""
        prices = [self.prices(device_type).uuid() for device_type in ("cpu", "cuda")]
        if None in prices:
            return None
        rest = (self.policy, self.memory_limit_gb, self.reshard_after_forward)
        return repr((rest, prices))
