"""One change at a time, whichever API server process an operator's request came to.

Owns:  Changes.
Runs:  in each API server process, on its event loop.

Two changes at once could reach an engine's replicas in two orders, and leave them with different
ones; and who reads edits, adds to them and sets them again would lose what came between.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

#: A waiting change looks again after so long.
_POLL_S = 0.02


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
        """Waits for its turn."""
        async with self._here:
            file = os.open(
                self._folder() / "changes", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600
            )
            try:
                while not _locked(file):
                    await asyncio.sleep(_POLL_S)
                yield
            finally:
                os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
