"""Starts the processes of engines by a fork of one process that has imported vLLM (warm_origin).

vLLM spawns EngineCore, and EngineCore spawns the workers. Each spawned process imports vLLM anew,
which takes 13 s. A process that is forked from the origin has the modules at once. In other
respects it is like a spawned process after its imports: no engine, no plugin, one thread.

`use` changes what "spawn" means in this process, in the engines that it starts, and in their
workers. Scripts that tests start as commands spawn as usual.
"""

from __future__ import annotations

import multiprocessing.context as contexts
import os
from multiprocessing import forkserver, reduction
from typing import Any


class _Process(contexts.ForkServerProcess):
    """A process with the environment and the outputs of the process that starts it, as a spawned
    process has. Those of the origin may be others."""

    def __getstate__(self) -> dict[str, Any]:
        # Python calls this method only to send the process to the origin.
        outputs = {number: reduction.DupFd(number) for number in (1, 2)}
        return self.__dict__ | {"_sent": (dict(os.environ), outputs)}

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        environment, outputs = self.__dict__.pop("_sent")
        os.environ.clear()
        os.environ.update(environment)
        for number, sent in outputs.items():
            given = sent.detach()
            os.dup2(given, number)
            os.close(given)
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc]


class _Context(contexts.ForkServerContext):
    _name = "spawn"
    Process = _Process

    def get_start_method(self, allow_none: bool = False) -> str:
        return self._name


def use() -> None:
    """Let processes that are "spawned" from now on be forked from the origin. The first of them
    starts the origin."""
    contexts._concrete_contexts["spawn"] = _Context()  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload(["tests.warm_origin"])


def begin() -> None:
    """As `use`, and start the origin now, so that it imports while this process does other work."""
    use()
    forkserver.ensure_running()
