"""When the thread that launches the model leaves the GIL to the drain thread.

Owns:  Waits.
Runs:  in the worker, where a step's output is made and where it is waited for.
To:    pace (by ScopeWorker.begin_launch and end_launch).

With one GPU, EngineCore and the worker share a thread: it schedules a step, launches it, and waits
for the output of the step before. Only in this wait is it idle. If the drain thread works at any
other time, the next step is launched later by as much. A worker in a process of its own has another
thread that waits for outputs; between two launches the launching thread waits for EngineCore.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Launching(Protocol):
    """What is told when a launch begins and ends: a ScopeWorker."""

    def begin_launch(self) -> None: ...
    def end_launch(self) -> None: ...
    def has_requests(self) -> bool: ...


class Waits:
    """Ends each launch where the launching thread begins to wait.

    Args:
        scope: told of it.
    """

    def __init__(self, scope: Launching) -> None:
        self._scope = scope
        #: True if the thread that launches is the one that waits for outputs; found by the first.
        self._here = False

    def in_output(self, output: Any) -> Any:
        """The output of a launch. The launch ends with it if another thread waits for it, or if it
        is there already; else where this thread waits for it."""
        if not self._here or not hasattr(output, "get_output"):
            self._scope.end_launch()
        if hasattr(output, "get_output"):
            output.get_output = self._waiting(output.get_output, _readiness(output))
        return output

    def _waiting(self, get: Callable[[], Any], is_ready: Callable[[], bool]) -> Callable[[], Any]:
        launcher = threading.get_ident()

        def get_output() -> Any:
            self._here = threading.get_ident() == launcher
            if not self._here or is_ready():
                return get()
            self._scope.end_launch()
            try:
                return get()
            finally:
                if self._scope.has_requests():
                    self._scope.begin_launch()

        return get_output


def _readiness(output: Any) -> Callable[[], bool]:
    """A function that returns True if nobody has to wait for the output. It returns False for an
    output of an unknown kind.
    vllm 0.32, v1/worker/gpu/async_utils.py, AsyncOutput; v1/worker/gpu_model_runner.py,
    AsyncGPUModelRunnerOutput
    """
    for name in ("copy_event", "async_copy_ready_event"):
        event = getattr(output, name, None)
        if event is not None:
            found: Callable[[], bool] = event.query
            return found
    return lambda: False
