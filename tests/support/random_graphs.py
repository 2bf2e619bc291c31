"""Random training graphs as plain data (`Recipe`), and the graph that one rank makes of it.

A recipe is drawn once and built once per rank: ranks differ in the rows of their shards and so in
their pads and unpads, never in their collectives. Recipes cover what policies must cope with:
gathers with casts and pads, gathers with several users, shared inputs, gathers of computed and of
mutated inputs, HSDP chains, gradients of parameters used twice, all-reduces and all-to-alls on the
critical path, mutated inputs, barriers, three process groups, mixed dtypes and odd sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx
from hypothesis import strategies as st
from torch import Tensor

from support.graphs import GraphBuilder, aten, peer_send, scale_

NUM_RANKS = 4
GROUPS = {"pg0": [[0, 1, 2, 3]], "pg1": [[0, 1], [2, 3]], "pg2": [[0, 2], [1, 3]]}
WIDTH = 8
ROWS = 8


@dataclass(frozen=True)
class Parameter:
    """One sharded parameter of ``rows`` x `WIDTH`.

    Attributes:
        group: ``pg0``, or ``pg1`` (replicated over ``pg2``: HSDP).
        cast: the shard is cast to bfloat16 before it is gathered.
        shares_head: what is gathered (after the cast and pad) is also read by compute.
        computed: the gathered value has two graph inputs behind it, so the gather is fixed.
        mutated: the graph writes the shard at its end.
        gradient: "no", "sum", "avg" or "average and cast" of its reduction.
        early_gather: it is gathered at the graph's beginning, not where it is used.
        early_unpad: HSDP all-reduces what a rank keeps, as DTensor does, not the padded shard.
    """

    rows: int
    group: str
    dtype: torch.dtype
    cast: bool
    shares_head: bool
    computed: bool
    mutated: bool
    gradient: str
    early_gather: bool
    early_unpad: bool

    @property
    def whole_rows(self) -> int:
        """``rows``, but even shards where compute other than casts and pads reads the shard.

        What such compute costs depends on the local shard, so uneven shards cannot price alike.
        """
        return ROWS if self.computed or self.mutated else self.rows


@dataclass(frozen=True)
class Recipe:
    """``steps`` in order: ("use", parameter), ("grad", parameter) or the name of an op."""

    parameters: tuple[Parameter, ...]
    steps: tuple[tuple[str, int], ...]
    backward: bool
    wait_late: bool


_PARAMETERS = st.builds(
    Parameter,
    rows=st.sampled_from([4, 5, 7, 8]),
    group=st.sampled_from(["pg0", "pg0", "pg1"]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    cast=st.booleans(),
    shares_head=st.sampled_from([False, False, False, True]),
    computed=st.sampled_from([False, False, False, False, True]),
    mutated=st.sampled_from([False, False, False, False, True]),
    gradient=st.sampled_from(["no", "sum", "sum", "avg", "cast"]),
    early_gather=st.booleans(),
    early_unpad=st.booleans(),
)
_OPS = ["tanh", "tanh", "mm", "view", "all_reduce", "all_to_all", "barrier", "scale_"]


@st.composite
def recipes(draw: st.DrawFn, max_steps: int = 10) -> Recipe:
    parameters = tuple(draw(st.lists(_PARAMETERS, min_size=1, max_size=5)))
    kinds = [("use", i) for i in range(len(parameters))]
    kinds += [("grad", i) for i, p in enumerate(parameters) if p.gradient != "no"]
    steps = draw(
        st.lists(
            st.one_of(
                st.sampled_from(kinds),
                st.sampled_from(kinds),
                st.tuples(st.sampled_from(_OPS), st.integers(0, 2)),
            ),
            min_size=1,
            max_size=max_steps,
        )
    )
    return Recipe(parameters, tuple(steps), draw(st.booleans()), draw(st.booleans()))


def build(recipe: Recipe, rank: int) -> fx.GraphModule:
    """The graph that ``rank`` compiles."""
    return _Writer(recipe, rank).write()


def make_inputs(gm: fx.GraphModule, rank: int) -> list[Tensor]:
    """Values for the placeholders of ``gm``: the same ones at every call."""
    generator = torch.Generator().manual_seed(rank)
    values: list[Tensor] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            like = node.meta["val"]
            values.append(torch.randn(like.shape, generator=generator).to(like.dtype))
    return values


def shard_rows(rows: int, group_size: int, position: int) -> tuple[int, int]:
    """Rows of one rank's shard, and of the padded shard, by torch.chunk's rule."""
    padded = -(-rows // group_size)
    return max(0, min(padded, rows - position * padded)), padded


class _Writer:
    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.recipe = recipe
        self.rank = rank
        self.b = GraphBuilder()
        self.shards = [self._shard(i, p) for i, p in enumerate(recipe.parameters)]
        self.x = self.b.input("tangents_1" if recipe.backward else "x", ROWS, WIDTH)
        self.offset = self.b.input("offset", ROWS, WIDTH)
        self.gathers: dict[int, tuple[fx.Node, bool]] = {}
        self.gradients: dict[int, list[fx.Node]] = {}
        self.outputs: list[fx.Node] = []

    def write(self) -> fx.GraphModule:
        for index, parameter in enumerate(self.recipe.parameters):
            if parameter.early_gather:
                self._gather(index)
        for kind, argument in self.recipe.steps:
            getattr(self, f"_{kind}")(argument)
        for index in self.gathers:
            self._wait_gather(index)
        for index in self.gradients:
            self._finish_gradients(index)
        for index, parameter in enumerate(self.recipe.parameters):
            if parameter.mutated:
                negated = self.b.call(aten.neg.default, self.shards[index])
                self.b.call(aten.copy_.default, self.shards[index], negated)
        return self.b.output(self.x, *self.outputs)

    def _size(self, parameter: Parameter) -> int:
        return len(GROUPS[parameter.group][0])

    def _position(self, parameter: Parameter) -> int:
        return next(g.index(self.rank) for g in GROUPS[parameter.group] if self.rank in g)

    def _shard(self, index: int, parameter: Parameter) -> fx.Node:
        rows, _ = shard_rows(parameter.whole_rows, self._size(parameter), self._position(parameter))
        name = f"layers.{index % 3}.w{index}"
        return self.b.parameter(name, rows, WIDTH, dtype=parameter.dtype)

    # Steps.

    def _gather(self, index: int) -> None:
        b, p = self.b, self.recipe.parameters[index]
        shard = self.shards[index]
        _, padded = shard_rows(p.whole_rows, self._size(p), self._position(p))
        if p.cast and p.dtype != torch.bfloat16:
            shard = b.cast(shard, torch.bfloat16)
        shard = b.pad_rows(shard, padded)
        if p.shares_head:
            self.outputs.append(b.call(aten.sum.default, shard))
        if p.computed:
            shard = b.call(aten.add.Tensor, shard, b.call(aten.neg.default, shard))
        start = b.gather_start(shard, p.group, group_size=self._size(p))
        self.gathers[index] = (start, False)
        if not self.recipe.wait_late:
            self._wait_gather(index)

    def _wait_gather(self, index: int) -> fx.Node:
        node, waited = self.gathers[index]
        if not waited:
            node = self.b.first_rows(self.b.wait(node), self.recipe.parameters[index].whole_rows)
            self.gathers[index] = (node, True)
        return node

    def _weight(self, index: int) -> fx.Node:
        if index not in self.gathers:
            self._gather(index)
        weight = self._wait_gather(index)
        return (
            weight
            if weight.meta["val"].dtype == torch.float32
            else self.b.cast(weight, torch.float32)
        )

    def _use(self, index: int) -> None:
        b, weight = self.b, self._weight(index)
        hidden = b.mm(self.x, b.transpose(weight))
        self.x = b.call(aten.tanh.default, b.mm(hidden, weight))

    def _grad(self, index: int) -> None:
        b, p = self.b, self.recipe.parameters[index]
        grad = b.call(aten.slice.Tensor, b.mm(b.transpose(self.x), self.x), 0, 0, p.whole_rows)
        _, padded = shard_rows(p.whole_rows, self._size(p), 0)
        full = b.pad_rows(grad, padded * self._size(p))
        if p.gradient == "cast":
            full = self._viewed(b.cast(full, torch.bfloat16))
        op = "avg" if p.gradient == "avg" else "sum"
        start = b.scatter_start(full, p.group, op=op, group_size=self._size(p))
        result = b.wait(b.stamp(start, self.shards[index]))
        if p.group == "pg1":
            if p.early_unpad:
                result = self._unpadded(index, result)
                shape = list(result.meta["val"].shape)
                result = b.call(aten.reshape.default, result, shape)  # DTensor leaves one too
            if p.gradient == "cast":
                result = b.cast(result, torch.float32)
            result = b.wait(b.stamp(b.reduce_start(result, "pg2", op=op), self.shards[index]))
        self.gradients.setdefault(index, []).append(result)

    def _viewed(self, node: fx.Node) -> fx.Node:
        flat = self.b.call(aten.reshape.default, node, [node.meta["val"].numel()])
        return self.b.call(aten.reshape.default, flat, list(node.meta["val"].shape))

    def _finish_gradients(self, index: int) -> None:
        b, p = self.b, self.recipe.parameters[index]
        parts = [self._unpadded(index, result) for result in self.gradients[index]]
        total = parts[0]
        for part in parts[1:]:
            total = b.call(aten.add.Tensor, total, part)
        self.outputs.append(b.cast(total, p.dtype) if p.dtype != torch.float32 else total)

    def _unpadded(self, index: int, result: fx.Node) -> fx.Node:
        p = self.recipe.parameters[index]
        rows, _ = shard_rows(p.whole_rows, self._size(p), self._position(p))
        return self.b.first_rows(result, rows)

    def _tanh(self, _: int) -> None:
        shifted = self.b.call(aten.add.Tensor, self.x, self.offset)
        self.x = self.b.call(aten.tanh.default, shifted)

    def _mm(self, _: int) -> None:
        self.x = self.b.call(aten.tanh.default, self.b.mm(self.x, self.offset))

    def _view(self, _: int) -> None:
        flat = self.b.call(aten.reshape.default, self.b.transpose(self.x), [ROWS * WIDTH])
        self.x = self.b.call(aten.reshape.default, flat, [ROWS, WIDTH])

    def _all_reduce(self, group: int) -> None:
        self.x = self.b.all_reduce(self.x, f"pg{group}", op="avg")

    def _all_to_all(self, group: int) -> None:
        size = len(GROUPS[f"pg{group}"][0])
        self.x = self.b.exchange(self.x, f"pg{group}", group_size=size)

    def _barrier(self, group: int) -> None:
        sent = self.b.call(peer_send, self.offset if group else self.x, f"pg{group}")
        self.outputs.append(sent)

    def _scale_(self, _: int) -> None:
        fresh = self.b.mm(self.x, self.offset)
        self.b.call(scale_, fresh)
        self.x = self.b.call(aten.tanh.default, fresh)
