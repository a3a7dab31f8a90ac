"""A server in a process of its own, and what is asked of it.

Owns:  Server (its start, its processes' memory, its end), `serving`.
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
    """A running server: where it is, its process, and its log."""

    url: str
    process: psutil.Process
    log: Path

    def memory(self) -> int:
        """Resident bytes of the server's processes, those that they share counted once."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(process.memory_info().rss - process.memory_info().shared for process in family)

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far of "api", "core" and "worker", and "all" of them."""
        found = {"api": 0.0, "core": 0.0, "worker": 0.0}
        for process in [self.process, *self.process.children(recursive=True)]:
            title = " ".join(process.cmdline())
            kind = "core" if "EngineCore" in title else "worker" if "Worker" in title else "api"
            times = process.cpu_times()
            found[kind] += times.user + times.system
        return found | {"all": sum(found.values())}


@contextmanager
def serving(model: Path, options: list[str], log: Path, plugin: bool = True) -> Iterator[Server]:
    """`vllm serve` of a model under the name "model", on a free port.

    Args:
        plugin: False serves without vllm-scope.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What `vllm serve` runs with one API server; the command itself does not start in the
    # CPU build, as it looks for a distribution of another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--api-key", API_KEY, "--disable-uvicorn-access-log", *options]
    env = os.environ | {"VLLM_SCOPE": str(int(plugin)), "VLLM_SCOPE_ADMIN_KEY": ADMIN_KEY}
    env.pop("VLLM_SCOPE_RUN", None)
    # A benchmark that is told to end ends its server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(process, url, log)
        yield Server(url, psutil.Process(process.pid), log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_health(process: subprocess.Popen, url: str, log: Path) -> None:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
