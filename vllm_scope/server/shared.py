"""The operator's monitors, as a text that all API server processes of a server share.

Owns:  Shared.
Runs:  in each API server process. The process calls `set` while it holds the lock of `changes`, and
       calls `news` for each request.
To:    engine.monitors.

EngineCore stores modules and server-wide edits for all processes. But the front-end adds monitors
to requests, therefore every API server process needs the monitors.

Promise: after `set` has returned, the next call of `news` in every process returns the text.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("vllm.vllm_scope")


class Shared:
    """A file in the folder that the server's processes share. The caller makes one call at a time.

    Args:
        folder: a function that returns the folder, and creates the folder if it is missing.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self.folder = folder
        self._path = folder() / "monitors"
        #: When the text that `news` last returned was set (the file's time), in nanoseconds.
        self._seen = 0

    def set(self, text: bytes) -> None:
        """Replace the text. If the write fails, the earlier text stays, and OSError is raised."""
        part = self.folder() / f"monitors.{os.getpid()}"
        part.write_bytes(text)
        # The file system can give the same time to two changes within some milliseconds. Therefore
        # this method sets the time of the file.
        os.utime(part, ns=(0, time.time_ns()))
        part.replace(self._path)

    def news(self) -> bytes | None:
        """The text, if a process has set a text since the last call of `news`; otherwise None. If
        there is no new text, the call takes a microsecond."""
        try:
            at = self._path.stat().st_mtime_ns
            if at == self._seen:
                return None
            text = self._path.read_bytes()
        except FileNotFoundError:  # nothing was set, or a program that cleans /tmp removed the file
            return None
        except OSError as error:
            logger.warning("vllm-scope: new monitors cannot be read: %s", error.strerror)
            return None
        self._seen = at
        return text
