"""Workers that are Ray actors, of both of vLLM's Ray executors, deliver their rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm.envs

ROOT = Path(__file__).parents[2]
#: vLLM had two executors for Ray; the older one went with 0.33.
OF_TWO = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


@pytest.mark.parametrize(
    ("executor_v2", "num_stages", "road", "expected"),
    [
        pytest.param("1", 1, "auto", "shared", id="message-queues-on-one-host"),
        pytest.param("1", 2, "tcp", "tcp", id="message-queues-of-two-stages-over-tcp"),
        pytest.param("0", 1, "tcp", "tcp", id="compiled-graph-over-tcp"),
    ],
)
@pytest.mark.long
def test_rows_of_ray_actors_arrive(executor_v2, num_stages, road, expected, tmp_path):
    pytest.importorskip("ray")
    if executor_v2 == "0" and OF_TWO not in vllm.envs.environment_variables:
        pytest.skip("this vLLM has the executor with message queues alone")
    env = os.environ | {
        # One that vLLM does not know does nothing.
        OF_TWO: executor_v2,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_CACHE_ROOT": vllm.envs.VLLM_CACHE_ROOT,
        "HOME": str(tmp_path),  # where Ray keeps the cluster's token
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.ray_on_cpu", road, str(num_stages)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert f"right rows of {num_stages} over {expected}\n" in run.stdout, run.stderr[-4000:]
