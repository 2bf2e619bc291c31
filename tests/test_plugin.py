"""The plugin's hooks: options, enable and disable, other libraries' passes, identities."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.fx as fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

import inductor_overlap as io
from inductor_overlap import inductor_passes, plugin

pytestmark = pytest.mark.quick

HOOKS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_post_pass",
)
SCHEDULER_HOOK = "_post_fusion_custom_pass"
PARTITIONER_HOOK = "custom_partitioner_fn"


class OtherPass(CustomGraphPass):
    """A pass of another library."""

    def __call__(self, graph: fx.Graph) -> None: ...

    def uuid(self) -> str:
        return "other"


class OtherSchedulerPass:
    def __call__(self, nodes: list[Any]) -> list[Any]:
        return nodes[::-1]


class CostsOneMicrosecond:
    """A cost model without identity."""

    def compute_us(self, node: fx.Node) -> float:
        return 1.0

    def collective_us(self, kind: str, size_bytes: int, ranks: Any) -> float:
        return 1.0


class Identified(CostsOneMicrosecond):
    def uuid(self) -> str:
        return "one"


@pytest.fixture(autouse=True)
def clean_config() -> Iterator[None]:
    with inductor_config.patch(dict.fromkeys((*HOOKS, SCHEDULER_HOOK, PARTITIONER_HOOK))):
        yield
        io.disable()


def hooks() -> dict[str, Any]:
    return {key: getattr(inductor_config, key) for key in (*HOOKS, SCHEDULER_HOOK)}


def test_options_name_inductor_keys_only() -> None:
    options = io.options()
    assert set(options) >= {*HOOKS, SCHEDULER_HOOK}
    assert set(options) <= set(inductor_config.get_config_copy())
    assert not any(hooks().values()), "options() must not change the process-wide configuration"


def test_options_keep_passes_that_are_there() -> None:
    other = OtherPass()
    with inductor_config.patch(post_grad_custom_post_pass=other):
        first, second = io.options()["post_grad_custom_post_pass"]
    assert first is other
    assert isinstance(second, inductor_passes.OverlapGraph)


def test_a_scheduler_pass_that_is_there_runs_first() -> None:
    with inductor_config.patch({SCHEDULER_HOOK: OtherSchedulerPass()}):
        chained = io.options(wrap="none")[SCHEDULER_HOOK]
    assert isinstance(chained, inductor_passes.OverlapScheduler)
    assert chained([1, 2, 3]) == [3, 2, 1]


def test_a_scheduler_pass_without_identity_keeps_graphs_out_of_the_cache() -> None:
    """Inductor itself refuses to cache with such a pass; ours in front must not hide it."""
    with inductor_config.patch({SCHEDULER_HOOK: OtherSchedulerPass()}):
        options = io.options()
    assert options["post_grad_custom_post_pass"][0].uuid() is None
    assert options[SCHEDULER_HOOK].uuid() is None


def test_enable_sets_what_options_sets_and_disable_takes_it_back() -> None:
    other = OtherPass()
    inductor_config.post_grad_custom_post_pass = other  # type: ignore[assignment]
    io.enable(wrap="greedy")
    assert [type(p) for p in hooks()["post_grad_custom_post_pass"]] == [
        OtherPass,
        inductor_passes.OverlapGraph,
    ]
    io.disable()
    assert hooks() == {
        "pre_grad_custom_pass": None,
        "joint_custom_pre_pass": None,
        "joint_custom_post_pass": None,
        "post_grad_custom_post_pass": [other],
        SCHEDULER_HOOK: None,
    }


def test_enable_twice_replaces_the_settings() -> None:
    io.enable(wrap="greedy")
    io.enable(wrap="none")
    (ours,) = hooks()["post_grad_custom_post_pass"]
    assert ours.settings.wrap == "none"


def test_disable_without_enable_changes_nothing() -> None:
    before = hooks()
    io.disable()
    assert hooks() == before


def test_disable_keeps_what_others_added_later() -> None:
    io.enable()
    other = OtherPass()
    inductor_config.post_grad_custom_post_pass = [  # type: ignore[assignment]
        *hooks()["post_grad_custom_post_pass"],
        other,
    ]
    io.disable()
    assert hooks()["post_grad_custom_post_pass"] == [other]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_passes_are_copied_with_their_identity(copied: Any) -> None:
    options = io.options(wrap=["layers.*", ["norm", "output"]], cluster="a100-ib")
    for key in HOOKS:
        (ours,) = options[key]
        assert copied(ours).uuid() == ours.uuid()
    scheduler = options[SCHEDULER_HOOK]
    assert copied(scheduler).uuid() == scheduler.uuid()


def identity(**options: Any) -> str | None:
    (ours,) = io.options(**options)["post_grad_custom_post_pass"]
    return ours.uuid()


def test_every_setting_is_part_of_the_identity() -> None:
    variants = [
        {},
        {"wrap": "greedy"},
        {"wrap": ["layers.*"]},
        {"wrap": [["layers.*"]]},
        {"cluster": "h100-ib"},
        {"cluster": io.Cluster(gpu="h100", network="ib-ndr-400x4")},
        {"memory_limit_gb": 3.0},
        {"reshard_after_forward": False},
        {"reshard_after_forward": "auto"},
        {"cost_model": Identified()},
    ]
    identities = [identity(**variant) for variant in variants]
    assert None not in identities
    assert len(set(identities)) == len(variants)
    assert identity(wrap="auto") == identity()


class OtherPartitioner(CustomPartitionerFn):
    """Another library's, which is asked instead of Inductor's own."""

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        raise AssertionError("only its identity is asked for here")

    def uuid(self) -> str:
        return "other partitioner"


def test_keeping_parameters_gathered_needs_the_partitioner_and_chains_it() -> None:
    other = OtherPartitioner()
    with inductor_config.patch(custom_partitioner_fn=other):
        assert PARTITIONER_HOOK not in io.options()
        ours = io.options(reshard_after_forward="auto")[PARTITIONER_HOOK]
        assert ours.earlier is other
        for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert copied.uuid() == ours.uuid() is not None
        io.enable(reshard_after_forward="auto")
        assert isinstance(io.options()[PARTITIONER_HOOK], OtherPartitioner)
        io.disable()
        assert isinstance(inductor_config.custom_partitioner_fn, OtherPartitioner)


def test_a_cost_model_without_uuid_has_no_identity(caplog: pytest.LogCaptureFixture) -> None:
    assert identity(cost_model=CostsOneMicrosecond()) is None
    assert "has no uuid()" in caplog.text


def test_the_passes_have_different_identities() -> None:
    options = io.options()
    found = [options[key][0].uuid() for key in HOOKS]
    assert len({*found, options[SCHEDULER_HOOK].uuid()}) == len(HOOKS) + 1


def test_a_missing_hook_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {k: v for k, v in inductor_config.get_config_copy().items() if k != SCHEDULER_HOOK}
    monkeypatch.setattr(plugin, "_known_options", lambda: known)
    with pytest.raises(plugin.PluginError, match=rf"{torch.__version__[:4]}.*{SCHEDULER_HOOK}"):
        io.options()


def test_competing_passes_of_newer_versions_are_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    competing = "aten_distributed_optimizations.enable_simple_overlap"
    known = {**inductor_config.get_config_copy(), competing: True}
    monkeypatch.setattr(plugin, "_known_options", lambda: known)
    assert io.options()[competing] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrap": "best"}, r'wrap must be "auto", "greedy", "none" or a list.*\'best\''),
        ({"wrap": []}, "empty list"),
        ({"wrap": ["layers.*", 3]}, "a wrap entry is a module FQN pattern.*got 3"),
        ({"wrap": ["layers.[5-2]"]}, "range .5-2. is empty"),
        ({"wrap": ["layers.["]}, "cannot read the wrap pattern"),
        ({"memory_limit_gb": 0}, "memory_limit_gb must be a positive number.*got 0"),
        ({"memory_limit_gb": float("nan")}, "memory_limit_gb must be a positive number"),
        ({"memory_limit_gb": "4"}, "memory_limit_gb must be a positive number"),
        ({"cluster": "h100-ibb"}, "h100-ib"),
        ({"cluster": "h100-ib", "cost_model": Identified()}, "two sources"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward must be True"),
        ({"cost_model": object()}, "compute_us"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        io.options(**options)


def test_the_backend_is_registered() -> None:
    assert "inductor_overlap" in torch._dynamo.list_backends()
