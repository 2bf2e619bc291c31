"""What Inductor will not write to memory: kinds of FX nodes, and which of them are *virtual*.

Inductor lowers pointwise ops and reductions to loops and fuses them; a value whose readers all
sit in the same kernel never reaches memory. From FX alone this is decided conservatively:

* one reader that can fuse: virtual (a pointwise value with few reads is inlined there,
  ``torch/_inductor/ir.py``, ``StorageBox.should_realize_on_reuse``);
* several readers: virtual only if all of them can fuse and none needs what a kernel of another
  kind (matmul, attention, copy) makes of the value, so that one kernel can hold them all; values
  read far apart, such as a residual, are stored, as are outputs;
* a value made from nothing (full, iota, random) is made again where it is read.

Views are looked through. Mutations (``copy_``) store. Anything unknown cannot fuse.
"""

# torch declares its operator classes in private modules only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import enum
from functools import cache
from heapq import heappop, heappush
from typing import Any, cast

import torch
import torch.fx as fx
from torch._ops import HigherOrderOperator, OpOverload

from inductor_overlap.cost_model.sizes import tensor_bytes

MAX_FUSION_SIZE = 64
"""Nodes Inductor puts into one kernel at most (``torch/_inductor/config.py``, max_fusion_size)."""


class OpKind(enum.Enum):
    """How a node is priced."""

    FREE = "free"
    """No kernel: inputs, views, getitem, collectives and their waits, arithmetic on sizes."""
    GENERATOR = "generator"
    """Makes values from nothing; fuses into its readers."""
    FUSIBLE = "fusible"
    """Pointwise or reduction: fuses with producers and readers."""
    ABSORBING = "absorbing"
    """Stores its result, but reads fused producers: concatenation, padding, mutation."""
    MEMORY = "memory"
    """A kernel of its own, bound by the bytes it reads and writes."""
    MATMUL = "matmul"
    ATTENTION = "attention"
    UNKNOWN = "unknown"
    """Nothing is known: priced by its bytes and counted."""


_COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "c10d_functional", "c10d", "_dtensor"})
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "inductor_prims"})
_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh_copy", "lift_fresh"})
_GENERATORS = frozenset(
    {
        "full",
        "full_like",
        "ones",
        "ones_like",
        "zeros",
        "zeros_like",
        "empty",
        "empty_like",
        "new_full",
        "new_zeros",
        "new_ones",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "arange",
        "iota",
        "scalar_tensor",
        "eye",
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "inductor_seed",
        "inductor_seeds",
        "inductor_lookup_seed",
        "inductor_random",
        "inductor_randint",
    }
)
# Pointwise and reduction lowerings of ops that carry neither tag.
_FUSIBLE = frozenset(
    {
        "_to_copy",
        "copy",
        "fill",
        "native_dropout",
        "native_dropout_backward",
        "_softmax",
        "_log_softmax",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "native_batch_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "triu",
        "tril",
        "nll_loss_forward",
        "nll_loss_backward",
        "bernoulli",
    }
)
_ABSORBING = frozenset(
    {
        "cat",
        "stack",
        "constant_pad_nd",
        "slice_scatter",
        "select_scatter",
        "as_strided_scatter",
        "copy_",
    }
)
MATMULS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "matmul",
        "linear",
        "_int_mm",
        "_scaled_mm",
        "_scaled_mm_v2",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_scaled_grouped_mm_v2",
        "convolution",
        "_convolution",
        "convolution_backward",
        "convolution_overrideable",
        "cudnn_convolution",
        "_slow_conv2d_forward",
    }
)


def op_kind(node: fx.Node) -> OpKind:
    """The kind of ``node``; never raises."""
    if node.op in ("placeholder", "get_attr", "output"):
        return OpKind.FREE
    if node.op != "call_function":
        return OpKind.UNKNOWN
    return _target_kind(node.target)


def op_name(node: fx.Node) -> str:
    """``aten.mm`` style name of what a node calls: for messages and counters."""
    target = node.target
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target._opname}"
    name = getattr(target, "__name__", None) or getattr(target, "_name", None)
    return str(name or target)


@cache
def _target_kind(target: Any) -> OpKind:
    if isinstance(target, HigherOrderOperator):
        known = target.name() in ("flex_attention", "flex_attention_backward")
        return OpKind.ATTENTION if known else OpKind.UNKNOWN
    if not isinstance(target, OpOverload):
        # operator.getitem, operator.mul on sizes, torch.sym_max, ...: Python runs them.
        return OpKind.FREE
    if target.namespace in _COLLECTIVE_NAMESPACES:
        return OpKind.FREE
    return _overload_kind(cast("OpOverload[..., Any]", target), target._opname)


def _overload_kind(target: OpOverload[..., Any], name: str) -> OpKind:
    if target.namespace not in _KNOWN_NAMESPACES:
        return OpKind.UNKNOWN
    if "attention" in name:
        return OpKind.ATTENTION
    if name in MATMULS:
        return OpKind.MATMUL
    if name in _VIEWS or target.is_view or not target._schema.returns:
        return OpKind.FREE
    if name.startswith(("sym_", "_assert", "_local_scalar")):
        return OpKind.FREE
    return _loop_kind(target, name)


def _loop_kind(target: OpOverload[..., Any], name: str) -> OpKind:
    if name in _GENERATORS:
        return OpKind.GENERATOR
    if name in _ABSORBING:
        return OpKind.ABSORBING
    tags = target.tags
    if name in _FUSIBLE or torch.Tag.pointwise in tags or torch.Tag.reduction in tags:
        return OpKind.FUSIBLE
    return OpKind.MEMORY


def is_fusible(node: fx.Node) -> bool:
    """True if Inductor can fuse ``node`` with a producer and with its readers."""
    return op_kind(node) in (OpKind.FUSIBLE, OpKind.GENERATOR)


def is_view(node: fx.Node) -> bool:
    """True for nodes that hand on their first input's memory: views and getitem.

    Collectives and waits are free too, but what they return has been stored.
    """
    return (
        node.op == "call_function"
        and _target_is_view(node.target)
        and len(node.all_input_nodes) > 0
    )


@cache
def _target_is_view(target: Any) -> bool:
    return _target_kind(target) is OpKind.FREE and not _is_collective(target)


def _is_collective(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace in _COLLECTIVE_NAMESPACES


def is_virtual(node: fx.Node) -> bool:
    """True if Inductor keeps the value of ``node`` inside a kernel instead of storing it."""
    kind = op_kind(node)
    if kind not in (OpKind.FUSIBLE, OpKind.GENERATOR):
        return False
    readers = _readers(node)
    if not readers or any(op_kind(reader) not in _TAKES_FUSED for reader in readers):
        return False
    return kind is OpKind.GENERATOR or len(readers) == 1 or _fits_one_kernel(node, readers)


_TAKES_FUSED = (OpKind.FUSIBLE, OpKind.ABSORBING)


def _is_padding(node: fx.Node) -> bool:
    """True for what fills up an uneven shard for its gather, alone or packed with others.

    Only some ranks have it.
    """
    return node.target is torch.ops.aten.constant_pad_nd.default and _is_sent(node)


def _is_sent(node: fx.Node) -> bool:
    """Whether a collective sends ``node``, alone or packed with others."""
    return any(
        _is_collective(user.target) or ((is_view(user) or _is_cat(user)) and _is_sent(user))
        for user in node.users
    )


def _is_cat(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.cat.default


def _readers(node: fx.Node) -> list[fx.Node]:
    """Nodes that read the value of ``node``; views and padding looked through."""
    readers: list[fx.Node] = []
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if is_view(user) or _is_padding(user):
            pending.extend(user.users)
        else:
            readers.append(user)
    return readers


def _fits_one_kernel(node: fx.Node, readers: list[fx.Node]) -> bool:
    """Whether one kernel can compute ``node`` and all ``readers``.

    It cannot if a reader needs what a separate kernel or a collective makes of ``node``. What has
    nothing to do with ``node`` (packing a bucket, another layer's gradient) may stand between:
    fusion does not care where it runs. Counted is what every rank has: neither views nor padding.
    """
    missing = set(readers)
    behind: set[fx.Node] = set()
    seen = {node}
    related = sorted(node.users)  # a heap, in graph order
    num_ops = 0
    while related:
        current = heappop(related)
        if current in seen:
            continue
        seen.add(current)
        is_behind = not behind.isdisjoint(current.all_input_nodes)
        is_seen_through = is_view(current) or _is_padding(current)
        joins = not is_behind and (is_seen_through or is_fusible(current))
        if current in missing:
            missing.discard(current)
            if not missing or not joins:
                return not missing and not is_behind
        if not joins:
            behind.add(current)
        num_ops += not is_seen_through
        if num_ops >= MAX_FUSION_SIZE:
            return False
        for user in current.users:
            heappush(related, user)
    return False


def stored_inputs(node: fx.Node) -> dict[fx.Node, int]:
    """Stored nodes whose values the kernel of ``node`` reads, with the bytes it reads of each.

    Virtual producers are looked through, up to the size of one kernel; a view narrows what is
    read of its base; what the same kernel has just stored is not read again. What is absorbed, such
    as the parts of a concatenation, has a kernel for each.
    """
    found: dict[fx.Node, int] = {}
    parts = [[source] for source in node.all_input_nodes]
    if op_kind(node) is not OpKind.ABSORBING:
        parts = [node.all_input_nodes]
    for sources in parts:
        _find_stored(node, sources, found)
    return found


def _find_stored(node: fx.Node, sources: list[fx.Node], found: dict[fx.Node, int]) -> None:
    """Add to ``found`` what the kernel that makes ``node`` of ``sources`` reads."""
    seen: set[fx.Node] = set()
    num_ops = 0
    pending = list(sources)
    while pending:
        source = pending.pop()
        if source in seen:
            continue
        seen.add(source)
        num_ops += not is_view(source)  # which views there are may differ between ranks
        is_full = num_ops > MAX_FUSION_SIZE
        base = _base(source)
        if is_virtual(base) and not is_full:
            pending.extend(base.all_input_nodes if base is source else [base])
            continue
        made = _base(base.all_input_nodes[0]) if _is_padding(base) else base
        if not is_full and is_fusible(made) and _fits_one_kernel(made, [node]):
            # Stored for others, but by the kernel that goes on to compute ``node``.
            continue
        size_bytes = min(node_bytes(source), node_bytes(base))
        found[base] = min(node_bytes(base), found.get(base, 0) + size_bytes)


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def node_bytes(node: fx.Node) -> int:
    """Bytes of what ``node`` returns, all tensors of a tuple; 0 without tensor metadata."""
    return _value_bytes(node.meta.get("val"))


def _value_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return tensor_bytes(value)
    if isinstance(value, list | tuple):
        return sum(_value_bytes(item) for item in cast("list[object]", value))
    return 0
