"""Prices of FX nodes: what is stored, what is read, which formula, and what a user may bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.fx as fx
from support.graphs import GraphBuilder
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.cluster_prices import ClusterCostModel
from inductor_overlap.cost_model.curve import Curve
from inductor_overlap.cost_model.fusion import is_virtual
from inductor_overlap.cost_model.pricing import (
    CostModel,
    CostModelError,
    as_full,
    default_cluster,
    resolve_cost_model,
)
from inductor_overlap.cost_model.schedule import Machine

pytestmark = pytest.mark.quick

aten = torch.ops.aten
H100 = Cluster.preset("h100-ib")
MIB = 2**20


def trace(function: Callable[..., object], *shapes: tuple[int, ...]) -> fx.Graph:
    """The ATen graph of ``function`` on bf16 fake tensors."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        return make_fx(function, tracing_mode="real")(*inputs).graph


def prices(graph: fx.Graph) -> dict[str, float]:
    """Price by node name, zeros left out."""
    model = ClusterCostModel(H100)
    priced = {node.name: model.compute_us(node) for node in graph.nodes}
    assert not model.fallbacks
    return {name: price for name, price in priced.items() if price}


def test_a_chain_of_pointwise_ops_is_one_pass() -> None:
    graph = trace(lambda x: (x.relu() + 1).sigmoid() * 2, (1024, 1024))
    # 2 MiB read, 2 MiB written, where the chain ends.
    assert prices(graph) == {"mul": pytest.approx(H100.memory_us(4 * MIB))}


def test_a_norm_reads_its_input_once() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()

    assert list(prices(trace(norm, (1024, 1024))).values()) == [
        pytest.approx(H100.memory_us(4 * MIB))
    ]


def test_a_value_read_far_away_is_stored() -> None:
    def residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return torch.relu(y) @ w + y

    graph = trace(residual, (1024, 1024), (1024, 1024))
    named = {node.name: node for node in graph.nodes}
    assert not is_virtual(named["add"])
    got = prices(graph)
    assert got["add"] == pytest.approx(H100.memory_us(4 * MIB))
    # The relu's kernel has just stored y; it writes only its own result.
    assert got["relu"] == pytest.approx(H100.memory_us(2 * MIB))
    assert got["add_1"] == pytest.approx(H100.memory_us(6 * MIB))


def test_a_kernel_in_between_separates_only_what_needs_it() -> None:
    """The matmul reads nothing of relu(x): both readers of that can be in one kernel."""

    def independent(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x)
        return y + 1, w @ w, y * 2

    def dependent(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x)
        return y + 1, y * ((y + 1) @ w)

    graphs = [trace(f, (512, 512), (512, 512)) for f in (independent, dependent)]
    virtual = [{node.name for node in graph.nodes if is_virtual(node)} for graph in graphs]
    assert virtual == [{"relu"}, set()]


def test_a_collective_separates_like_a_kernel() -> None:
    """y is read by what is reduced, and with the result; the second one's reader waits for x."""
    b = GraphBuilder()
    x = b.input("x", 512, 512)
    y = b.call(aten.relu.default, x)
    reduced = b.wait(b.reduce_start(b.call(aten.add.Tensor, y, 1)))
    b.graph.output(b.call(aten.add.Tensor, y, reduced))
    assert not is_virtual(y)


@pytest.mark.parametrize("num_between", [0, 10, 100])
def test_prices_do_not_depend_on_where_unrelated_kernels_run(num_between: int) -> None:
    b = GraphBuilder()
    x, w = b.input("x", 512, 512), b.input("w", 512, 512)
    y = b.call(aten.relu.default, x)
    first = b.call(aten.add.Tensor, y, 1)
    copies = [b.call(aten.clone.default, w) for _ in range(num_between)]
    b.graph.output((first, b.call(aten.mul.Tensor, y, 2), *copies))
    assert is_virtual(y)


def test_a_cast_before_packing_is_part_of_the_packing() -> None:
    graph = trace(lambda x, y: torch.cat([x.float(), y.float()]), (512, 1024), (512, 1024))
    # 1 + 1 MiB of bf16 read, 4 MiB of fp32 written.
    assert prices(graph) == {"cat": pytest.approx(H100.memory_us(6 * MIB))}


def test_a_view_narrows_what_is_read() -> None:
    graph = trace(lambda x: x[:256].relu(), (1024, 1024))
    assert prices(graph) == {"relu": pytest.approx(H100.memory_us(MIB))}


def test_a_long_chain_of_views_is_looked_through() -> None:
    def flip(x: torch.Tensor) -> torch.Tensor:
        x = x.relu()
        for _ in range(1200):
            x = x.t()
        return x + 1

    graph = trace(flip, (1024, 1024))
    assert prices(graph) == {"add": pytest.approx(H100.memory_us(4 * MIB))}


def test_gathers_touch_rows_and_not_the_table() -> None:
    def lookup(table: torch.Tensor) -> torch.Tensor:
        return table[torch.zeros(64, dtype=torch.long)]

    price = prices(trace(lookup, (100_000, 1024)))["index"]
    assert price == pytest.approx(H100.memory_us(2 * 64 * 1024 * 2))


def test_generators_are_free_inside_kernels() -> None:
    assert list(prices(trace(lambda x: x + torch.ones_like(x), (1024, 1024)))) == ["add"]


@pytest.mark.parametrize(
    ("function", "shapes", "expected_us"),
    [
        (
            lambda a, b: aten.mm(a, b),
            [(512, 256), (256, 1024)],
            H100.sustained_matmul_us(512, 1024, 256),
        ),
        (
            lambda c, a, b: aten.addmm(c, a, b),
            [(1024,), (512, 256), (256, 1024)],
            H100.sustained_matmul_us(512, 1024, 256),
        ),
        (
            lambda a, b: aten.bmm(a, b),
            [(4, 512, 256), (4, 256, 1024)],
            H100.sustained_matmul_us(512, 1024, 256, batch=4),
        ),
        (
            lambda c, a, b: aten.baddbmm(c, a, b),
            [(4, 512, 1024), (4, 512, 256), (4, 256, 1024)],
            H100.sustained_matmul_us(512, 1024, 256, batch=4),
        ),
        (
            # 8 x 32 x 32 output pixels, 64 channels, 3 x 3 x 32 inputs each
            lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
            [(8, 32, 32, 32), (64, 32, 3, 3)],
            H100.sustained_matmul_us(8 * 32 * 32, 64, 32 * 9),
        ),
    ],
)
def test_matmuls(
    function: Callable[..., object], shapes: list[tuple[int, ...]], expected_us: float
) -> None:
    assert list(prices(trace(function, *shapes)).values()) == [pytest.approx(expected_us)]


def test_float32_matmuls_run_at_the_rate_torch_allows() -> None:
    with FakeTensorMode():
        square = torch.empty(4096, 4096)
        graph = make_fx(torch.mm, tracing_mode="real")(square, square).graph
    assert prices(graph)["mm"] == pytest.approx(H100.sustained_matmul_us(4096, 4096, 4096, "fp32"))
    torch.set_float32_matmul_precision("high")
    try:
        tf32 = H100.sustained_matmul_us(4096, 4096, 4096, "tf32")
        assert prices(graph)["mm"] == pytest.approx(tf32)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_cpu_attention_stands_for_the_best_kernel_of_the_target() -> None:
    graph = trace(
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0],
        *[(2, 8, 1024, 64)] * 3,
    )
    expected = H100.attention_us(2, 8, 8, 1024, 1024, 64, causal=True)
    assert list(prices(graph).values()) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("op", "flash2"),
    [
        (aten._scaled_dot_product_flash_attention.default, True),
        (aten._scaled_dot_product_cudnn_attention.default, False),
        (aten._scaled_dot_product_efficient_attention.default, True),
    ],
)
def test_attention_variants_by_their_schema(op: torch._ops.OpOverload, flash2: bool) -> None:
    graph = _graph_of(op, *[(2, 8, 1024, 64)] * 3, kwargs={"is_causal": True})
    expected = H100.attention_us(2, 8, 8, 1024, 1024, 64, causal=True, flash2=flash2)
    assert list(prices(graph).values()) == [pytest.approx(expected)]


def test_attention_backward() -> None:
    shapes = [(2, 8, 1024, 64)] * 5 + [(2, 8, 1024)]
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    graph = _graph_of(op, *shapes, extra=(0.0, True))
    expected = H100.attention_us(2, 8, 8, 1024, 1024, 64, causal=True, backward=True)
    assert list(prices(graph).values()) == [pytest.approx(expected)]


def test_packed_attention_layout() -> None:
    # _flash_attention_forward takes (batch, seq, heads, dim).
    op = aten._flash_attention_forward.default
    graph = _graph_of(op, *[(2, 1024, 8, 64)] * 3, extra=(None, None, 1024, 1024, 0.0, True, False))
    expected = H100.attention_us(2, 8, 8, 1024, 1024, 64, causal=True, flash2=True)
    assert list(prices(graph).values()) == [pytest.approx(expected)]


def test_unknown_ops_cost_their_bytes_and_are_counted() -> None:
    library = torch.library.Library("pricing_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    graph = _graph_of(torch.ops.pricing_test.twice.default, (1024, 1024), result=(1024, 1024))
    model = ClusterCostModel(H100)
    (node,) = [node for node in graph.nodes if node.op == "call_function"]
    assert model.compute_us(node) == pytest.approx(H100.memory_us(4 * MIB))
    assert model.fallbacks == {"pricing_test.twice": 1}


def test_missing_metadata_is_counted_and_does_not_raise() -> None:
    graph = _graph_of(aten.mm.default, (8, 8), (8, 8))
    for node in graph.nodes:
        node.meta.clear()
    model = ClusterCostModel(H100)
    assert [model.compute_us(node) for node in graph.nodes] == [0.0] * 4
    assert model.fallbacks == {"aten.mm": 1}


def test_unbacked_sizes_are_priced() -> None:
    def select(x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0].nonzero().squeeze(-1)] + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = make_fx(select, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
            torch.ones(8, 16)
        ).graph
    model = ClusterCostModel(H100)
    assert all(model.compute_us(node) >= 0 for node in graph.nodes)


def test_collectives_by_the_placement_of_their_ranks() -> None:
    model = ClusterCostModel(H100)
    expected = H100.collective_us("all_gather", MIB, num_nodes=3, ranks_per_node=1)
    assert model.collective_us("all_gather", MIB, [0, 8, 16]) == expected
    assert model.collective_us("all_gather", MIB, [5]) == 0
    assert model.collective_us("broadcast", MIB, [0, 1]) > 0
    assert model.fallbacks == {"broadcast": 1}


def test_communicators_share_nics_and_nvlink() -> None:
    groups = {"node": range(8), "strided": (0, 8), "world": range(16), "self": (3,)}
    machine = ClusterCostModel(H100).machine(groups)
    assert [machine.link(name) for name in ("node", "strided", "world")] == [
        "nvlink",
        "network",
        "network",
    ]
    assert machine.launch_us == machine.start_us == 0.9
    assert machine.contention == 1.19
    apart = ClusterCostModel(Cluster("h100", "ib-ndr-400x8", share_links=False)).machine(groups)
    assert not apart.links
    gloo = ClusterCostModel(Cluster.preset("cpu-gloo")).machine(groups)
    assert gloo.queue_width == 2
    # On a CPU the call, and the threads that it wakes, take compute's own core.
    assert gloo.start_us > 100 * gloo.launch_us


class Constant:
    """A user's model: one price for everything."""

    def __init__(self, price: object) -> None:
        self.price = price

    def compute_us(self, node: fx.Node) -> float:
        if isinstance(self.price, Exception):
            raise self.price
        return self.price  # type: ignore[return-value]

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return 7.0


def test_a_users_model_is_completed() -> None:
    model = as_full(Constant(3.0))
    node = next(iter(_graph_of(aten.mm.default, (8, 8), (8, 8)).nodes))
    assert model.compute_us(node) == 3.0
    assert model.collective_us("all_gather", 8, [0, 1]) == 7.0
    assert model.copy_us(MIB) == H100.memory_us(2 * MIB)
    assert model.machine({}).queue_width == 1
    assert model.uuid() is None
    assert as_full(model) is model
    assert isinstance(Constant(1.0), CostModel)


@pytest.mark.parametrize("price", [float("nan"), -1.0, float("inf"), "fast", None])
def test_a_price_that_is_no_time_is_an_error_naming_the_op(price: object) -> None:
    graph = _graph_of(aten.mm.default, (8, 8), (8, 8))
    node = list(graph.nodes)[2]
    with pytest.raises(
        CostModelError, match=r"Constant.compute_us for aten.mm \(node mm_default\) ret"
    ):
        as_full(Constant(price)).compute_us(node)


def test_a_users_exception_is_kept_as_the_cause() -> None:
    node = list(_graph_of(aten.mm.default, (8, 8), (8, 8)).nodes)[2]
    with pytest.raises(CostModelError, match="raised KeyError: 'x'") as caught:
        as_full(Constant(KeyError("x"))).compute_us(node)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_model_without_the_two_methods_is_refused() -> None:
    with pytest.raises(ValueError, match="has no compute_us and no collective_us"):
        as_full(object())  # type: ignore[arg-type]


def test_the_cluster_that_is_assumed() -> None:
    assert default_cluster("cpu") == Cluster.preset("cpu-gloo")
    assert default_cluster("meta") == H100
    with pytest.raises(ValueError, match="no cluster profile is for device type 'xpu'"):
        default_cluster("xpu")


def test_resolving_what_the_user_passed() -> None:
    for cluster in ("h100-ib", H100):
        model = resolve_cost_model(cluster, None)
        assert isinstance(model, ClusterCostModel)
        assert model.uuid() == f"ClusterCostModel:{H100.uuid()}"
    assert resolve_cost_model(None, None, "cpu").uuid() != model.uuid()
    assert resolve_cost_model(None, Constant(1.0)).copy_us(0) == 0
    with pytest.raises(ValueError, match="two sources of the same prices"):
        resolve_cost_model("h100-ib", Constant(1.0))


def _graph_of(
    op: torch._ops.OpOverload,
    *shapes: tuple[int, ...],
    extra: tuple[object, ...] = (),
    kwargs: dict[str, object] | None = None,
    result: tuple[int, ...] | None = None,
) -> fx.Graph:
    """A graph of one call: ops that no CPU kernel runs can be priced all the same."""
    graph = fx.Graph()
    with FakeTensorMode():
        inputs = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
        for node, shape in zip(inputs, shapes, strict=True):
            node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16)
        call = graph.call_function(op, (*inputs, *extra), kwargs)  # type: ignore[arg-type]
        if result is not None:
            call.meta["val"] = torch.empty(result, dtype=torch.bfloat16)
    graph.output(call)
    return graph


def test_errors_are_means_by_time_and_small_collectives_are_rough() -> None:
    model = ClusterCostModel(H100, "h100-ib")
    graph = trace(lambda a, b: torch.relu(a @ b), (512, 512), (512, 512))
    times = {node.name: model.compute_us(node) for node in graph.nodes}
    small, large = ("all_gather", 1000, range(16)), ("all_gather", 2**29, range(8))
    errors = model.errors([small, large])
    us = [model.collective_us(*collective) for collective in (small, large)]
    of = [
        H100.collective_error("all_gather", 1000, num_nodes=2, ranks_per_node=8),
        H100.collective_error("all_gather", 2**29, num_nodes=1, ranks_per_node=8),
    ]
    assert errors.collectives == pytest.approx((us[0] * of[0] + us[1] * of[1]) / sum(us))
    by_time = times["mm"] * H100.compute_error("matmul")
    by_time += times["relu"] * H100.compute_error("memory")
    assert errors.compute == pytest.approx(by_time / (times["mm"] + times["relu"]))
    assert (errors.prices, errors.num_rough) == ("h100-ib", 1)
    assert errors.assumptions == (
        "compute is 1.19 times slower beside collectives",
        "communicators on one link share its bandwidth",
        "a grouped launch joins collectives within 4 times of each other's size",
    )
    assert ClusterCostModel(H100).errors([]).prices == "h100, ib-ndr-400x8"


def test_a_calibrated_placement_is_not_rough() -> None:
    curve = Curve("all_gather", 2, 8, (1000,), (30.0,))
    calibrated = Cluster(
        "h100",
        "ib-ndr-400x8",
        contention=1.0,
        share_links=False,
        overrides=(("aggregation_ratio", 0.0),),
        curves=(curve,),
    )
    errors = ClusterCostModel(calibrated).errors([("all_gather", 1000, range(16))])
    assert errors.num_rough == 0
    assert errors.collectives == pytest.approx(0.021)
    assert errors.assumptions == (
        "collectives do not slow compute",
        "communicators on one link do not share its bandwidth",
        "a grouped launch runs its collectives one after the other",
    )


def test_nothing_is_known_of_prices_of_ones_own() -> None:
    errors = as_full(Constant(1.0)).errors([("all_gather", 1000, range(16))])
    assert (errors.prices, errors.collectives, errors.compute) == ("Constant", None, None)


def test_what_stands_in_for_a_model_of_ones_own_is_said() -> None:
    assert as_full(Constant(1.0)).errors(()).assumptions == (
        "compute is 1.19 times slower beside collectives",
        "communicators on one link share its bandwidth",
        "these and the times of launches are those of h100, ib-ndr-400x8, since the cost model "
        "has no machine(groups)",
        "a grouped launch runs its collectives one after the other",
        "copies take as long as on h100",
    )

    class Complete(Constant):
        def machine(self, groups: Mapping[str, Sequence[int]]) -> Machine:
            return Machine()

        def coalesced_us(self, kind: str, sizes_bytes: Sequence[int], ranks: object) -> float:
            return 7.0

        def copy_us(self, size_bytes: int) -> float:
            return 1.0

    assert as_full(Complete(1.0)).errors(()).assumptions == ()


@pytest.mark.parametrize(
    ("cluster", "ranks", "said"),
    [
        (Cluster("h100"), 8, None),
        (Cluster("h100"), 16, "2 nodes of 8 ranks are priced as one, since the cluster has no ne"),
        (Cluster("h100", "ib-ndr-400x8"), 16, None),
        # A rack is one NVLink domain.
        (Cluster("gb200", gpus_per_node=4), 72, None),
        (Cluster("gb200", gpus_per_node=4), 76, "19 nodes of 4 ranks are priced as one"),
        (Cluster("h100", curves=(Curve("all_gather", 2, 8, (9,), (9.0,)),)), 16, None),
    ],
)
def test_nodes_without_a_network_between_them_are_said(
    cluster: Cluster, ranks: int, said: str | None
) -> None:
    errors = ClusterCostModel(cluster).errors([("all_gather", 1000, range(ranks))])
    found = [phrase for phrase in errors.assumptions if "network" in phrase]
    assert [phrase[: len(said)] for phrase in found if said] == [said] * (said is not None)
    assert len(found) == (said is not None)


def test_a_node_without_a_formula_counts_once() -> None:
    model = ClusterCostModel(H100)
    for _ in range(2):
        model.collective_us("broadcast", 1000, range(8))
    assert model.fallbacks == {"broadcast": 1}
