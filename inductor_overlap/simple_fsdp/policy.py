"""In which number format parameters travel and gradients are reduced.

The two first fields and their defaults follow `torch.distributed.fsdp.MixedPrecisionPolicy`
(torch/distributed/fsdp/_fully_shard/_fsdp_api.py). Casting of module inputs and outputs is left to
the model: the whole model is traced, and no module boundary exists at run time.

Refuses float8 and other formats that a plain cast does not serve.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

CAST_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _no_overrides() -> dict[str, MixedPrecisionPolicy]:
    return {}


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Number formats of one model's communication.

    Attributes:
        param_dtype: Parameters are cast to it before they are gathered, so that the wire and the
            computation carry it. None keeps the parameter's own dtype.
        reduce_dtype: Gradients are cast to it before they are reduced. None reduces in the dtype
            the computation produced, that is `param_dtype`. The gradient handed to the optimizer
            always has the parameter's own dtype.
        overrides: Other policies for some parameters: a pattern of parameter or module names
            (`*` matches any text, `"*norm*"` or `"layers.0.attention"`, say) to the policy that
            holds for what it matches, and below it; the last match counts.

    Raises:
        ValueError: A dtype that is not one of float64, float32, bfloat16, float16; an override
            that is no policy.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    overrides: Mapping[str, MixedPrecisionPolicy] = field(
        default_factory=_no_overrides, kw_only=True, hash=False
    )

    def __post_init__(self) -> None:
        _check_dtype("param_dtype", self.param_dtype)
        _check_dtype("reduce_dtype", self.reduce_dtype)
        for pattern, override in self.overrides.items():
            _check_override(pattern, override)

    def policy_for(self, fqn: str) -> MixedPrecisionPolicy:
        """The policy of the parameter called `fqn`, overrides applied."""
        policy = self
        for pattern, override in self.overrides.items():
            if _matches(pattern, fqn):
                policy = override
        return policy

    def check_matches(self, fqns: Iterable[str]) -> None:
        """Raises unless every override names at least one of these parameters.

        Raises:
            ValueError: An override matches nothing; the message lists the nearest names.
        """
        names = list(fqns)
        for pattern in self.overrides:
            if any(_matches(pattern, name) for name in names):
                continue
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(
                f"mp_policy.overrides[{pattern!r}] matches no parameter: use a pattern of "
                f"parameter or module names; the nearest are {near}"
            )


def _matches(pattern: str, fqn: str) -> bool:
    parts = fqn.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _check_override(pattern: str, override: object) -> None:
    if not isinstance(override, MixedPrecisionPolicy):
        raise ValueError(
            f"MixedPrecisionPolicy.overrides[{pattern!r}] must be a MixedPrecisionPolicy, got "
            f"{override!r}: write {{{pattern!r}: MixedPrecisionPolicy(param_dtype)}}"
        )


def _check_dtype(name: str, dtype: object) -> None:
    if dtype is None or dtype in CAST_DTYPES:
        return
    if isinstance(dtype, torch.dtype) and "float8" in str(dtype):
        raise ValueError(
            f"MixedPrecisionPolicy.{name}={dtype}: float8 needs scales, which a plain cast does "
            "not have; use torch.bfloat16, and a float8 library that converts inside its layers"
        )
    allowed = ", ".join(map(str, CAST_DTYPES))
    raise ValueError(f"MixedPrecisionPolicy.{name} must be None or one of {allowed}; got {dtype!r}")
