"""One server for the folder: a process of its own, as users start it, and its keys."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from benchmarks.server import running
from tests.checkpoints import reference
from tests.conftest import TOYWORLD
from tests.lenses import random_lens
from vllm_scope.client import ScopeClient

API_KEY, OTHER_KEY, ADMIN_KEY = "key-of-one", "key-of-another", "key-of-the-operator"
ROOT = Path(__file__).parents[2]
START_S = 400.0
#: How long a client may take nothing of an answer.
WRITE_TIMEOUT_S = 5
OPTIONS = [
    "--model", str(TOYWORLD), "--served-model-name", "toyworld", "--dtype", "float32",
    "--enforce-eager", "--max-model-len", "512", "--gpu-memory-utilization", "0.3",
    "--api-key", API_KEY, OTHER_KEY, "--disable-uvicorn-access-log",
]  # fmt: skip


@dataclass(frozen=True)
class Server:
    """A running server: where it is, its process, and its log."""

    url: str
    process: psutil.Process
    log: Path
    results: Path

    def client(self, key: str = API_KEY, admin_key: str | None = ADMIN_KEY) -> ScopeClient:
        return ScopeClient(self.url, key, admin_key, timeout=120)

    def http(self, key: str | None = API_KEY) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)

    def memory(self) -> int:
        """Resident bytes of the server's processes."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(process.memory_info().rss for process in family)

    def at_rest(self, seconds: float = 60.0) -> dict:
        """What is held once the last request has ended, or after so long."""
        limit = time.monotonic() + seconds
        with self.client() as client:
            while True:
                load = client.info()["load"]
                if not (load["requests"] or load["pending"]) or time.monotonic() > limit:
                    return load
                time.sleep(0.2)


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[Server]:
    """A server on a free port, with its own folder of results."""
    results, log = folder / "results", folder / "server.log"
    results.mkdir()
    command = [sys.executable, "-m", "tests.server.serve", "serve", *OPTIONS, *options]
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "VLLM_SCOPE_ADMIN_KEY": ADMIN_KEY,
        "VLLM_SCOPE_RESULTS_DIR": str(results),
        "VLLM_SCOPE_ROWS_MIB": "64",
        "VLLM_SCOPE_RESULTS_MIB": "128",
        "VLLM_SCOPE_WRITE_TIMEOUT_S": str(WRITE_TIMEOUT_S),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    } | environment  # fmt: skip
    with running(command, env, log, START_S, 20) as (url, process):
        yield Server(url, process, log, results)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With files to capture into, below `captures`."""
    folder = tmp_path_factory.mktemp("server")
    random_lens("named", [0, 4], 256).save(folder / "named")
    options = ["--additional-config.scope.sinks.filesystem.root", str(folder / "captures"),
               "--additional-config.scope.sinks.filesystem.layout", "per_request",
               "--additional-config.scope.saes.toy", str(TOYWORLD / "sae"),
               "--additional-config.scope.lenses.named", str(folder / "named"),
               "--additional-config.scope.moments_mib", "64"]  # fmt: skip
    with serving(folder, *options) as found:
        yield found
        text = found.log.read_text()
        assert "Exception in ASGI application" not in text, text[-3000:]


@pytest.fixture
def client(server: Server) -> Iterator[ScopeClient]:
    with server.client() as found:
        yield found


@pytest.fixture(scope="package")
def ref():
    return reference(TOYWORLD, torch.float32)
