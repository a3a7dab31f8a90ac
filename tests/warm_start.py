"""Starts the processes of engines by a fork of one process that has imported vLLM.

vLLM spawns EngineCore, and EngineCore spawns the workers. A spawned process imports vLLM anew, which
takes 13 s. A process that is forked from a process with these modules has them at once, and is in
the same state as a spawned process after its imports: no engine, no plugin, one thread.

`use` makes this the meaning of "spawn" in this process, in the engines that it starts, and in their
workers. Servers and scripts, which tests start as commands, spawn as usual.
"""

from __future__ import annotations

import multiprocessing.context as contexts
import os
import sys
import threading
from multiprocessing import forkserver, reduction
from typing import Any

#: What an engine's processes import before they make the engine.
MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm_scope.engine.plugin",
)


class _Process(contexts.ForkServerProcess):
    """A process that has the environment and the output of the process that starts it, as a
    spawned process has. By default it would have those of the process that it is forked from."""

    def __getstate__(self) -> dict[str, Any]:
        # Called only while the process is sent. The standard streams go with it.
        outputs = {fd: reduction.DupFd(fd) for fd in (1, 2)}
        return self.__dict__ | {"_sent": (dict(os.environ), outputs)}

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        environment, outputs = self.__dict__.pop("_sent")
        os.environ.clear()
        os.environ.update(environment)
        for fd, sent in outputs.items():
            given = sent.detach()
            os.dup2(given, fd)
            os.close(given)
        return super()._bootstrap(parent_sentinel)


class _Context(contexts.ForkServerContext):
    _name = "spawn"
    Process = _Process

    def get_start_method(self, allow_none: bool = False) -> str:
        return self._name


def use() -> None:
    """Let `multiprocessing.get_context("spawn")` return a context that forks."""
    contexts._concrete_contexts["spawn"] = _Context()  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload([__name__])


def _be_the_origin() -> None:
    """Import the modules. This is the process that all others are forked from."""
    for name in MODULES:
        __import__(name)
    use()
    # A forked process asks this process for its own workers. `ensure_running` would start another.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    # OpenBLAS has threads too, and stops them before a fork.
    threads = threading.enumerate()
    assert len(threads) == 1, f"a process with the threads {threads} cannot be forked"


if "pytest" not in sys.modules:
    _be_the_origin()
