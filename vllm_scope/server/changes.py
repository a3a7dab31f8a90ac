"""A lock: the API server processes of a server make operators' changes one at a time.

Owns:  Changes.
Runs:  in each API server process, on its event loop.

Without the lock, two changes could reach an engine's replicas in different orders, and the replicas
would then differ. Some routes read the edits, extend the edits, and set the result. Without the
lock, such a route would lose a change that another process makes meanwhile.
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

#: Seconds between two attempts to get the lock, and seconds after which a change fails.
_POLL_S, MOST_WAIT_S = 0.02, 60.0


class NoTurnError(Exception):
    """Another change has not ended in time, or the lock's file cannot be created."""


class Changes:
    """A lock among the processes of one server. A process that ends releases the lock.

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
            clearing: True if the change ends edits. If the lock's file cannot be created, such a
                change waits only for changes of this process. Therefore an operator can always end
                harmful edits.

        Raises:
            NoTurnError: the lock was not free within MOST_WAIT_S, or its file cannot be created.
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
