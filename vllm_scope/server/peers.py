"""The files by which API server processes tell each other what monitors have found.

Owns:  Peers.
Runs:  in each API server process of a server that has several. A thread writes the file of this
       process at most once a second; `others` reads on any thread.
From:  engine.monitors.

Each request is counted by the process that serves it, but an operator's call reaches one process
only.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_scope.control.background import Background

logger = logging.getLogger("vllm.vllm_scope")
#: Seconds between two writes.
EVERY_S = 1.0


class Peers(Background):
    """One file for each process, in the folder that the processes share.

    Args:
        folder: makes the folder if it is missing, and returns it.
        text: returns the content of this process's file. Called on the thread.
    """

    def __init__(self, folder: Callable[[], Path], text: Callable[[], bytes]) -> None:
        super().__init__("vllm-scope-peers")
        self._folder, self._text = folder, text
        self._name = f"activity.{os.getpid()}"
        self._changed = threading.Event()

    def changed(self) -> None:
        """Let the thread write the file soon. Called on any thread; never waits for a file."""
        self._start()
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            try:
                part = self._folder() / f"part.{self._name}"
                part.write_bytes(self._text())
                part.replace(part.with_name(self._name))
            except OSError as error:
                logger.warning("vllm-scope: counts of monitors are not told: %s", error.strerror)
            time.sleep(EVERY_S)

    def others(self) -> list[bytes]:
        """The newest file of each other process; a file that cannot be read is left out."""
        found = []
        for path in sorted(self._folder().glob("activity.*")):
            if path.name == self._name:
                continue
            try:
                found.append(path.read_bytes())
            except OSError as error:
                logger.warning("vllm-scope: counts of monitors are not read: %s", error.strerror)
        return found
