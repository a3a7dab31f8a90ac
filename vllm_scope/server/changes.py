"""A lock that lets the API server processes of a server make operators' changes one at a time.

Owns:  Changes.
Runs:  in each API server process, on its event loop.

Without the lock, two changes could reach an engine's replicas in different orders, and the replicas
would then differ. A route that reads the edits, adds to them and sets them would lose a change that
another process makes in between.
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

#: Seconds between two attempts to lock, and seconds after which a change is given up.
_POLL_S, MOST_WAIT_S = 0.02, 60.0


class NoTurnError(Exception):
    """Another change has not ended in time, or the lock's file cannot be made."""


class Changes:
    """A lock among the processes of one server. A process that ends releases the lock.

    Args:
        folder: returns the folder that the processes share; makes the folder if it is missing.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._here = asyncio.Lock()
        with suppress(OSError):  # make the file now, because the disk may be full later
            os.close(os.open(self._file(), os.O_CREAT | os.O_NOFOLLOW, 0o600))

    @asynccontextmanager
    async def one(self, clearing: bool = False) -> AsyncIterator[None]:
        """Hold the lock.

        Args:
            clearing: True if the change ends edits. If the lock's file cannot be made, such
                a change waits only for other changes of this process, so that harmful edits can
                always be ended.

        Raises:
            NoTurnError: the lock was not free within MOST_WAIT_S, or its file cannot be made.
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
                    f"another change of this server has not ended within {MOST_WAIT_S:.0f} s; see "
                    "whether its engine still answers, and send this again."
                ) from None
            except OSError as error:
                why = error.strerror or type(error).__name__
                if not clearing:
                    raise NoTurnError(
                        f"the server's folder of results cannot be used ({why}), by which its "
                        "processes take turns; make room there (VLLM_SCOPE_RESULTS_DIR), and send "
                        "this again. Edits can be cleared all the same."
                    ) from None
                logger.warning("vllm-scope: edits are cleared out of turn: %s", why)
            yield

    def _file(self) -> Path:
        return self._folder() / "changes"
