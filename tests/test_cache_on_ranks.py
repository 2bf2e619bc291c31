"""Ranks that share a folder of caches and start again, with shards of different sizes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

import inductor_overlap as io

pytestmark = [pytest.mark.gloo, pytest.mark.compile]


def compile_and_count(folder: str) -> tuple[int, int, list[int]]:
    """Hits and misses of AOTAutograd's cache, and the shape of this rank's gradient."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    caches: Any = inductor_config.patch(force_disable_caches=False, fx_graph_cache=True)
    with caches, functorch_config.patch(enable_autograd_cache=True):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        layer = io.simple_fsdp(nn.Linear(3, 5, bias=False), mesh)
        compiled = torch.compile(layer, options=io.options(cluster="cpu-gloo"))
        compiled(torch.ones(2, 3)).sum().backward()
    gradient: Any = next(layer.parameters()).grad
    counted = counters["aot_autograd"]
    shape = list(gradient.to_local().shape)
    return counted["autograd_cache_hit"], counted["autograd_cache_miss"], shape


def test_a_second_start_finds_each_rank_its_own_code(tmp_path: Path) -> None:
    """Of five rows one rank has three, the other two."""
    first = run_ranks(compile_and_count, 2, str(tmp_path))
    assert first == [(0, 1, [3, 3]), (0, 1, [2, 3])]
    again = run_ranks(compile_and_count, 2, str(tmp_path))
    assert again == [(1, 0, [3, 3]), (1, 0, [2, 3])]
