"""A lock with which the API server processes of a server make operators' changes one at a time.

Owns:  Changes.
Runs:  in each API server process, on its event loop.

Without the lock, two changes could reach an engine's replicas in different orders, and the replicas
would then differ. Some routes read the server-wide edits, add an edit, and set the result. Without
the lock, a route that reads and then sets the edits would lose a change that another process makes
in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from filelock import AsyncFileLock

logger = logging.getLogger("vllm.vllm_scope")

#: Seconds between two attempts to get the lock, and seconds after which a change that waits for the
#: lock fails.
_POLL_S, MOST_WAIT_S = 0.02, 60.0


class NoTurnError(Exception):
    """Another change has not ended in time, or the lock's file cannot be created."""


class Changes:
    """A lock that the processes of one server share. A process that ends releases the lock.

    Args:
        folder: a function that returns the folder that the processes share, and creates the folder
            if it is missing.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._here = asyncio.Lock()
        with suppress(OSError):  # create the file now, because the disk can be full later
            os.close(os.open(self._file(), os.O_CREAT | os.O_NOFOLLOW, 0o600))

    @asynccontextmanager
    async def one(self, clearing: bool = False) -> AsyncIterator[None]:
        """Hold the lock during the `async with` block.

        Args:
            clearing: True if the change ends edits. If the lock's file cannot be created, a change
                that ends edits waits only for other changes of this process. In this way, an
                operator can end harmful edits even if the disk is full.

        Raises:
            NoTurnError: the lock was not free within MOST_WAIT_S seconds, or the lock's file cannot
                be created and `clearing` is False.
        """
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(MOST_WAIT_S):
                    await held.enter_async_context(self._here)
                    await held.enter_async_context(
                        AsyncFileLock(
                            self._file(), mode=0o600, poll_interval=_POLL_S, run_in_executor=False
                        )
                    )
            except TimeoutError:
                raise NoTurnError(
                    f"another change of this server has not ended within {MOST_WAIT_S:.0f} s; "
                    "check that the engine still answers, then send the request again."
                ) from None
            except OSError as error:
                why = error.strerror or type(error).__name__
                if not clearing:
                    raise NoTurnError(
                        f"changes need a lock in the server's folder of results, which cannot be "
                        f"used ({why}); make room there (VLLM_SCOPE_RESULTS_DIR), then send the "
                        "request again. Edits can be cleared without the folder."
                    ) from None
                logger.warning("vllm-scope: edits are cleared without the lock: %s", why)
            yield

    def _file(self) -> Path:
        return self._folder() / "changes"
