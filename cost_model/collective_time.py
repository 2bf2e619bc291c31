"""Time of one NCCL or gloo collective, from its size and the placement of its ranks.

Written once as sympy expressions in the size S (nccl-tests bytes), the number of nodes N and the
ranks per node g, so that a symbolic size works, and compiled by ``lambdify`` to plain Python for
speed. What each expression says, for n = N g ranks:

* ring (all-gather, reduce-scatter, all-reduce): n-1 steps (twice that for all-reduce), each a
  network hop or an NVLink hop; the wire carries S (n-1)/n bytes (twice that) at the bandwidth of a
  node's share of the fabric or of NVLink. The own part is copied by the same channels.
* tree (all-reduce over nodes): 2 log2 N network hops; a node sends S (two nodes: an exchange) or
  2 S (more: a double binary tree's inner node, S/2 up and S down in one tree, S/2 up in the
  other) and relays 2 S along the chain of its GPUs.
* NVLS (all-reduce, NVLink SHARP): the switch reduces, so that a GPU moves S (1 + 1/g) bytes and
  the latency does not grow with ranks; across nodes it takes the place of the chain of the tree.
* all-to-all: n-1 messages of S/n bytes; what leaves the node shares the GPU's NIC.

A pipeline of k chunks takes ``(wire + k c) + (wire + k c) d / k`` for a cost c of each chunk in
each of d stages; with the best k that is ``wire + d c + 2 sqrt(wire d c)``: the square root is the
ramp to the plateau. A ring that crosses nodes has none: one chunk of each rank goes round, and its
steps are the latency. Public logs show a straight line there, from 1 MB to the plateau.
The LL protocol (a flag in every word) has a cheap step and part of the bandwidth, inside a node and
far less between nodes, where it sends many small messages; Simple has the reverse. The least of all
algorithms and protocols is the time.

Refused: unknown kinds, negative sizes, empty groups (``ValueError``).

Sources: algorithm volumes: https://arxiv.org/abs/2507.04786 (Demystifying NCCL) and the NCCL
documentation; constants: the profiles, fitted to public nccl-tests logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, cast, get_args

import sympy as sp  # pyright: ignore[reportMissingTypeStubs]

from inductor_overlap.cost_model.checks import check_size, is_count

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
COLLECTIVE_KINDS: tuple[str, ...] = get_args(CollectiveKind)


class LinkConstants(NamedTuple):
    """What one group of ranks sees of the hardware; bandwidths are one direction.

    Attributes:
        base_us: fixed cost of a collective inside a node (launch of the kernel, first flag).
        network_base_us: what crossing nodes adds to it.
        local_hop_us: one step between GPUs of a node, LL protocol.
        local_simple_us: the same, Simple protocol.
        network_hop_us: one step between nodes, LL protocol.
        network_simple_us: the same, Simple protocol.
        ring_step_us: what a step inside a node costs more in a ring that crosses nodes, where it
            waits for the proxies of the network (Simple protocol).
        ll_share: bandwidth share the LL protocol keeps inside a node.
        network_ll_share: the same between nodes.
        fill_us: fill time of the channels inside a node: the ramp to the plateau.
        network_fill_us: the same of all-to-all across nodes.
        local_gb_per_s: plateau of a GPU in a ring over NVLink (or PCIe, or shared memory).
        copy_gb_per_s: rate at which a ring's channels copy the own part.
        tree_gb_per_s: plateau of a GPU in the chain inside a node of the all-reduce tree.
        nvls_gb_per_s: plateau of a GPU through NVLink SHARP; 0 where there is none.
        nvls_us: what synchronising the switch adds to the fixed cost.
        p2p_gb_per_s: plateau of a GPU in all-to-all, whose messages are sends and receives.
        p2p_copy_gb_per_s: rate of the message a rank sends to itself.
        message_us: issue of one all-to-all message inside the node.
        network_message_us: the same across nodes.
        node_gb_per_s: plateau of a node into the fabric with the NICs these ranks use.
        overlap_order: p in the p-norm of two pipelined stages; infinity would be perfect overlap.
    """

    base_us: float
    network_base_us: float
    local_hop_us: float
    local_simple_us: float
    network_hop_us: float
    network_simple_us: float
    ring_step_us: float
    ll_share: float
    network_ll_share: float
    fill_us: float
    network_fill_us: float
    local_gb_per_s: float
    copy_gb_per_s: float
    tree_gb_per_s: float
    nvls_gb_per_s: float
    nvls_us: float
    p2p_gb_per_s: float
    p2p_copy_gb_per_s: float
    message_us: float
    network_message_us: float
    node_gb_per_s: float
    buffer_us: float
    overlap_order: float


S, N, G = (sp.Symbol(name, positive=True) for name in ("size_bytes", "num_nodes", "ranks_per_node"))
_RANKS = N * G
_C = {name: sp.Symbol(name, positive=True) for name in LinkConstants._fields}
_BYTES_PER_US = 1e3  # 1 GB/s moves 1e3 bytes in a microsecond


def _us(size: sp.Expr, bandwidth: sp.Expr) -> sp.Expr:
    return size / (bandwidth * _BYTES_PER_US)


def _root(value: sp.Expr) -> sp.Expr:
    return value ** sp.Rational(1, 2)


def _pipelined(stages: list[sp.Expr]) -> sp.Expr:
    """Time of stages that run as one pipeline: near the longest, a little more when they tie."""
    if len(stages) == 1:
        return stages[0]
    order = _C["overlap_order"]
    return sum((stage**order for stage in stages), sp.Integer(0)) ** (1 / order)


def _wires(stages: Mapping[str, sp.Expr]) -> tuple[sp.Expr, sp.Expr]:
    """Time of the bytes by the LL and by the Simple protocol, of stages by their LL share."""
    ll = _pipelined([stage / _C[share] for share, stage in stages.items()])
    return ll, _pipelined(list(stages.values()))


def _chunked(stages_us: sp.Expr, wire: sp.Expr, depth: sp.Expr) -> sp.Expr:
    """A chunked pipeline of ``depth`` stages; its chunks stop growing at the buffer's size."""
    limit = _C["buffer_us"] * depth
    return stages_us + wire + 2 * _root(stages_us * wire * limit / (wire + limit))


def _hops(local: sp.Expr, network: sp.Expr, simple: bool) -> sp.Expr:
    """Time of ``local`` steps inside nodes and ``network`` steps between them."""
    if simple:
        return local * _C["local_simple_us"] + network * _C["network_simple_us"]
    return local * _C["local_hop_us"] + network * _C["network_hop_us"]


def _ring(passes: int, across_nodes: bool, several_local: bool) -> list[sp.Expr]:
    """A ring: ``passes`` is 1 for all-gather and reduce-scatter, 2 for all-reduce."""
    volume = passes * S * (_RANKS - 1) / _RANKS
    stages: dict[str, sp.Expr] = {}
    if several_local or not across_nodes:
        stages["ll_share"] = _us(volume, _C["local_gb_per_s"])
    if across_nodes:
        stages["network_ll_share"] = _us(volume, _C["node_gb_per_s"])
    copy = _us(S / _RANKS, _C["copy_gb_per_s"])
    ll_wire, wire = (wire + copy for wire in _wires(stages))
    steps = passes * N * (G - 1), passes * (N - 1)
    simple_us = _hops(*steps, simple=True)
    if across_nodes:
        simple_us += steps[0] * _C["ring_step_us"]
    ramp_us = 0 if across_nodes else 2 * _root(_C["fill_us"] * wire)
    base = _base(across_nodes)
    return [base + _hops(*steps, simple=False) + ll_wire, base + simple_us + wire + ramp_us]


def _tree(two_nodes: bool, several_local: bool) -> list[sp.Expr]:
    """The all-reduce tree over nodes, a chain of GPUs inside each node."""
    stages = {"network_ll_share": _us(S if two_nodes else 2 * S, _C["node_gb_per_s"])}
    if several_local:
        stages["ll_share"] = _us(2 * S, _C["tree_gb_per_s"])
    ll_wire, wire = _wires(stages)
    steps = 2 * (G - 1), 2 * sp.log(N, 2)
    simple_us = _hops(*steps, simple=True)
    return [
        _base(True) + _hops(*steps, simple=False) + ll_wire,
        _base(True) + _chunked(simple_us, wire, steps[1]),
    ]


def _nvls(across_nodes: bool, two_nodes: bool) -> list[sp.Expr]:
    """All-reduce in the NVLink switch; across nodes a tree joins the switches."""
    stages = [_us(S * (1 + 1 / G), _C["nvls_gb_per_s"])]
    base = _base(across_nodes) + _C["nvls_us"]
    if not across_nodes:
        return [base + stages[0] + 2 * _root(_C["fill_us"] * stages[0])]
    stages.append(_us(S if two_nodes else 2 * S, _C["node_gb_per_s"]))
    wire = _pipelined(stages)
    depth = 2 * sp.log(N, 2)
    return [base + _chunked(depth * _C["network_simple_us"], wire, depth)]


def _all_to_all(across_nodes: bool, several_local: bool) -> list[sp.Expr]:
    """n-1 messages: those inside the node over NVLink, the others through the GPU's own NIC."""
    stages: list[sp.Expr] = []
    if several_local or not across_nodes:
        stages.append(_us(S * (G - 1) / _RANKS, _C["p2p_gb_per_s"]))
    if across_nodes:
        stages.append(_us(S * (N - 1) * G / _RANKS, _C["node_gb_per_s"] / G))
    wire = _pipelined(stages) + _us(S / _RANKS, _C["p2p_copy_gb_per_s"])
    messages = (G - 1) * _C["message_us"] + (N - 1) * G * _C["network_message_us"]
    fill = _C["network_fill_us" if across_nodes else "fill_us"]
    return [_base(across_nodes) + messages + wire + 2 * _root(fill * wire)]


def _base(across_nodes: bool) -> sp.Expr:
    return _C["base_us"] + _C["network_base_us"] if across_nodes else _C["base_us"]


@cache
def collective_expressions(
    kind: str, across_nodes: bool, two_nodes: bool, several_local: bool, has_nvls: bool
) -> tuple[sp.Expr, ...]:
    """The candidate times (us) of one kind on one class of placement; the least one is taken."""
    if kind == "all_to_all":
        return tuple(_all_to_all(across_nodes, several_local))
    if kind in ("all_gather", "reduce_scatter"):
        return tuple(_ring(1, across_nodes, several_local))
    candidates = _ring(2, across_nodes, several_local)
    if across_nodes:
        candidates += _tree(two_nodes, several_local)
    if has_nvls and several_local:
        candidates += _nvls(across_nodes, two_nodes)
    return tuple(candidates)


@cache
def _compiled(
    kind: str, across_nodes: bool, two_nodes: bool, several_local: bool, has_nvls: bool
) -> Callable[..., list[float]]:
    expressions = collective_expressions(kind, across_nodes, two_nodes, several_local, has_nvls)
    arguments = [S, N, G, *_C.values()]
    return cast(
        "Callable[..., list[float]]",
        sp.lambdify(  # pyright: ignore[reportUnknownMemberType]
            arguments, list(expressions), modules="math", cse=True
        ),
    )


def _placement_class(
    kind: str, num_nodes: int, ranks_per_node: int, constants: LinkConstants
) -> tuple[str, bool, bool, bool, bool]:
    has_nvls = kind == "all_reduce" and constants.nvls_gb_per_s > 0
    return kind, num_nodes > 1, num_nodes == 2, ranks_per_node > 1, has_nvls


def check_collective(kind: str, num_nodes: int, ranks_per_node: int) -> None:
    """Raise ``ValueError`` for a kind or a placement that means nothing."""
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(
            f"unknown collective kind {kind!r}; expected one of {', '.join(COLLECTIVE_KINDS)}"
        )
    if not is_count(num_nodes) or not is_count(ranks_per_node):
        raise ValueError(
            "a group needs at least one node and one rank per node, in whole numbers; got "
            f"num_nodes={num_nodes!r}, ranks_per_node={ranks_per_node!r}"
        )


def collective_us(
    kind: str, size_bytes: float, num_nodes: int, ranks_per_node: int, constants: LinkConstants
) -> float:
    """Time (us) of one collective.

    Args:
        kind: one of ``COLLECTIVE_KINDS``.
        size_bytes: as nccl-tests counts: the whole output of an all-gather, the whole input of a
            reduce-scatter, the buffer of one rank for all-reduce and all-to-all.
        num_nodes: nodes that hold a rank of the group.
        ranks_per_node: ranks of the group on each.
        constants: the links of this group.

    Raises:
        ValueError: an unknown kind, an empty group or a negative or non-finite size.
    """
    check_collective(kind, num_nodes, ranks_per_node)
    check_size(kind, size_bytes)
    if num_nodes * ranks_per_node == 1:
        return 0.0
    evaluate = _compiled(*_placement_class(kind, num_nodes, ranks_per_node, constants))
    return min(
        evaluate(max(size_bytes, 1.0), num_nodes, ranks_per_node, *constants),
    )


def collective_expression(
    kind: str,
    num_nodes: int,
    ranks_per_node: int,
    constants: LinkConstants,
    size: sp.Expr = S,
) -> sp.Expr:
    """The same time (us) as a sympy expression of ``size`` (bytes), for symbolic sizes."""
    check_collective(kind, num_nodes, ranks_per_node)
    if num_nodes * ranks_per_node == 1:
        return sp.Float(0)
    placement = _placement_class(kind, num_nodes, ranks_per_node, constants)
    values: dict[Any, Any] = {N: num_nodes, G: ranks_per_node, S: size}
    values.update({_C[name]: value for name, value in constants._asdict().items()})
    return cast("sp.Expr", sp.Min(*(e.subs(values) for e in collective_expressions(*placement))))
