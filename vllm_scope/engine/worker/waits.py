"""Lets the drain thread work while the thread that launches the model waits for an output.

Owns:  `leave_the_wait`.
Runs:  in the worker, on the thread that launches the model.
From:  attach.   To: worker.pace, through a LaunchListener.

If EngineCore runs in the worker's process, one thread schedules a step, launches it, and waits for
the output of the step before. The thread needs no GIL while it waits. If the drain thread works at
any other time, the next step is launched later by as much. So a launch, in the sense of
LaunchListener, lasts from the end of one wait to the beginning of the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class LaunchListener(Protocol):
    """A ScopeWorker, which tells the drain thread."""

    def begin_launch(self) -> None: ...
    def end_launch(self, briefly: bool = False) -> None: ...
    def has_requests(self) -> bool: ...


def leave_the_wait(output: Any, listener: LaunchListener) -> Any:
    """End the launch of a step where its output is waited for, and begin the next one after that.
    If the step has no requests with taps, or its output is no asynchronous one, end the launch now.

    Args:
        output: what `sample_tokens` returned.

    Returns:
        The output, whose `get_output` does so.
    """
    if not hasattr(output, "get_output") or not listener.has_requests():
        listener.end_launch()
        return output
    get, is_ready = output.get_output, _readiness(output)

    def get_output() -> Any:
        listener.end_launch(briefly=is_ready())
        try:
            return get()
        finally:
            # Else the output would refer to itself, and the tensors that it holds would live until
            # garbage is collected.
            vars(output).pop("get_output", None)
            if listener.has_requests():
                listener.begin_launch()
            else:
                listener.end_launch()

    output.get_output = get_output
    return output


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
