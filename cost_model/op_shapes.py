"""Shapes of the matmuls and attentions in an FX graph, from fake-tensor metadata alone.

Each reader returns plain numbers for the formulas of ``compute_time``, or ``None`` where the
metadata does not tell: then the caller prices the node by its bytes. Convolutions are read as the
matmul they are (implicit GEMM) with the FLOPs of ``torch.utils.flop_counter``; attentions are not,
because its registry lacks the CPU kernels and knows neither causal masks nor shared heads.
"""

# torch declares its operator classes in private modules only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx as fx
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from inductor_overlap.cost_model.fusion import op_name
from inductor_overlap.cost_model.sizes import numel_hint, shape_hint


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """``batch`` products of (m, k) x (k, n), ``repeats`` times over (gradients of one op)."""

    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    repeats: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Fused attention on (batch, heads, seq, dim); ``density`` is the share of pairs kept."""

    batch: int
    q_heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    causal: bool
    backward: bool
    flash2: bool
    density: float = 1.0


def read_matmul(node: fx.Node) -> MatmulShape | None:
    """The matmul of ``node``; None if an operand has no metadata."""
    name = op_name(node).rsplit(".", 1)[-1]
    if "conv" in name:
        return _read_convolution(node, name)
    position = 1 if name in ("addmm", "baddbmm") else 0
    left = _tensor(_positional(node, position))
    right = _tensor(_positional(node, position + 1))
    if left is None or right is None or left.dim() == 0 or right.dim() == 0:
        return None
    return _read_product(node, name, left, right)


def _read_product(
    node: fx.Node, name: str, left: torch.Tensor, right: torch.Tensor
) -> MatmulShape | None:
    k = shape_hint(left)[-1]
    if name == "linear":
        n = shape_hint(right)[0]
    elif right.dim() == 1:
        n = 1
    else:
        n = shape_hint(right)[-1]
    if "grouped_mm" in name:
        return _read_grouped(left, right, k, n)
    batch = math.prod(shape_hint(right)[:-2]) if right.dim() > 2 else 1
    rows = numel_hint(left) // max(1, k)
    return MatmulShape(batch, rows // max(1, batch), n, k, left.dtype)


def _read_grouped(left: torch.Tensor, right: torch.Tensor, k: int, n: int) -> MatmulShape:
    """A grouped matmul as its groups of equal share: the split is data, and data is not read."""
    if right.dim() == 3:
        groups = shape_hint(right)[0]
        rows = numel_hint(left) // max(1, k)
        return MatmulShape(groups, -(-rows // max(1, groups)), n, k, left.dtype)
    # Both two-dimensional: the groups share the inner dimension (a weight gradient).
    return MatmulShape(1, shape_hint(left)[0], n, k, left.dtype)


def _read_convolution(node: fx.Node, name: str) -> MatmulShape | None:
    backward = name == "convolution_backward"
    data = _tensor(_positional(node, 1 if backward else 0))
    weight = _tensor(_positional(node, 2 if backward else 1))
    result = _tensor(_positional(node, 0)) if backward else _tensor(node)
    if data is None or weight is None or result is None:
        return None
    channels, inner = shape_hint(weight)[0], math.prod(shape_hint(weight)[1:])
    rows = numel_hint(result) // max(1, shape_hint(result)[1])
    forward_flops = 2.0 * rows * channels * inner
    flops = _counted_flops(node)
    repeats = 1.0 if flops is None or forward_flops == 0 else flops / forward_flops
    return MatmulShape(1, rows, channels, inner, data.dtype, repeats)


def _counted_flops(node: fx.Node) -> float | None:
    """FLOPs from torch's registry; None where it has no formula or the formula refuses."""
    target = cast("OpOverload[..., Any]", node.target)
    formula = flop_registry.get(target.overloadpacket)
    if formula is None:
        return None
    args = cast("tuple[object, ...]", fx.map_arg(node.args, _probe))
    kwargs = cast("dict[str, Any]", fx.map_arg(node.kwargs, _probe))
    try:
        return float(formula(*args, **kwargs, out_val=_probe(node)))
    except (TypeError, ValueError, IndexError, AttributeError, AssertionError):
        return None


def _probe(node: fx.Node) -> Any:
    """What a FLOP formula reads: a tensor of the same shape, in plain integers."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return torch.empty(shape_hint(value), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        return tuple(
            torch.empty(shape_hint(item), device="meta") if isinstance(item, torch.Tensor) else item
            for item in items
        )
    return value


def read_attention(node: fx.Node) -> AttentionShape | None:
    """The attention of ``node``, any variant and either pass; None without metadata."""
    name = op_name(node).rsplit(".", 1)[-1]
    query, key, value = (_tensor(item) for item in _query_key_value(node))
    if query is None or key is None or value is None or query.dim() not in (3, 4):
        return None
    batch, heads, seq_q = _layout(node, name, query, "cum_seq_q")
    _, kv_heads, seq_kv = _layout(node, name, key, "cum_seq_k")
    return AttentionShape(
        batch=batch,
        q_heads=heads,
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=shape_hint(query)[-1],
        head_dim_v=shape_hint(value)[-1],
        dtype=query.dtype,
        causal=_is_causal(node),
        backward="backward" in name,
        flash2=_is_flash2(name),
        density=_density(node),
    )


def _query_key_value(node: fx.Node) -> tuple[object, object, object]:
    if isinstance(node.target, OpOverload):
        return argument(node, "query"), argument(node, "key"), argument(node, "value")
    return _positional(node, 0), _positional(node, 1), _positional(node, 2)


def _layout(
    node: fx.Node, name: str, tensor: torch.Tensor, offsets_name: str
) -> tuple[int, int, int]:
    """(batch, heads, seq) of an operand in the layout its op uses.

    The ``_scaled_dot_product_*`` ops and flex attention take (batch, heads, seq, dim); the
    ``_flash_attention_*`` and ``_efficient_attention_*`` ones (batch, seq, heads, dim), or packed
    (tokens, heads, dim) with offsets.
    """
    shape = shape_hint(tensor)
    heads_first = name.startswith(("_scaled_dot_product", "flex_attention"))
    if heads_first and len(shape) == 4:
        return shape[0], shape[1], shape[2]
    offsets = _tensor(argument(node, offsets_name))
    sequences = 1 if offsets is None else max(1, numel_hint(offsets) - 1)
    if len(shape) == 3:
        return sequences, shape[1], -(-shape[0] // sequences)
    return shape[0], shape[2], shape[1]


def _is_causal(node: fx.Node) -> bool:
    return bool(argument(node, "is_causal") or argument(node, "custom_mask_type"))


def _is_flash2(name: str) -> bool:
    """True for PyTorch's own kernels; cuDNN's is faster, and CPU ops stand for the target's best.

    Planning on CPU tensors for a GPU shows the CPU kernel, which is priced as the GPU's best.
    """
    return "cpu" not in name and "cudnn" not in name


def _density(node: fx.Node) -> float:
    """Share of the pairs a flex-attention mask keeps, if the user said so (``sparsity_hint``)."""
    custom = node.meta.get("custom")
    if not isinstance(custom, dict):
        return 1.0
    hint = cast("dict[str, object]", custom).get("sparsity_hint", 0.0)
    return 1.0 - min(1.0, max(0.0, float(hint))) if isinstance(hint, int | float) else 1.0


def argument(node: fx.Node, name: str) -> object:
    """The argument called ``name`` in the op's schema, its default, or None."""
    if name in node.kwargs:
        return node.kwargs[name]
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return None
    for position, declared in enumerate(cast("Any", target)._schema.arguments):
        if declared.name == name:
            in_place = not declared.kwarg_only and position < len(node.args)
            return node.args[position] if in_place else declared.default_value
    return None


def _positional(node: fx.Node, position: int) -> object:
    return node.args[position] if position < len(node.args) else None


def _tensor(value: object) -> torch.Tensor | None:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None
