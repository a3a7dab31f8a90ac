"""Starts the processes of engines by a fork of one process that has imported vLLM (warm_origin).

vLLM spawns EngineCore, and EngineCore spawns the workers. Each spawned process imports vLLM anew,
which takes 13 s. A process that is forked from the origin has the modules at once.

`use` changes what "spawn" means in this process, in the engines that it starts, and in their
workers. In a `cold` block it has its usual meaning. Servers, and scripts that tests start as
commands, spawn as usual.

A forked process has the environment, the outputs and the number of OpenMP threads that a spawned
process would have. It differs in these points: all processes have the same hash seed; their parent
is the origin; no worker is bound to a core, so that two parts of the suite share two cores.
"""

from __future__ import annotations

import atexit
import multiprocessing.context as contexts
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, reduction
from typing import Any

_cold = contexts._concrete_contexts["spawn"]  # type: ignore[attr-defined]


class _State:
    """The environment and the outputs of the process that starts another process. The new process
    gets them when it unpickles this object."""

    def __getstate__(self) -> tuple[dict[str, str], dict[int, Any]]:
        return dict(os.environ), {number: reduction.DupFd(number) for number in (1, 2)}

    def __setstate__(self, state: tuple[dict[str, str], dict[int, Any]]) -> None:
        environment, outputs = state
        os.environ.clear()
        os.environ.update(environment)
        for number, sent in outputs.items():
            given = sent.detach()
            os.dup2(given, number)
            os.close(given)
        # vLLM sets this variable for a worker. OpenMP, which the origin has loaded, read it then.
        threads = environment.get("OMP_NUM_THREADS")
        if threads is not None:
            import torch

            torch.set_num_threads(int(threads))


class _Process(contexts.ForkServerProcess):
    _start_method = "spawn"

    def __getstate__(self) -> dict[str, Any]:
        # The first entry: it is unpickled before the arguments, whose modules read the environment.
        return {"_state": _State(), **self.__dict__}

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        # If the origin could not import this module, the processes would import everything anew.
        assert "tests.warm_origin" in sys.modules, "the origin has not imported tests.warm_origin"
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        atexit._run_exitfuncs()  # as at the end of a spawned process
        return code


class _Context(contexts.ForkServerContext):
    _name = "spawn"
    Process = _Process


def use() -> None:
    """From now on, the processes that vLLM would spawn are forked from the origin. The origin
    starts together with the first such process."""
    contexts._concrete_contexts["spawn"] = _Context()  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload(["tests.warm_origin"])


@contextmanager
def cold() -> Iterator[None]:
    """Spawn in this block, as users' engines do."""
    every = contexts._concrete_contexts  # type: ignore[attr-defined]
    before, every["spawn"] = every["spawn"], _cold
    try:
        yield
    finally:
        every["spawn"] = before
