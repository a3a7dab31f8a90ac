"""The process that engine processes are forked from. Only `tests.warm_start` has it imported."""

from __future__ import annotations

import threading
from importlib import import_module
from multiprocessing import forkserver

from setproctitle import setproctitle

from tests import warm_start

# The first call finds the memory of the title, if no variable of the environment has changed yet.
setproctitle("the origin of engine processes")
#: What the processes of an engine import before they make the engine.
for name in (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm_scope.engine.plugin",
):
    import_module(name)
warm_start.use()
# A forked process sends its own processes to this origin. Python would start another origin.
forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
# A fork copies only the thread that forks. (OpenBLAS ends its own threads before a fork.)
threads = threading.enumerate()
assert len(threads) == 1, f"a process with these threads cannot be forked: {threads}"
