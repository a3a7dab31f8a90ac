"""Protocols of a pool, which starts the processes of several engines.

Owns:  the protocols Pool and Handle, and EngineLostError.
Runs:  nowhere: only types.
To:    several. `processes.Processes` and `ray_pool.RayPool` are Pools.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from vllm_scope.errors import ScopeError


class EngineLostError(ScopeError):
    """The process of an engine is gone; another process can take its place."""


class Handle(Protocol):
    """A Member in a process of its own. Safe to call from several threads."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of the Member. Calls may run at the same time, and begin in any order.

        Returns:
            a future. It has the method's result, or raises: the method's ScopeError, a ScopeError
            in place of another exception of the method, or EngineLostError.

        Raises:
            pickle.PicklingError, AttributeError, TypeError: an argument cannot be pickled.
        """
        ...

    def kill(self) -> None:
        """End the process at once. Nothing is raised if the process has ended before."""
        ...


class Pool(Protocol):
    """Starts Members."""

    def start(self, number: int) -> Handle:
        """Start a Member in a new process, on the devices of engine `number`; numbers start at 0.

        A process that takes the place of a lost one gets the lost one's number.
        """
        ...

    def close(self) -> None: ...
