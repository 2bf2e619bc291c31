"""Compile a three-block Llama on a fake group of 8 in a process of its own, and say what came out.

Run as ``python -m support.compile_llama OUT.json JOB.json`` with the job a dict: ``rank``,
``options`` (keyword arguments of ``io.options``, or null for no plugin), ``fx_cache``. A process
of its own, because cache hits and rank differences show only between processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORLD_SIZE = 8


def compile_llama(
    cache_dir: Path,
    *,
    rank: int = 0,
    options: dict[str, Any] | None = None,
    fx_cache: bool = True,
    hash_seed: int = 0,
    torch_logs: str = "",
) -> dict[str, Any]:
    """Generated code, compute of the fused kernels (us), cache counters, reports, stderr.

    Of one fresh process; code, kernels and reports are those of forward and backward.
    """
    job = {"rank": rank, "options": options, "fx_cache": fx_cache}
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir),
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    if torch_logs:
        environment["TORCH_LOGS"] = torch_logs
    with tempfile.TemporaryDirectory() as folder:
        out, request = Path(folder, "out.json"), Path(folder, "job.json")
        request.write_text(json.dumps(job))
        done = subprocess.run(
            [sys.executable, "-m", "support.compile_llama", str(out), str(request)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr[-8000:]
        return {**json.loads(out.read_text()), "stderr": done.stderr}


def main(out: str, request: str) -> None:
    import torch
    import torch._inductor.config as inductor_config
    from torch._dynamo.utils import counters
    from torch._functorch import config as functorch_config
    from torch._inductor.utils import run_fw_bw_and_get_code
    from torch.distributed.device_mesh import init_device_mesh

    import inductor_overlap as io
    from inductor_overlap.cost_model.simulate import simulate
    from inductor_overlap.models.llama3 import Llama3, Llama3Config
    from inductor_overlap.passes import scheduler
    from support.ranks import fake_process_group

    kernel_us: list[float] = []
    retime = scheduler.retime

    def recording_retime(program: scheduler.Program) -> scheduler.Program:
        kernel_us.append(simulate(program.schedule).compute_us)
        return retime(program)

    scheduler.retime = recording_retime
    job = json.loads(Path(request).read_text())
    torch.set_num_threads(1)
    inductor_config.fx_graph_cache = job["fx_cache"]
    functorch_config.enable_autograd_cache = job["fx_cache"]
    inductor_config.compile_threads = 2
    with fake_process_group(WORLD_SIZE, rank=job["rank"]):
        torch.manual_seed(0)
        config = Llama3Config(
            num_layers=3,
            dim=64,
            num_heads=4,
            num_kv_heads=2,
            vocab_size=128,
            ffn_dim=128,
            max_seq=32,
        )
        model = io.simple_fsdp(Llama3(config), init_device_mesh("cpu", (WORLD_SIZE,)))
        chosen = {} if job["options"] is None else io.options(**job["options"])
        compiled = torch.compile(model, options=chosen, fullgraph=True)
        tokens = torch.randint(0, 128, (2, 16))
        _, codes = run_fw_bw_and_get_code(lambda: compiled(tokens))
        result = {
            "codes": codes,
            "inductor": dict(counters["inductor"]),
            "aot_autograd": dict(counters["aot_autograd"]),
            "kernel_us": kernel_us,
            "reports": [json.loads(report.to_json()) for report in io.reports()],
        }
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
