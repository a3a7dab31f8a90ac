"""Files that give each API server process the findings of monitors in the other processes.

Owns:  Peers.
Runs:  in each API server process, if the server has several processes. A thread writes this
       process's file at most one time each second. `others`, which reads the files, can run on any
       thread.
From:  engine.monitors.

Each process counts only the requests that it serves. An operator's request reaches only one
process, and this process needs the counts of all processes for its answer.
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
#: Seconds between two writes of a file.
EVERY_S = 1.0


class Peers(Background):
    """One file for each process, in the folder that the processes share.

    Args:
        folder: a function that returns the folder, and creates the folder if it is missing.
        text: a function that returns the content of this process's file. The thread that writes the
            file calls this function.
    """

    def __init__(self, folder: Callable[[], Path], text: Callable[[], bytes]) -> None:
        super().__init__("vllm-scope-peers")
        self._folder, self._text = folder, text
        self._name = f"activity.{os.getpid()}"
        self._changed = threading.Event()

    def changed(self) -> None:
        """Let the thread write the file soon. Any thread can call this method, which never
        waits."""
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
                logger.warning("vllm-scope: counts of monitors are not written: %s", error.strerror)
            time.sleep(EVERY_S)

    def others(self) -> list[bytes]:
        """The newest content of each other process's file. Unreadable files are left out."""
        found = []
        for path in sorted(self._folder().glob("activity.*")):
            if path.name == self._name:
                continue
            try:
                found.append(path.read_bytes())
            except OSError as error:
                logger.warning("vllm-scope: counts of monitors are not read: %s", error.strerror)
        return found
