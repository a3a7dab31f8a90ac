"""What starts the processes of several engines.

Owns:  the protocols Pool and Handle, and EngineLostError.
Runs:  nowhere: only types.
To:    several. `processes.Processes` and `ray_pool.RayPool` are Pools.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from vllm_scope.errors import ScopeError


class EngineLostError(ScopeError):
    """The process of an engine is gone; another one can take its place."""


class Handle(Protocol):
    """A Member in a process of its own. Safe to call from several threads."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method there. Calls may run at the same time, and begin in any order.

        Returns:
            a future. It raises what the method raised, or EngineLostError.

        Raises:
            pickle.PicklingError, AttributeError, TypeError: an argument cannot travel.
        """
        ...

    def kill(self) -> None:
        """End the process at once; nothing is raised if it has ended."""
        ...


class Pool(Protocol):
    """Starts Members."""

    def start(self, number: int) -> Handle:
        """A new process, on the devices of the given number of an engine, from 0.

        A process that was lost has the number of the one that takes its place.
        """
        ...

    def close(self) -> None: ...
