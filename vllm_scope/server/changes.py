"""A lock, so that the API server processes of a server make operators' changes one at a time.

Owns:  Changes.
Runs:  in each API server process, on its event loop.

Without it, two changes could reach an engine's replicas in different orders and leave them
different; and a route that reads edits, adds to them and sets them would lose a change between.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

#: Seconds between two attempts to lock, and until a change is given up.
_POLL_S, MOST_WAIT_S = 0.02, 60.0


class NoTurnError(Exception):
    """Another change has not ended in time, or the lock's file cannot be made."""


class Changes:
    """A lock among the processes of one server. A process that ends releases it.

    Args:
        folder: returns the folder that the processes share, and makes it.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._here = asyncio.Lock()
        with suppress(OSError):  # now: the disk may be full later
            os.close(self._opened())

    @asynccontextmanager
    async def one(self, clearing: bool = False) -> AsyncIterator[None]:
        """Hold the lock.

        Args:
            clearing: the change ends edits. If the lock's file cannot be made, only this
                process takes turns: edits that do harm can always be ended.

        Raises:
            NoTurnError: the lock was not free within MOST_WAIT_S, or its file cannot be made.
        """
        try:
            async with asyncio.timeout(MOST_WAIT_S):
                file = await self._take(clearing)
        except TimeoutError:
            raise NoTurnError(
                f"another change of this server has not ended within {MOST_WAIT_S:.0f} s; see "
                "whether its engine still answers, and send this again."
            ) from None
        try:
            yield
        finally:
            if file is not None:
                os.close(file)
            self._here.release()

    async def _take(self, clearing: bool) -> int | None:
        await self._here.acquire()
        file = None
        try:
            file = self._file(clearing)
            while file is not None and not _locked(file):
                await asyncio.sleep(_POLL_S)
        except BaseException:
            if file is not None:
                os.close(file)
            self._here.release()
            raise
        return file

    def _file(self, clearing: bool) -> int | None:
        """The lock's file; None if it cannot be made and `clearing` is set."""
        try:
            return self._opened()
        except OSError as error:
            why = error.strerror or type(error).__name__
        if not clearing:
            raise NoTurnError(
                f"the server's folder of results cannot be used ({why}), by which its processes "
                "take turns; make room there (VLLM_SCOPE_RESULTS_DIR), and send this again. Edits "
                "can be cleared all the same."
            )
        logger.warning("vllm-scope: edits are cleared out of turn: %s", why)
        return None

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        return os.open(self._folder() / "changes", flags, 0o600)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
