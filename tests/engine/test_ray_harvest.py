"""A harvest by two Ray actors, one of which is killed, equals that of one engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import vllm.envs

import vllm_scope
from tests.conftest import TOYWORLD, local_engine
from tests.engine.test_harvest import command, contents, documents
from vllm_scope import Read

ROOT = Path(__file__).parents[2]
LONGEST_S = 500
#: Two of them on a host of 16 GB.
MEMORY = ("--gpu-memory-utilization", "0.1")


def env_of_ray(home: Path) -> dict[str, str]:
    """For processes of a cluster of their own, whose engines run on CPUs."""
    return os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # it is 15, and then engines start late on a busy machine
        "RAY_memory_monitor_refresh_ms": "0",  # it kills actors when others need the memory
        "VLLM_CACHE_ROOT": vllm.envs.VLLM_CACHE_ROOT,
        "HOME": str(home),  # where Ray keeps the cluster's token
    }


def write_ids(path: Path, count: int) -> Path:
    rows = [{"id": f"d{i}", "input_ids": ids} for i, ids in enumerate(documents(count, 60, seed=3))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def check_equals_one_engine(dataset: Path, out: Path, whole: Path) -> dict:
    """The manifest. Each document's rows are bit for bit those of one engine in this process."""
    reads = (Read("resid_post", layers=[1, 2, 3]), Read("embed"))
    with local_engine(
        TOYWORLD, dtype="float32", max_model_len=128, max_num_seqs=64,
        additional_config={"scope": {"sites": ["embed", "resid_post"]}},
    ) as llm:  # fmt: skip
        vllm_scope.harvest(
            dataset, *reads, model=llm, out=whole, long="pack", context=120, progress=False
        )
    assert contents(out) == contents(whole)
    manifest = json.loads((out / "harvest.json").read_text())
    one = json.loads((whole / "harvest.json").read_text())
    assert manifest["complete"]
    assert not list(out.glob(".engines"))
    size = "bytes"  # of the shards' headers too
    assert {**manifest["totals"], size: 0} == {**one["totals"], size: 0}
    return manifest


def engines_in(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that are actors with an engine."""
    found = []
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            if (process.cmdline() or [""])[0].startswith("ray::Member"):
                found.append(process)
    return found


def test_an_actor_that_is_killed_is_replaced_and_every_byte_is_there_once(tmp_path):
    pytest.importorskip("ray")
    dataset, out = write_ids(tmp_path / "ids.jsonl", 1500), tmp_path / "out"
    started = subprocess.Popen(
        command(dataset, out, "--ray", "--engines", "2", *MEMORY),
        cwd=ROOT, env=env_of_ray(tmp_path), stdout=subprocess.PIPE,
        stderr=(tmp_path / "errors").open("w"), text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + LONGEST_S
        while len(list(out.glob("shard-*.safetensors"))) < 3:
            errors = (tmp_path / "errors").read_text()
            assert started.poll() is None and time.monotonic() < deadline, errors[-4000:]  # noqa: PT018
            time.sleep(0.01)
        engines = engines_in(psutil.Process(started.pid).children(recursive=True))
        assert len(engines) == 2
        its = engines[0].children(recursive=True)
        engines[0].kill()
        _, alive = psutil.wait_procs(its, 60)
        assert not alive, "processes of vLLM outlive the actor, and hold its device"
        printed, _ = started.communicate(timeout=LONGEST_S)
    finally:
        started.kill()
    errors = (tmp_path / "errors").read_text()
    assert started.returncode == 0, errors[-4000:]
    assert "was lost (its process ended" in errors
    assert "tokens/s" in errors
    manifest = check_equals_one_engine(dataset, out, tmp_path / "whole")
    assert {"ray", "vllm"} <= manifest["runs"][0]["versions"].keys()
    writers = {re.match(r"shard-(\w+)-", name)[1] for name in manifest["shards"]}
    assert len(writers) >= 2
    assert f"of {manifest['totals']['contexts']:,} contexts were computed now" in printed
    again = subprocess.run(
        command(dataset, out, "--ray", "--engines", "2", *MEMORY, "--quiet"),
        cwd=ROOT, env=env_of_ray(tmp_path), capture_output=True, text=True,
    )  # fmt: skip
    assert "; 0 of" in again.stdout, again.stderr[-4000:]
