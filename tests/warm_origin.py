"""The process that engine processes are forked from. Only the process that `tests.warm_start`
starts imports this module."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from multiprocessing import forkserver

from setproctitle import setproctitle

from tests import warm_start

# The first call finds the memory of the title through the environment, so it comes before a
# variable changes. Forked processes can then set their titles.
setproctitle("the origin of engine processes")
# What the processes of an engine import before the model is loaded.
for name in (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
):
    import_module(name)
warm_start.use()
# A forked process sends its own processes to this origin. Python would start another origin.
forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
# A fork copies only the thread that forks. (OpenBLAS ends its own threads before a fork.)
threads = threading.enumerate()
assert len(threads) == 1, f"a process with these threads cannot be forked: {threads}"
sys.stdout.flush()  # a fork would copy text that is not written yet
