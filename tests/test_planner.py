"""Planning on a fake group: what is reported, what is refused, what is left as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import fake_process_group
from torch import Tensor, nn

import inductor_overlap as io
from inductor_overlap.models.llama3 import Llama3, Llama3Config
from inductor_overlap.planner import trace_graphs

pytestmark = pytest.mark.quick

BLOCKS = ["tok_embeddings", "layers.*", ["norm", "output"]]
SMALL = Llama3Config(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=128, ffn_dim=128)
# Per block 7 matrices and 2 norms; outside the embedding, a norm and the head.
NUM_PARAMETERS = 2 * 9 + 3


def small_llama() -> nn.Module:
    return Llama3(SMALL)


@pytest.fixture(scope="module")
def trained() -> io.Report:
    return io.plan(small_llama, 8, batch=2, seq=32)


def test_training_is_two_reports(trained: io.Report) -> None:
    backward = trained.backward
    assert backward is not None and backward.backward is None
    assert (trained.name, backward.name) == ("forward", "backward")
    assert trained.num_collectives_before == NUM_PARAMETERS
    # Gathered again, but for the embedding, whose gradient does not read it; one reduction each.
    assert backward.num_collectives_before == (NUM_PARAMETERS - 1) + NUM_PARAMETERS
    for report in (trained, backward):
        assert report.lower_bound_us <= report.after.step_us <= report.before.step_us
        assert report.after.peak_bytes <= report.memory_limit_bytes


def test_memory_that_is_left_keeps_parameters_gathered() -> None:
    plenty = io.plan(
        small_llama, 8, batch=2, seq=32, reshard_after_forward="auto", memory_limit_gb=1.0
    )
    # All that is gathered in backward is kept from forward: only the reductions are left.
    assert plenty.backward is not None
    assert plenty.backward.num_collectives_before == NUM_PARAMETERS


def test_text_and_json_have_both_graphs(trained: io.Report) -> None:
    headings = [line for line in str(trained).splitlines() if line.startswith("inductor-overlap")]
    assert headings == ["inductor-overlap: forward", "inductor-overlap: backward"]
    content = json.loads(trained.to_json())
    assert content["backward"]["name"] == "backward"
    assert "backward" not in content["backward"]


def test_without_a_cluster_it_plans_for_h100s(trained: io.Report) -> None:
    assert trained.prices is not None and "h100" in trained.prices.prices


def test_a_plan_beyond_a_node_says_that_there_is_no_network() -> None:
    report = io.plan(small_llama, 16, batch=1, seq=16, train=False, cluster="h100-nvlink")
    assert "2 nodes of 8 ranks are priced as one, since the cluster has no network" in str(report)


def test_inference_on_two_mesh_dimensions_by_manual_wrap() -> None:
    with fake_process_group(8):
        report = io.plan(
            small_llama, (2, 4), batch=1, seq=16, train=False, wrap=BLOCKS, cluster="a100-ib"
        )
        assert dist.is_initialized()  # a fake group that was there stays
    assert report.backward is None
    assert report.num_collectives_before == NUM_PARAMETERS
    assert report.prices is not None and "a100" in report.prices.prices
    assert {len(bucket.members) for bucket in report.plan.buckets} <= {9, 2}


class Scaled(nn.Module):
    """A model with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.output = nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.table(tokens) * self.scale)


@pytest.mark.parametrize(
    ("mesh_shape", "mode", "reductions"),
    [
        (8, "fully_shard", ["reduce_scatter"]),
        ((2, 4), "hybrid_shard", ["reduce_scatter", "all_reduce"]),
        (8, "replicate", ["all_reduce"]),
        ((2, 4), "replicate", ["all_reduce"]),
    ],
)
def test_every_parameter_is_named_in_every_mode(
    mesh_shape: Any, mode: str, reductions: list[str]
) -> None:
    wrap = ["table", ["output.weight", "scale"]]
    report = io.plan(Scaled, mesh_shape, batch=2, seq=8, mode=mode, wrap=wrap)
    names = {"table.weight", "output.weight", "output.bias", "scale"}
    assert report.backward is not None
    gathered, reduced = report.wire_dtypes, report.backward.wire_dtypes
    assert set(gathered.get("all_gather", {})) == (set() if mode == "replicate" else names)
    assert {kind: set(reduced[kind]) for kind in reductions} == dict.fromkeys(reductions, names)


def test_inference_names_parameters_on_two_mesh_dimensions() -> None:
    report = io.plan(Scaled, (2, 4), batch=2, seq=8, train=False, wrap=[["output.weight", "scale"]])
    assert set(report.wire_dtypes["all_gather"]) >= {"output.weight", "scale"}


@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_a_wrap_list_names_parameters_of_the_model(mode: str) -> None:
    with pytest.raises(io.WrapError, match=r"'outptu' matches no parameter.*'output'"):
        io.plan(Scaled, 8, batch=2, seq=8, mode=mode, wrap=["table", "outptu"])
    assert not dist.is_initialized()


def test_nothing_is_left_behind() -> None:
    compiles: list[Any] = []

    def count(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        compiles.append(gm)
        return gm.forward

    users = small_llama()
    compiled = torch.compile(users, backend=count, fullgraph=True)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    compiled(tokens)
    random_state = torch.get_rng_state()
    io.plan(small_llama, 2, batch=1, seq=4, train=False)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not dist.is_initialized()
    compiled(tokens)
    assert len(compiles) == 1  # the user's code stayed compiled


def test_a_failure_leaves_no_group() -> None:
    def broken() -> nn.Module:
        raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        io.plan(broken, 2, batch=1, seq=4)
    assert not dist.is_initialized()


def test_a_real_group_is_refused() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"fake process group of 8 ranks.*1 ranks.*'gloo'"):
            io.plan(small_llama, 8, batch=1, seq=4)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_a_fake_group_of_another_size_is_refused() -> None:
    with fake_process_group(4), pytest.raises(ValueError, match="of 8 ranks, but a group of 4"):
        io.plan(small_llama, 8, batch=1, seq=4)


@pytest.mark.parametrize(
    ("mesh_shape", "sizes", "message"),
    [
        (0, {"batch": 1, "seq": 4}, "mesh_shape .* got .0,"),
        ((), {"batch": 1, "seq": 4}, "mesh_shape"),
        ((2, 2.0), {"batch": 1, "seq": 4}, "mesh_shape"),
        (2, {"batch": -1, "seq": 4}, "batch must be"),
        (2, {"batch": 1, "seq": True}, "seq must be"),
        ((2, 2, 2), {"batch": 1, "seq": 4}, "mesh"),
    ],
)
def test_sizes_are_checked(mesh_shape: Any, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        io.plan(small_llama, mesh_shape, **sizes)
    assert not dist.is_initialized()


class Detached(nn.Module):
    """A model that nothing can be learned from."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"ids": self.table(tokens).argmax(-1)}


def test_a_model_without_gradients_needs_train_false() -> None:
    with pytest.raises(ValueError, match=r"returned 1 values, none of which.*train=False"):
        io.plan(Detached, 2, batch=1, seq=4)
    report = io.plan(Detached, 2, batch=1, seq=4, train=False)
    assert report.num_collectives_before == 1


class TwoHeads(nn.Module):
    """Returns a tuple and a dict, one value without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 8)
        self.two = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.one(x), {"two": self.two(x), "largest": self.two(x).argmax(-1)}


def test_every_output_with_a_gradient_is_in_the_loss() -> None:
    forward, backward = trace_graphs(lambda: (TwoHeads(), (torch.zeros(3, 4),)))
    assert forward is not backward
    results: Any = backward.graph.output_node().args[0]
    # Weight and bias of both heads.
    assert len([gradient for gradient in results if gradient is not None]) == 4


def test_tracing_is_repeatable() -> None:
    # Dynamo gives a function up after 8 compilations that it still remembers.
    sizes = {
        len(
            trace_graphs(lambda: (nn.Linear(4, 4), (torch.zeros(1, 4),)), train=False)[
                0
            ].graph.nodes
        )
        for _ in range(torch._dynamo.config.recompile_limit + 2)
    }
    assert len(sizes) == 1
