"""Protocols of a pool, which starts the processes of several engines.

Owns:  the protocols Pool and Handle, and EngineLostError.
Runs:  nowhere, because this file has only types.
To:    several. `processes.Processes` and `ray_pool.RayPool` implement Pool.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from vllm_scope.errors import ScopeError


class EngineLostError(ScopeError):
    """The process of an engine has ended. A new process can replace the ended process."""


class Handle(Protocol):
    """A Member in a separate process. Several threads can call the Member at the same time."""

    def call(self, method: str, *args: object) -> Future[Any]:
        """Call a method of the Member. Calls can run at the same time, and begin in any order.

        Returns:
            A future with the method's result. If the method raises a ScopeError, the future raises
            the same error. If the method raises another exception, the future raises a ScopeError.
            If the process ends before the method returns, the future raises EngineLostError.

        Raises:
            pickle.PicklingError, AttributeError, TypeError: an argument cannot be pickled.
        """
        ...

    def kill(self) -> None:
        """End the Member's process at once. The process can have ended already."""
        ...


class Pool(Protocol):
    """Starts Members, each in a new process."""

    def start(self, number: int) -> Handle:
        """Start a Member in a new process, as engine `number`. Numbers start at 0.

        A process that replaces a lost process gets the same number. In the pool Processes, it also
        gets the GPUs of the lost process.
        """
        ...

    def close(self) -> None: ...
