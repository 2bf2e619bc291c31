"""In which number format parameters travel and gradients are reduced.

The two fields and their defaults follow `torch.distributed.fsdp.MixedPrecisionPolicy`
(torch/distributed/fsdp/_fully_shard/_fsdp_api.py); casting of module inputs and outputs is left to
the model, because the whole model is traced and no module boundary exists at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Number formats of one model's communication.

    Attributes:
        param_dtype: Parameters are cast to it before they are gathered, so that the wire and the
            computation carry it. None keeps the parameter's own dtype.
        reduce_dtype: Gradients are cast to it before they are reduced. None reduces in the dtype
            the computation produced, that is `param_dtype`. The gradient handed to the optimizer
            always has the parameter's own dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(
                    f"MixedPrecisionPolicy.{name} must be a floating-point torch.dtype or None, "
                    f"got {dtype!r}"
                )
