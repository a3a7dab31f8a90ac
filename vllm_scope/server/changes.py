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
from contextlib import asynccontextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

#: A waiting change looks again after so long, and is given up after so long.
_POLL_S, MOST_WAIT_S = 0.02, 60.0


class NoTurnError(Exception):
    """Another change has not ended in time, or there is nothing to take turns by."""


class Changes:
    """A lock among the processes of one server. It goes with a process that ends.

    Args:
        folder: gives the folder that they share, and makes it.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._here = asyncio.Lock()
        with suppress(OSError):  # now: the disk may be full later
            os.close(self._opened())

    @asynccontextmanager
    async def one(self, clearing: bool = False) -> AsyncIterator[None]:
        """Waits for its turn.

        Args:
            clearing: the change ends edits. Where the disk is full or gone it takes turns in
                this process alone: what harms can always be ended.

        Raises:
            NoTurnError: it has not come within MOST_WAIT_S, or there is no room for what the
                processes take turns by.
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
        """What is locked; None where there is nothing, and it need not be."""
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
        """The file that is locked. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        return os.open(self._folder() / "changes", flags, 0o600)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
