"""One change at a time, whichever API server process an operator's request came to.

Owns:  Changes.
Runs:  in each API server process, on its event loop.

Two changes at once could reach an engine's replicas in two orders, and leave them with different
ones; and who reads edits, adds to them and sets them again would lose what came between.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

#: A waiting change looks again after so long, and is given up after so long.
_POLL_S, MOST_WAIT_S = 0.02, 60.0


class NoTurnError(Exception):
    """Another change has not ended in time."""


class Changes:
    """A lock among the processes of one server. It goes with a process that ends.

    Args:
        folder: gives the folder that they share, and makes it.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._here = asyncio.Lock()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Waits for its turn.

        Raises:
            NoTurnError: it has not come within MOST_WAIT_S.
        """
        try:
            async with asyncio.timeout(MOST_WAIT_S):
                file = await self._take()
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

    async def _take(self) -> int | None:
        await self._here.acquire()
        file = None
        try:
            file = self._opened()
            while file is not None and not _locked(file):
                await asyncio.sleep(_POLL_S)
        except BaseException:
            if file is not None:
                os.close(file)
            self._here.release()
            raise
        return file

    def _opened(self) -> int | None:
        """The file that is locked; None where the disk is full or gone: edits can still be
        cleared, and take turns in this process alone."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            return os.open(self._folder() / "changes", flags, 0o600)
        except OSError as error:
            logger.warning("vllm-scope: changes take no turns among API servers: %s", error)
            return None


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
