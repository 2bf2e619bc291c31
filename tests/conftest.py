"""What holds for every test: threads, caches, and the state that torch keeps between tests.

The environment is set before torch is imported, and processes that tests start inherit it.
Compiled C++ is shared by all workers of a session, in a folder that goes with it. Compiled graphs
are not taken from Inductor's cache unless a test asks for that: a graph that another test or rank
compiled before would have no report.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT"] = "0"

_CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"

# Examples are the same in every run: a failure is found by everybody, and a pass is no luck.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if not _is_worker(config):
        os.environ[_CACHE_DIR] = tempfile.mkdtemp(prefix="inductor-overlap-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _is_worker(config):
        shutil.rmtree(os.environ.pop(_CACHE_DIR), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with compiles and ranks first: a long file that starts last runs alone."""
    slow = {item.path for item in items if item.get_closest_marker("quick") is None}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_torch() -> Iterator[None]:
    """Leaves no process group, no compiled code and no installed plugin to the next test."""
    yield
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if "inductor_overlap" in sys.modules:
        sys.modules["inductor_overlap"].disable()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four faked ranks, data parallel."""
    yield from _faked_mesh((4,), ("dp",))


@pytest.fixture
def mesh_2d() -> Iterator[DeviceMesh]:
    """Two by two faked ranks, data parallel and tensor parallel."""
    yield from _faked_mesh((2, 2), ("dp", "tp"))


def _faked_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Iterator[DeviceMesh]:
    from support.ranks import fake_process_group
    from torch.distributed.device_mesh import init_device_mesh

    with fake_process_group(4):
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
