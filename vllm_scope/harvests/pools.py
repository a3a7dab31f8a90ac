"""Protocols of a pool. A pool starts the processes of several engines.

Owns:  the protocols Pool and Handle, and EngineLostError.
Runs:  no code runs: this module has only types.
To:    several. `processes.Processes` and `ray_pool.RayPool` are Pools.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from vllm_scope.errors import ScopeError


class EngineLostError(ScopeError):
    """The process of an engine has ended. Another process can replace it."""


class Handle(Protocol):
    """A Member in a process of its own. Several threads can call it at the same time."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of the Member. Calls can run at the same time, and begin in any order.

        Returns:
            a future with the method's result. If the method raises a ScopeError, the future raises
            this error; for another exception, a ScopeError. If the process ends, EngineLostError.

        Raises:
            pickle.PicklingError, AttributeError, TypeError: an argument cannot be pickled.
        """
        ...

    def kill(self) -> None:
        """End the process at once. If the process has already ended, do nothing."""
        ...


class Pool(Protocol):
    """Starts Members."""

    def start(self, number: int) -> Handle:
        """Start a Member in a new process, on the devices of engine `number`. Numbers start at 0.

        A process that replaces a lost process gets the same number.
        """
        ...

    def close(self) -> None: ...
