"""Engines on two hosts, which are made of namespaces (`tests.hosts`): a harvest over both, and one
model whose two stages are on different hosts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.engine.test_harvest import command
from tests.engine.test_ray_harvest import (
    MEMORY,
    check_equals_one_engine,
    engines_in,
    env_of_ray,
    write_ids,
)
from tests.hosts import Host, networks_of, two_hosts, why_not

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
LONGEST_S = 400
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@pytest.fixture
def hosts():
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as found:
        yield found


def cluster(hosts: tuple[Host, Host], env: dict[str, str], log: Path) -> str:
    """The address of a Ray cluster of both hosts, with one CPU each."""
    first, second = hosts
    options = ("--num-cpus=1", "--num-gpus=0", "--block", "--disable-usage-stats")
    address = f"{first.address}:6379"
    with log.open("w") as file:
        to = {"stdout": file, "stderr": file, "env": env}
        first.start(
            *RAY, "start", "--head", "--port=6379", f"--node-ip-address={first.address}",
            "--include-dashboard=false", *options, **to,
        )  # fmt: skip
        second.start(
            *RAY, "start", f"--address={address}", f"--node-ip-address={second.address}",
            *options, **to,
        )  # fmt: skip
    script = (
        f"import ray; ray.init({address!r}); "
        "raise SystemExit(len([n for n in ray.nodes() if n['Alive']]) != 2)"
    )
    deadline = time.monotonic() + LONGEST_S
    while first.start(sys.executable, "-c", script, env=env, stderr=subprocess.DEVNULL).wait():
        assert time.monotonic() < deadline, log.read_text()[-4000:]
    return address


def test_a_harvest_over_two_hosts_equals_that_of_one_engine(hosts, tmp_path):
    pytest.importorskip("ray")
    env = env_of_ray(tmp_path)
    dataset, out = write_ids(tmp_path / "ids.jsonl", 900), tmp_path / "out"
    address = cluster(hosts, env, tmp_path / "ray")
    with (tmp_path / "errors").open("w") as errors:
        started = hosts[0].start(
            *command(dataset, out, "--ray-address", address, "--engines", "2", *MEMORY),
            env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    deadline = time.monotonic() + LONGEST_S
    while not list(out.glob("shard-*.safetensors")):
        said = (tmp_path / "errors").read_text()
        assert started.poll() is None and time.monotonic() < deadline, said[-4000:]  # noqa: PT018
        time.sleep(0.01)
    engines = [one.pid for one in engines_in(psutil.process_iter())]
    of_hosts = networks_of([host.pid for host in hosts])
    assert of_hosts <= networks_of(engines)
    started.communicate(timeout=LONGEST_S)
    assert started.returncode == 0, (tmp_path / "errors").read_text()[-4000:]
    check_equals_one_engine(dataset, out, tmp_path / "whole")


def test_rows_and_edits_of_stages_on_two_hosts_equal_hugging_face(hosts, checkpoints, tmp_path):
    first, second = hosts
    env = env_of_ray(tmp_path) | {"VLLM_CPU_KVCACHE_SPACE": "1", "GLOO_SOCKET_IFNAME": first.name}
    path = str(checkpoints("llama"))
    with (tmp_path / "second").open("w") as file:
        second.start(
            sys.executable, "-m", "tests.engine.stages_on_hosts", path, first.address, "1",
            env=env | {"GLOO_SOCKET_IFNAME": second.name}, cwd=ROOT, stdout=file, stderr=file,
        )  # fmt: skip
    run = first.start(
        sys.executable, "-m", "tests.engine.stages_on_hosts", path, first.address, "0",
        env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    printed, errors = run.communicate(timeout=LONGEST_S)
    said = errors[-4000:] + (tmp_path / "second").read_text()[-4000:]
    assert "right rows and edits over shared and tcp\n" in printed, said
