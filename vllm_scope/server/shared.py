"""The operator's monitors as a text, which the API server processes of a server share.

Owns:  Shared.
Runs:  in each API server process: `set` while the process holds the lock of `changes`, `news` for
       each request.
To:    engine.monitors.

EngineCore holds modules and server-wide edits for all processes. The front-end adds monitors to
requests, so every process needs the monitors.

Promise: when `set` has returned, the next `news` of every process returns the text.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("vllm.vllm_scope")


class Shared:
    """A file in the folder of the server's processes. The caller serialises the calls.

    Args:
        folder: makes the folder if it is missing, and returns it.

    Attributes:
        folder: as given.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self.folder = folder
        self._path = folder() / "monitors"
        #: Time (in ns) at which the text that `news` returned last was set.
        self._seen = 0

    def set(self, text: bytes) -> None:
        """Replace the text. Raises OSError if it cannot be written; then the earlier text stays."""
        part = self.folder() / f"monitors.{os.getpid()}"
        part.write_bytes(text)
        # The file system's own time may be equal for two changes within some milliseconds.
        os.utime(part, ns=(0, time.time_ns()))
        part.replace(self._path)

    def news(self) -> bytes | None:
        """The text, if it was set since the last call; else None. Takes a microsecond."""
        try:
            at = self._path.stat().st_mtime_ns
            if at == self._seen:
                return None
            text = self._path.read_bytes()
        except FileNotFoundError:  # nothing was set, or a program that cleans /tmp removed the file
            return None
        except OSError as error:
            logger.warning("vllm-scope: monitors cannot be read and stay: %s", error.strerror)
            return None
        self._seen = at
        return text
