"""Live bytes of this process's CPU tensors, and their peak.

A dispatch mode would miss what matters here: the code that Inductor generates allocates its buffers
past the dispatcher, and FSDP2 resizes storages in place. So the count is taken where all of them
end: in torch's CPU allocator, which is replaced by one that counts (``loopback_memory.cpp``).
Blocks allocated before `LiveBytes` was made are not counted, neither then nor when they die.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch.utils.cpp_extension import include_paths, library_paths

_SOURCE = Path(__file__).with_suffix(".cpp")


def build_allocator(folder: Path) -> Path:
    """Compiles the counting allocator into `folder` and returns the library.

    Raises:
        RuntimeError: The compiler failed; the message holds what it said.
    """
    library = folder / "loopback_memory.so"
    abi = int(torch.compiled_with_cxx11_abi())
    command = [get_cpp_compiler(), "-O2", "-std=c++20", "-shared", "-fPIC"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-I{path}" for path in include_paths("cpu"))]
    command += [str(_SOURCE), "-o", str(library)]
    command += [*(f"-L{path}" for path in library_paths("cpu")), "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the counting allocator does not compile:\n{done.stderr}")
    return library


class LiveBytes:
    """Counts from now on; make one per process, before the tensors that are to be counted."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("live_bytes", "peak_bytes"):
            getattr(self._library, name).restype = ctypes.c_longlong
        self._library.count_allocations()

    @property
    def now_bytes(self) -> int:
        return self._library.live_bytes()

    @property
    def peak_bytes(self) -> int:
        """The most live bytes since `restart`."""
        return self._library.peak_bytes()

    def restart(self) -> None:
        """Forgets the peak: it is what lives now."""
        self._library.restart_peak()
