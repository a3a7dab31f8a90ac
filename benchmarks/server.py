"""A server in a process of its own.

Owns:  Server (memory and CPU of a server's processes), `serving` (starts `vllm serve`), and
       `running` (starts the server of any command).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
API_KEY, ADMIN_KEY = "key-of-a-user", "key-of-the-operator"
START_S = 600.0


@dataclass(frozen=True)
class Server:
    """A running server: its URL, its process, and its log."""

    url: str
    process: psutil.Process
    log: Path

    def memory(self) -> int:
        """Resident bytes of the server's processes, without the shared bytes."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(process.memory_info().rss - process.memory_info().shared for process in family)

    def cpu(self) -> dict[str, float]:
        """The CPU seconds so far of the server's processes, by kind: "api" (API servers), "core"
        (EngineCore), "worker", and "all". If a worker is in EngineCore's process, its CPU seconds
        count as "core"."""
        found = {"api": 0.0, "core": 0.0, "worker": 0.0}
        for process in [self.process, *self.process.children(recursive=True)]:
            times = process.cpu_times()
            found[_kind(process)] += times.user + times.system
        return found | {"all": sum(found.values())}


def _kind(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    if "Worker" in title:
        return "worker"
    # On some machines the titles that vLLM gives its processes cannot be seen. There, a process
    # that uses a GPU counts as EngineCore.
    uses_gpu = "/dev/nvidia" in Path(f"/proc/{process.pid}/maps").read_text()
    return "core" if uses_gpu or "EngineCore" in title else "api"


@contextmanager
def serving(model: Path, options: list[str], log: Path, plugin: bool = True) -> Iterator[Server]:
    """`vllm serve` of a model under the name "model", on a free port.

    Args:
        plugin: False: serve without vllm-scope.
    """
    # The module that `vllm serve` runs with one API server. With vLLM's CPU build, the command
    # itself does not start, because it looks for a Python distribution with another name.
    program = ["vllm.entrypoints.openai.api_server", "--model"]
    if "--api-server-count" in options:
        program = ["vllm.entrypoints.cli.main", "serve"]
    command = [sys.executable, "-m", *program, str(model)]
    command += ["--served-model-name", "model", "--api-key", API_KEY]
    command += ["--disable-uvicorn-access-log", *options]
    env = {"VLLM_SCOPE": str(int(plugin)), "VLLM_SCOPE_ADMIN_KEY": ADMIN_KEY}
    # A signal that ends the benchmark must end its server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with running(command, env, log, START_S, 60) as (url, process):
        yield Server(url, process, log)


@contextmanager
def running(
    command: list[str], environment: dict[str, str], log: Path, start_s: float, end_s: float
) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server on a free port. Yield the server's URL and process when the server answers. At
    the end of the `with` statement, end the server.

    Args:
        environment: environment variables in addition to those of this process.
        start_s, end_s: the most seconds until the server answers, and from SIGTERM to its end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | environment
    # Without this variable, the server makes its own value, as if a shell had started the server.
    env.pop("VLLM_SCOPE_RUN", None)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(process, url, log, start_s)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(end_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path, start_s: float) -> None:
    limit = time.monotonic() + start_s
    while time.monotonic() < limit and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
